"""Nets that a plan must neither fail on, nor change, nor believe more of than was seen."""

import copy
import random

import numpy as np
import pytest
import torch
from measure.small_nets import SIZE, C, Leaky, N, Net, T, conv, plain, unfolded
from measure.test_measured import frames
from spikingjelly.activation_based import neuron
from torch import nn
from torch.nn.utils import parametrizations

import sj_tac
from sj_tac.definition import convs
from sj_tac.errors import CaptureWarning
from sj_tac.rewrites.measure.measured import Shared, measure
from sj_tac.verdicts import Refusal

X = frames((T, N, C, SIZE, SIZE))


def planned(net, *args):
    torch.manual_seed(0)
    return measure(net.double().eval(), args or (X,)).convolutions["conv"]


class Pixels(Leaky):
    """Its threshold is a parameter for each pixel, of the shape that a convolution's weight could have."""

    def __init__(self):
        super().__init__()
        self.threshold = nn.Parameter(torch.full((C, SIZE, SIZE), 0.5))


class TwoMaps(Leaky):
    def forward(self, x, bias):
        return super().forward(x + bias)


class Integrator(nn.Module):
    """Emits its voltage, which is above 0 on any drive above 0: no drive is its threshold."""

    def forward(self, x):
        v, out = 0.0, []
        for u in x:
            v = 0.5 * v + u
            out.append(v)
        return torch.stack(out)


def test_a_registered_neuron_with_a_parameter_for_each_pixel_is_no_convolution():
    sj_tac.register_neuron(Pixels, decay=0.25)
    net = Net(plain, conv=conv(), neuron=Pixels())
    assert isinstance(planned(net), Shared)
    assert list(measure(net, (X,)).convolutions) == ["conv"]


class Reversed(nn.Module):
    """It reads later frames."""

    def forward(self, x):
        return (x.flip(0).cumsum(0).flip(0) > 1).to(x)


class Meeting(nn.Module):
    """It integrates over time and samples."""

    def forward(self, x):
        return (x.cumsum(0) + x.cumsum(1) > 1).to(x)


@pytest.mark.parametrize("kind", [Reversed, Meeting])
def test_a_registered_class_that_was_seen_to_be_no_neuron_is_none(kind):
    """Its drives would be shared to wrong results."""
    sj_tac.register_neuron(kind, decay=0.5)
    found = planned(Net(plain, conv=conv(), neuron=kind()))
    assert isinstance(found, Refusal)
    assert found.reason == "NO_NEURON"


def test_a_neuron_of_two_maps_has_no_measured_decay():
    found = planned(Net(lambda n, x: n.neuron(unfolded(n.conv, x), 0.1 * x), conv=conv(), neuron=TwoMaps()))
    assert found.decay == 1.0
    assert "is unknown: all frames of a group weigh the same" in found.notes[0]


def test_what_emits_without_a_threshold_has_no_measured_decay():
    found = planned(Net(plain, conv=conv(), neuron=Integrator()))
    assert found.decay == 1.0
    assert "is unknown" in found.notes[0]


def test_a_net_that_was_called_with_gradients_and_not_reset():
    net = Net(plain, conv=conv(), neuron=neuron.LIFNode(step_mode="m")).double()
    net(X)
    v = net.neuron.v
    assert v.grad_fn is not None
    assert isinstance(planned(net), Shared)
    assert net.neuron.v is v


def test_a_parametrized_convolution_is_shared():
    net = Net(plain, conv=conv(), neuron=Leaky())
    parametrizations.weight_norm(net.conv)
    assert isinstance(planned(net), Shared)
    assert list(measure(net, (X,)).convolutions) == ["conv"]


def test_a_neuron_that_is_called_by_keyword():
    assert isinstance(planned(Net(lambda n, x: n.neuron(x=unfolded(n.conv, x)), conv=conv(), neuron=Leaky())), Shared)


def test_half_numbers_end_at_2_to_the_16():
    net = Net(plain, conv=conv(), neuron=Leaky()).half().eval()
    found = measure(net, (torch.randn(20, 2, C, SIZE, SIZE).half(),)).convolutions["conv"]
    assert isinstance(found, Shared)
    assert (found.layout.T, found.layout.N) == (20, 2)


class Clamped(nn.Conv2d):
    def forward(self, x):
        self.weight.data.clamp_(-0.05, 0.05)
        return super().forward(x)


class Closes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.neuron = conv(), neuron.LIFNode(step_mode="m")
        self.way = lambda x: self.neuron(unfolded(self.conv, x))

    def forward(self, x):
        return self.way(x)


class Draws(nn.Module):
    def forward(self, x):
        return x + 0 * (random.random() + np.random.rand())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(plain, conv=conv(Clamped), neuron=Leaky()),
        Closes,
        lambda: Net(lambda n, x: n.neuron(n.draws(unfolded(n.conv, x))), conv=conv(), neuron=Leaky(), draws=Draws()),
    ],
    ids=["writes into its weight", "closes over itself", "draws numbers of other libraries"],
)
def test_what_a_copy_shares_with_the_net_is_as_it_was(make):
    net = make().double().eval()
    before, memories = copy.deepcopy(net.state_dict()), getattr(net.neuron, "v", None)
    random.seed(1)
    np.random.seed(1)
    wanted = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    measure(net, (X,))
    assert (random.random(), np.random.rand()) == wanted
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert getattr(net.neuron, "v", None) == memories


class Repeats(nn.Module):
    """As many channels as steps, which a net repeats itself: a size that is 4 tells nothing."""

    def __init__(self):
        super().__init__()
        self.T, self.block, self.neuron = T, nn.Sequential(conv()), Leaky()

    def forward(self, x):
        y = self.block(x.repeat(self.T, 1, 1, 1))
        return self.neuron(y.view(self.T, -1, *y.shape[1:]))


def test_a_t_that_is_changed_in_the_net_is_not_taken_for_the_old_one():
    torch.manual_seed(0)
    net, x = Repeats().double().eval(), frames((3, C, SIZE, SIZE))
    fast = copy.deepcopy(net)
    convs.share(fast, measure(net, (x,)).sharings(3, fast))
    assert fast(x).shape == net(x).shape
    net.T = fast.T = 2 * T
    with pytest.warns(CaptureWarning, match="cannot tell T"):
        assert torch.equal(fast(x), net(x))
