"""A converted net under torch.compile: what it gives, and how often it is compiled anew."""

import pytest
import torch
from spikingjelly.activation_based import functional
from support import awake, conv, csnn, frames, node, norm, only_v2
from torch import nn
from torch._dynamo.utils import counters

import sj_tac

pytestmark = [
    only_v2,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@torch.no_grad()
def at_rest(net, x, of):
    functional.reset_net(of)
    out = net(x)
    functional.reset_net(of)
    return out


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("plif", "preserve"),
        ("lif", {"version": 1, "default": {"mode": "preserve", "k": 2, "weights": "learned"}}),
        ("if", "collapse"),
    ],
)
def test_the_whole_net_is_one_graph_for_any_number_of_samples(kind, policy):
    torch.manual_seed(1)
    net = awake(csnn(make=lambda: node(kind)), frames(5, 2, 2, 8, 8))
    fast = sj_tac.convert(net, policy, 2)
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    counts = []
    for samples in (2, 3, 5, 7, 4, 9, 6):
        x = frames(5, samples, 2, 8, 8, seed=samples)
        torch.testing.assert_close(at_rest(compiled, x, fast), at_rest(fast, x, fast), rtol=1e-5, atol=1e-6)
        counts.append(graphs())
    # The second N makes torch take N as free. It chooses another convolution from 16 frames on, 3 * N here; that is all.
    assert counts == [1, 2, 2, 3, 3, 3, 3]


@pytest.mark.filterwarnings("ignore:.*recompile_limit")
@torch._dynamo.config.patch(recompile_limit=3)
def test_every_t_is_a_graph_up_to_torchs_limit_and_right_beyond_it():
    """The steps are written out, so T is part of a graph. Beyond the limit the net runs as it does uncompiled."""
    torch.manual_seed(1)
    net = awake(nn.Sequential(conv(), norm(), node("lif"), conv(3, 2), node("lif")).eval(), frames(5, 2, 2, 8, 8))
    fast = sj_tac.convert(net, "preserve", 2)
    compiled = torch.compile(fast, backend="eager")
    counts = []
    for steps in (4, 5, 6, 4, 7, 8, 9, 5):
        x = frames(steps, 2, 2, 8, 8, seed=steps)
        expected = at_rest(fast, x, fast)
        assert expected.sum() > 0
        assert torch.equal(at_rest(compiled, x, fast), expected)
        counts.append(graphs())
    assert counts[:4] == [1, 2, 3, 3]
    assert counts[-1] <= 4


@pytest.mark.slow
def test_inductor():
    """torch's default compiler on the CPU, with its own kernels."""
    torch.manual_seed(1)
    net = awake(nn.Sequential(conv(), norm(), node("plif"), conv(3, 2), node("lif")).eval(), frames(4, 2, 2, 8, 8))
    fast = sj_tac.convert(net, "preserve", 2)
    compiled = torch.compile(fast)
    for samples in (2, 3):
        x = frames(4, samples, 2, 8, 8, seed=samples)
        expected = at_rest(fast, x, fast)
        assert expected.sum() > 0
        # It may order an addition otherwise: spikes that tip over are counted.
        assert (at_rest(compiled, x, fast) != expected).float().mean() <= 1e-3
    assert graphs() == 2
