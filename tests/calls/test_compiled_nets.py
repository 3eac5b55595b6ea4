"""A converted net under torch.compile: what it gives, and how often it is compiled."""

import pairs
import pytest
import torch
from defined import given, same
from spikingjelly.activation_based import layer
from support import awake, conv, frames, node, norm, only_v2
from torch import nn
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

import sj_tac

pytestmark = [only_v2, *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User"))]


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def chains(kind):
    """Two chains with a MaxPool and an AvgPool, of neurons alone: what a converted net has fused; in float64."""
    torch.manual_seed(1)
    net = nn.Sequential(
        conv(), norm(), node(kind), layer.MaxPool2d(2, step_mode="m"), conv(3, 4, bias=False), norm(4), node(kind),
        layer.AvgPool2d(2, step_mode="m"),
    ).eval()  # fmt: skip
    return awake(net, frames(12, 2, 2, 8, 8)).double()


# The last number: graphs, at most. For sizes of 1 torch has its own, and so for T within one group.
FREE = [
    ("plif", {"mode": "preserve", "k": 2, "weights": "learned"}, 1),
    ("if", {"mode": "preserve", "k": 4, "weights": "uniform"}, 2),
    ("lif", {"mode": "preserve", "k": 2, "normalize": False}, 1),
    ("lif", {"mode": "collapse", "k": 4}, 2),
]


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.8", reason="this torch takes T for a number")
@pytest.mark.parametrize(
    ("kind", "how", "most"),
    [pytest.param(*case, marks=[] if case[0] == "plif" else pytest.mark.exhaustive) for case in FREE],
)
def test_t_is_free(kind, how, most):
    """Whole groups and ragged tails, T below k: outputs, gradients and voltages are those of the net uncompiled."""
    policy = {"version": 1, "default": how}
    fast = sj_tac.convert(chains(kind), policy, example_input=frames(6, 2, 2, 8, 8).double())
    compiled = torch.compile(fast, backend="eager", fullgraph=True, dynamic=True)
    spikes, made, counts = 0, 0, []
    # No convolution has fewer than 16 frames, or torch would choose another kernel for it, in another graph.
    for steps, samples in ((5, 17), (7, 18), (4, 16), (3, 20), (8, 16))[: 5 if pairs.EXHAUSTIVE else 2]:
        x = frames(steps, samples, 2, 8, 8, seed=steps).double()
        expected, before = given(fast, x), graphs()
        same(given(fast, x, call=compiled), expected)
        made += graphs() - before
        spikes += expected["output 0"].sum()
        counts.append(made)
    assert counts[0] == 1
    assert counts[-1] <= most
    assert spikes > 20
