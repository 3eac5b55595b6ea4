"""The short way for drives of lines [T, N, C, L], as tokens make them: bits and voltages are those of the definition."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from straight_cases import CHANGES, NEURONS, compare, launches
from torch import nn

import sj_tac
from sj_tac.runtime.drives import Drive

C = 8


def norm():
    made = layer.BatchNorm1d(C)
    made.running_mean.uniform_(-0.2, 0.2)
    made.running_var.uniform_(0.02, 0.1)
    nn.init.uniform_(made.bias, 0.0, 0.6)
    return made


class Lines(nn.Module):
    """Three chains of Conv1d, one of which drives its neuron together with a residual."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(layer.Conv1d(C if i else 2, C, 3, padding=1, bias=i == 1) for i in range(3))
        self.norms = nn.ModuleList(norm() for _ in range(3))
        self.nodes = nn.ModuleList(make() for _ in range(3))
        self.between = lambda i, x: x
        functional.set_step_mode(self, "m")
        self.eval()

    def forward(self, x):
        for i, (conv, norm, node) in enumerate(zip(self.convs, self.norms, self.nodes, strict=True)):
            y = norm(conv(x))
            x = self.between(i, node(y + x if i == 2 else y))
        return x


class Folded(nn.Module):
    """torch's own layers on folded lines, as in published attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.node = nn.Conv1d(2, C, 1), nn.BatchNorm1d(C), NEURONS["LIF"]()
        self.norm.running_var.uniform_(0.02, 0.1)
        functional.set_step_mode(self, "m")
        self.eval()

    def forward(self, x):
        return self.node(self.norm(self.conv(x.flatten(0, 1))).reshape(*x.shape[:2], C, -1).contiguous())


def frames(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, generator=generator) < 0.4).float()


@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_it_gives_what_the_definition_gives(kind, dtype, k):
    net = sj_tac.convert(Lines(NEURONS[kind]).to(dtype), "preserve", k)
    rates = [compare(net, frames(*shape).to(dtype)) for shape in ((6, 2, 2, 10), (5, 2, 2, 10), (6, 3, 2, 7), (6, 4, 2, 1))]
    assert all(0.02 < rate < 0.9 for rate in rates), rates
    assert launches(net) == 12


@pytest.mark.parametrize("k", [1, 2])
def test_folded_lines(k):
    net = sj_tac.convert(Folded(), "preserve", k, example_input=frames(6, 2, 2, 10))
    assert compare(net, frames(6, 2, 2, 10)) > 0.02
    assert compare(net, frames(5, 3, 2, 4)) > 0.02
    assert launches(net) == 2


@pytest.mark.parametrize("change", [name for name in CHANGES if "pool" not in name])
def test_what_changes_between_two_calls_is_seen(change):
    net, x = sj_tac.convert(Lines(NEURONS["LIF"]), "preserve", 2), frames(6, 2, 2, 10)
    compare(net, x)
    CHANGES[change](net)
    assert compare(net, x, exact=change != "another surrogate") > 0.001


BETWEEN = {
    "a part": lambda i, x: torch.cat([x[:-1], x[-1:] * 0], 0) if i == 0 else x,
    "in place": lambda i, x: x.mul_(0.5) if i == 0 else x,
    "rolled": lambda i, x: x.roll(1, 0) if i == 1 else x,
    "turned": lambda i, x: x.transpose(2, 3).contiguous().transpose(2, 3) if i == 0 else x,
    "longer": lambda i, x: torch.cat([x, x], 0) if i == 1 else x,
    "through data": lambda i, x: (x.data.add_(0.25), x)[1] if i == 0 else x,
}


@pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning")
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_what_a_forward_does_that_the_trace_did_not(between, k):
    net = sj_tac.convert(Lines(NEURONS["LIF"]).double(), "preserve", k)
    net.between = between
    assert compare(net, frames(6, 2, 2, 10).double()) > 0.01
    assert any(isinstance(getattr(m, "_tac", None), Drive) for m in net.modules())


def test_voltages_are_no_views_and_have_the_hosts_shape():
    net = sj_tac.convert(Lines(NEURONS["LIF"]), "preserve", 2)
    with torch.no_grad():
        net(frames(6, 2, 2, 10))
    assert [node.v.shape for node in net.nodes] == [(2, C, 10)] * 3
    functional.detach_net(net)
    assert not any(node.v._is_view() for node in net.nodes)


def test_other_surrogates_without_gradients():
    def make():
        return neuron.LIFNode(surrogate_function=surrogate.LeakyKReLU())

    net = sj_tac.convert(Lines(make), "preserve", 2)
    assert compare(net, frames(6, 2, 2, 10)) > 0.02
    assert launches(net) == 3
