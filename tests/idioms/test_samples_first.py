"""Nets in which samples stand in front of time: [N, T, ...], and [N * T, ...] where convolutions are torch's own."""

import copy

import pytest
import torch
from defined import given, same
from idioms.miniatures import by_hand
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

import sj_tac

T, N, C = 6, 4, 8
SPIKE = surrogate.ATan()


class Leaky(nn.Module):
    """As published ones over [N, T, ...] are: a loop over dimension 1."""

    def __init__(self, threshold=0.4, tau=0.5):
        super().__init__()
        self.threshold, self.tau = threshold, tau

    def forward(self, x):
        membrane, spikes = 0, []
        for t in range(x.shape[1]):
            membrane = membrane * self.tau + x[:, t, ...]
            spike = SPIKE(membrane - self.threshold)
            membrane = (1 - spike) * membrane
            spikes.append(spike)
        return torch.stack(spikes, dim=1)


class Declared(Leaky):
    """Registered as a neuron over [T, N, ...], which it is not."""

    def forward(self, x):
        return super().forward(x) * 1


sj_tac.register_neuron(Leaky, decay=lambda m: m.tau, batch_first=True)
sj_tac.register_neuron(Declared, decay=0.5)


def lif():
    return neuron.LIFNode(tau=2.0, v_threshold=0.2, step_mode="m").train()


class Folding(nn.Module):
    """Convolution and norm on [N * T, ...], as the published wrappers fold."""

    def __init__(self, *modules):
        super().__init__()
        self.inner = nn.Sequential(*modules)

    def forward(self, x):
        n, t = x.shape[:2]
        y = self.inner(x.flatten(0, 1).contiguous())
        return y.view(n, t, *y.shape[1:])


def folding(before):
    return Folding(nn.Conv2d(before, C, 3, padding=1), nn.BatchNorm2d(C))


class Own(nn.Module):
    """Everything over [N, T, ...], with a neuron of one's own."""

    def __init__(self, kind=Leaky):
        super().__init__()
        self.net = nn.Sequential(
            folding(2), kind(), folding(C), kind(), Folding(nn.AvgPool2d(2)), folding(C), kind(), nn.Flatten(2)
        )
        self.head = nn.Linear(C * 9, 5)

    def forward(self, x):
        return self.head(self.net(x))


class Turning(nn.Module):
    """SpikingJelly's neurons over [T, N, ...], all else over [N, T, ...]."""

    swap = staticmethod(lambda x: x.transpose(0, 1))

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = folding(2), folding(C), folding(C)
        self.lif1, self.lif2, self.lif3 = lif(), lif(), lif()

    def forward(self, x):
        x = self.swap(self.lif1(self.swap(self.conv1(x))))
        x = self.swap(self.lif2(self.swap(self.conv2(x) * 0.9)))
        return self.lif3(self.swap(self.conv3(x)))


class FoldedBySteps(nn.Module):
    """Folded one way for the first convolution, and the other for the second."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.lif1 = nn.Conv2d(2, C, 3, padding=1), nn.BatchNorm2d(C), lif()
        self.conv2, self.bn2, self.lif2 = nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C), lif()

    def forward(self, x):
        n, t = x.shape[:2]
        x = self.lif1(self.bn1(self.conv1(x.flatten(0, 1))).unflatten(0, (n, t)).transpose(0, 1))
        return self.lif2(self.bn2(self.conv2(x.flatten(0, 1))).unflatten(0, (t, n)))


class Layers(nn.Module):
    """SpikingJelly's own layers, which fold the first two dimensions whatever they are."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = layer.Conv2d(2, C, 3, padding=1), layer.BatchNorm2d(C)
        self.conv2 = layer.SeqToANNContainer(nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C))
        self.lif1, self.lif2 = lif(), lif()
        functional.set_step_mode(self, "m")

    def forward(self, x):
        x = self.lif1(self.bn1(self.conv1(x)).transpose(0, 1))
        return self.lif2(self.conv2(x.transpose(0, 1)).transpose(0, 1))


NETS = [Own, Turning, FoldedBySteps, Layers]


def frames(steps=T, batch=N):
    torch.manual_seed(3)
    return (torch.rand(batch, steps, 2, 6, 6) < 0.4).double()


def made(kind):
    torch.manual_seed(1)
    return kind().double().train()


def defined(net, k, batch=N):
    """A copy of the net whose convolutions read weighted means, wherever time stands."""
    convs = {name: m for name, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    folds = {name: None if type(m) is layer.Conv2d else (batch, -1) for name, m in convs.items()}
    stepwise = {"conv2": (-1, batch)} if isinstance(net, FoldedBySteps) else {}
    return by_hand(by_hand(net, k, {n: fold for n, fold in folds.items() if n not in stepwise}, 1), k, stepwise)


def compare(converted, wanted, x):
    expected = given(wanted, x)
    same(given(converted, x), expected, rtol=1e-7)
    return expected["output 0"]


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("k", "fuse"), [(2, True), (4, False)])
def test_each_group_is_of_one_samples_steps(kind, fuse, k):
    net = made(kind)
    converted = sj_tac.convert(copy.deepcopy(net), k=k, fuse=fuse, example_input=frames())
    report = sj_tac.report(converted)
    assert len(report.converted) == sum(isinstance(m, nn.Conv2d) for m in net.modules())
    groups = -(-T // k)
    assert all(v.macs_after * T == v.macs_before * groups for v in sj_tac.plan(net, k=k, example_input=frames()))
    out = compare(converted, defined(net, k), frames())
    assert issubclass(kind, Own) or 0.05 < out.mean() < 0.6
    # Other T and N, a shorter group at the end; T = N, which the sample could not have told.
    for steps, batch in ((7, 3), (5, 5)):
        converted.load_state_dict(net.state_dict())
        compare(converted, defined(net, k, batch), frames(steps, batch))


@pytest.mark.parametrize("kind", [Own, Turning], ids=lambda kind: kind.__name__)
def test_back_again(kind):
    net, x = made(kind), frames()
    wanted = given(copy.deepcopy(net), x)
    converted = sj_tac.convert(copy.deepcopy(net), k=2, example_input=x)
    assert list(converted.state_dict()) == list(net.state_dict())
    other = copy.deepcopy(converted)
    sj_tac.set_k(other, 3)
    compare(other, defined(net, 3), x)
    restored = sj_tac.restore(converted)
    assert all(torch.equal(a, b) for a, b in zip(wanted.values(), given(restored, x).values(), strict=True))


class Crossed(Turning):
    """[N * T, ...] read as [T * N, ...]: what a neuron takes for one sample's steps are not."""

    def forward(self, x):
        x = self.swap(self.lif1(self.swap(self.conv1(x))))
        n, t = x.shape[:2]
        y = self.conv2.inner(x.flatten(0, 1))
        return self.lif3(self.swap(self.conv3(self.swap(self.lif2(y.view(t, n, *y.shape[1:]))))))


class Stepping(Turning):
    """One neuron is handed samples in front of time, and steps through them."""

    def forward(self, x):
        x = self.swap(self.lif1(self.swap(self.conv1(x))))
        x = self.lif2(self.conv2(x))
        return self.lif3(self.swap(self.conv3(x)))


@pytest.mark.parametrize("kind", [Crossed, Stepping])
def test_what_is_in_another_order_goes_by_the_neurons_own_steps(kind):
    net = made(kind)
    converted = sj_tac.convert(copy.deepcopy(net), k=1, example_input=frames())
    compare(converted, net, frames())


def test_a_neuron_that_is_registered_the_wrong_way_round_is_measured():
    net = made(lambda: Own(Declared))
    compare(sj_tac.convert(copy.deepcopy(net), k=2, example_input=frames()), defined(net, 2), frames())
