"""What forwards do to folded drives and to registered classes that the miniature nets do not."""

import copy

import pytest
import torch
from idioms.miniatures import SIZE, C, N, OwnNeuron, T, conv, grouped, lif
from idioms.test_idioms import CLOSE
from spikingjelly.activation_based import functional, layer
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac

SHAPE = (T, N, 2, SIZE, SIZE)


def frames(*shape):
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(shape or SHAPE, dtype=torch.float64, generator=generator) > 0.5).double() * 2


class Net(nn.Module):
    """Two folded convolutions; what becomes of the second drive is the test's."""

    def __init__(self, then, node=None):
        super().__init__()
        self.conv1, self.lif1, self.conv2 = conv(2), lif(v_threshold=0.2), conv()
        self.conv3, self.lif2 = conv(size=1), node or lif(v_threshold=0.1)
        self.then = then

    def forward(self, x):
        t, n, _, h, w = x.shape
        spikes = self.lif1(self.conv1(x.flatten(0, 1)).reshape(t, n, C, h, w))
        drive = self.conv2(spikes.flatten(0, 1)).reshape(t, n, C, h, w)
        return self.then(self, drive, spikes).mean((-1, -2)).mean(0)


def value_and_gradients(net, x):
    functional.reset_net(net)
    y = net(x)
    parameters = [p for p in net.parameters() if p.requires_grad]
    net.zero_grad()
    (y * torch.linspace(0.5, 1.5, y.numel()).view_as(y)).sum().backward()
    return y.detach(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


class Block(nn.Module):
    """Stateless, so that it may be run again."""

    def __init__(self, inputs):
        super().__init__()
        self.conv, self.node = conv(inputs), OwnNeuron()

    def forward(self, x):
        t, n, _, h, w = x.shape
        return self.node(3 * self.conv(x.flatten(0, 1)).view(t, n, C, h, w))


class Checkpointed(nn.Module):
    reentrant = None

    def __init__(self):
        super().__init__()
        self.one, self.two = Block(2), Block(C)

    def forward(self, x):
        for block in (self.one, self.two):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.mean((-1, -2)).mean(0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("k", [1, 2])
def test_a_checkpoint_runs_the_same_again(k, reentrant):
    torch.manual_seed(0)
    net, x = Checkpointed().double().eval(), frames().requires_grad_()
    fast = sj_tac.convert(net, k=k, example_input=frames())
    expected = value_and_gradients(fast, x)
    fast.reentrant = reentrant
    found = value_and_gradients(fast, x)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert any(g.abs().sum() > 0 for g in expected[1])


@pytest.mark.parametrize("size", [(2, 3), (1, 7)], ids=str)
def test_training_statistics_are_those_of_repeated_frames(size):
    """All groups of one length, and not: the running variance is the unbiased one of all frames."""
    samples, k = size

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.lif = nn.Conv1d(4, C, 1), nn.BatchNorm1d(C), lif()

        def forward(self, x):
            t, n = x.shape[:2]
            return self.lif(self.bn(self.conv(x.flatten(0, 1))).view(t, n, C, -1)).mean(-1).mean(0)

    torch.manual_seed(0)
    net = Norm().double()
    for momentum in (0.1, None):
        net.bn.momentum = momentum
        fast, plain = sj_tac.convert(net, k=k, example_input=frames(T, 3, 4, 2)), copy.deepcopy(net)
        plain.conv.register_forward_pre_hook(lambda m, a: (grouped(a[0].unflatten(0, (T, -1)), k).flatten(0, 1),))
        for each in (fast.train(), plain.train()):
            for seed in range(3):
                functional.reset_net(each)
                each(torch.rand(T, samples, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        torch.testing.assert_close(fast.bn.running_var, plain.bn.running_var, **CLOSE)
        torch.testing.assert_close(fast.bn.running_mean, plain.bn.running_mean, **CLOSE)


@sj_tac.register_neuron(decay=0.5)
class Remembers(OwnNeuron):
    """Its membrane is kept between calls, until its reset."""

    def __init__(self):
        super().__init__(0.5)
        self.v = None

    def reset(self):
        self.v = None

    def forward(self, x):
        v, spikes = torch.zeros_like(x[0]) if self.v is None else self.v, []
        for frame in x:
            v = self.leak * v + frame
            fired = self.spike(v - 1.0)
            v = (1 - fired.detach()) * v
            spikes.append(fired)
        self.v = v.detach()
        return torch.stack(spikes)


def chain(*modules):
    return nn.Sequential(layer.Conv2d(2, C, 3, padding=1, step_mode="m"), *modules).double().eval()


def test_a_registered_neuron_that_remembers_is_reset_before_it_is_compared():
    net, x = chain(Remembers()), frames()
    net(x)
    held = net[1].v.clone()
    fast = sj_tac.convert(net, k=1, example_input=x)
    assert torch.equal(net[1].v, held)
    for each in (net, fast):
        each[1].reset()
    torch.testing.assert_close(fast(x), net(x), **CLOSE)
    torch.testing.assert_close(fast(x), net(x), **CLOSE)  # and goes on from there


class _Named(nn.Module):
    """torch's own layers on folded frames, called by the names of their arguments."""

    def __init__(self, sized):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.lif1 = nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4).eval(), lif()
        self.pool, self.up, self.lif2, self.sized = nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 3, 2, 1), lif(), sized
        self.lif1.v_threshold = self.lif2.v_threshold = 0.1

    def forward(self, x):
        t, n = x.shape[:2]
        y = self.lif1(self.bn(input=self.conv(input=x.flatten(0, 1))).unflatten(0, (t, n))).flatten(0, 1)
        y = self.up(y, output_size=x.shape[-2:]) if self.sized else self.up(input=self.pool(input=y))
        return self.lif2(y.unflatten(0, (t, n)))


@pytest.mark.parametrize("sized", [False, True], ids=["by name", "output_size"])
def test_arguments_by_name_and_more_of_them(sized):
    net, x = _Named(sized).double().eval(), frames(4, 3, 2, 8, 8) / 2
    fast, source = (sj_tac.convert(net, k=k, example_input=x) for k in (2, 1))
    defined = sj_tac.convert(net, k=2, example_input=x, fuse=False)
    found = sj_tac.report(fast)
    assert found["conv"].status == "converted"
    assert found["up"].status == "converted"
    with torch.no_grad():
        spikes = net(x)
        torch.testing.assert_close(source(x), spikes, **CLOSE)
        torch.testing.assert_close(fast(x), defined(x), **CLOSE)
    assert 0.02 < spikes.mean() < 0.9


class Stored(torch.autograd.Function):
    """Writes frames into a store of many, as published dense nets do; torch.fx has no proxy of a storage."""

    @staticmethod
    def forward(ctx, store, i, x):
        store[i] = x
        ctx.i = i
        return torch.empty(0, dtype=store.dtype).set_(store[: i + 1])

    @staticmethod
    def backward(ctx, gradient):
        return None, None, gradient[ctx.i]


def spikes_are_stored(net, y, s):
    store = torch.zeros(2, *y.shape, dtype=y.dtype)
    Stored.apply(store, 0, s)
    return Stored.apply(store, 1, net.lif2(y)).sum(0)


def test_an_autograd_function_of_ones_own():
    torch.manual_seed(0)
    apply, x = vars(torch.autograd.Function)["apply"], frames()
    net = Net(spikes_are_stored).double().eval()
    plan = sj_tac.plan(net, k=2, example_input=x)
    assert vars(torch.autograd.Function)["apply"] is apply
    assert {v.layer for v in plan.converted} == {"conv1", "conv2"}
    with torch.no_grad():
        source = net(x)
        found = [sj_tac.convert(net, k=k, fuse=fuse, example_input=x)(x) for k, fuse in ((1, True), (2, True), (2, False))]
    torch.testing.assert_close(found[0], source, **CLOSE)
    torch.testing.assert_close(found[1], found[2], **CLOSE)
    assert not torch.equal(found[1], source)
