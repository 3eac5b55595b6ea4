"""A converted net under torch.compile: what it gives, and how often it is compiled anew."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import awake, conv, csnn, frames, node, norm, only_v2
from torch import nn
from torch._dynamo.utils import counters

import sj_tac
from sj_tac.runtime import compiled as free
from sj_tac.runtime.borders import definition

answers = pytest.mark.skipif(not free.ANSWERS, reason="this torch takes T for a number")
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


def chains(kind):
    """Three chains with a MaxPool and an AvgPool, of neurons alone: what a converted net has fused."""
    torch.manual_seed(1)
    net = nn.Sequential(
        conv(), norm(), node(kind), layer.MaxPool2d(2, step_mode="m"), conv(3, 4), node(kind), conv(4, 4, bias=False),
        norm(4), node(kind), layer.AvgPool2d(2, step_mode="m"),
    ).eval()  # fmt: skip
    return awake(net, frames(12, 2, 2, 8, 8))


def everything(net, x, weights, of):
    """Outputs, gradients to the input and to all parameters, voltages."""
    functional.reset_net(of)
    of.zero_grad()
    x = x.clone().requires_grad_()
    out = net(x)
    (out * weights).sum().backward()
    voltages = [m.v.detach() for m in of.modules() if isinstance(m, neuron.BaseNode)]
    found = [out.detach(), x.grad, *(p.grad.clone() for p in of.parameters()), *voltages]
    functional.reset_net(of)
    return found


# The last number: graphs. For sizes of 1 torch has its own, and so for T within one group: of k frames, or of more behind a
# binary collapse.
FREE = [
    ("lif", {"mode": "preserve", "k": 1}, 1),
    ("lif", {"mode": "preserve", "k": 4}, 2),
    ("plif", {"mode": "preserve", "k": 2, "weights": "learned"}, 1),
    ("if", {"mode": "preserve", "k": 4, "weights": "uniform"}, 2),
    ("lif", {"mode": "preserve", "k": 2, "normalize": False}, 1),
    ("plif", {"mode": "collapse", "k": 2}, 1),
    ("lif", {"mode": "collapse", "k": 4}, 2),
    ("lif", {"mode": "collapse", "k": 4, "spikes": "binary"}, 3),
    ("plif", {"mode": "collapse", "k": 2, "spikes": "binary", "normalize": False}, 2),
]


@answers
@pytest.mark.parametrize(
    ("kind", "how", "most"),
    [pytest.param(*case, marks=[] if i in (2, 6, 7) else pytest.mark.slow) for i, case in enumerate(FREE)],
)
def test_t_is_free(kind, how, most):
    """Whole groups and ragged tails, T below k: outputs, gradients and voltages are those of the net uncompiled."""
    policy = {"version": 1, "default": how}
    if "spikes" in how:  # a binary collapse in every layer leaves no spikes
        policy = {"version": 1, "default": {"mode": "preserve", "k": 2}, "rules": [{"match": "0"} | how]}
    fast = sj_tac.convert(chains(kind), policy, example_input=frames(6, 2, 2, 8, 8))
    compiled = torch.compile(fast, backend="eager", fullgraph=True, dynamic=True)
    spikes, counts = 0, []
    # No convolution has fewer than 16 frames, or torch would choose another kernel for it, in another graph.
    for steps, samples in ((5, 17), (4, 16), (3, 20), (8, 16), (11, 18), (12, 16)):
        x = frames(steps, samples, 2, 8, 8, seed=steps)
        weights = torch.randn(steps, samples, 4, 2, 2, generator=torch.Generator().manual_seed(steps))
        expected, found = everything(fast, x, weights, fast), everything(compiled, x, weights, fast)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
        spikes += expected[0].sum()
        counts.append(graphs())
    assert counts[0] == 1
    assert counts[-1] == most
    assert spikes > 100


class Residual(nn.Module):
    """Two chains, and what went into the first added to the second's spikes, as a SEW block does."""

    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(conv(2, 4), norm(4), node("lif"))
        self.first = nn.Sequential(conv(4, 4, bias=False), norm(4), node("plif"))
        self.second = nn.Sequential(conv(4, 4, bias=False), norm(4), node("lif"))

    def forward(self, x):
        x = self.before(x)
        return self.second(self.first(x)) + x


@answers
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_t_is_free_where_values_are_added_and_changed_in_between(policy):
    torch.manual_seed(2)
    net = awake(Residual().eval(), frames(12, 2, 2, 8, 8))
    fast = sj_tac.convert(net, policy, 2, example_input=frames(6, 2, 2, 8, 8))

    def noise(module, args, output):  # a hook that tells the steps apart
        return output + 0.05 * torch.arange(output.shape[0]).view(-1, 1, 1, 1, 1)

    for hooked in (False, True):
        if hooked:
            fast.first[0].register_forward_hook(noise)
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(fast, backend="eager", fullgraph=True, dynamic=True)
        for steps, samples in ((5, 17), (4, 16), (9, 18), (8, 16)):
            x = frames(steps, samples, 2, 8, 8, seed=steps)
            # Where the call is not as it was traced, a collapse goes by the trace here, by values uncompiled.
            with definition(fast, traced=True):
                expected = at_rest(fast, x, fast)
            assert torch.equal(at_rest(compiled, x, fast), expected)
            assert 0.02 < expected.mean() < 0.98
        assert graphs() == 1


@answers
def test_the_second_t_frees_it_and_voltages_go_on():
    """Without dynamic=True torch takes T for a number until it meets another. Voltages are carried, of any T."""
    fast = sj_tac.convert(chains("lif"), "preserve", 2)
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    counts = []
    with torch.no_grad():
        for steps in (4, 5, 9, 3, 8):
            x = frames(steps, 16, 2, 8, 8, seed=steps)
            assert torch.equal(at_rest(compiled, x, fast), at_rest(fast, x, fast))
            counts.append(graphs())
        assert counts == [1, 2, 2, 2, 2]
        x = frames(10, 16, 2, 8, 8)
        functional.reset_net(fast)
        expected = torch.cat([fast(piece) for piece in x.split((4, 6))])
        functional.reset_net(fast)
        assert torch.equal(torch.cat([compiled(piece) for piece in x.split((4, 6))]), expected)
    assert expected.sum() > 0


@pytest.mark.filterwarnings("ignore:.*recompile_limit")
@pytest.mark.parametrize("backend", ["auto", "reference"])
@torch._dynamo.config.patch(recompile_limit=3)
def test_steps_that_are_written_out_are_a_graph_for_each_t(backend):
    """SpikingJelly's own neurons loop over T, and so does the definition in plain PyTorch. Beyond torch's limit the net runs
    as it does uncompiled."""
    torch.manual_seed(1)
    kept = {"version": 1, "default": {"mode": "preserve", "k": 2}, "rules": [{"match": "3", "mode": "keep"}]}
    net = awake(nn.Sequential(conv(), norm(), node("lif"), conv(3, 2), node("lif")).eval(), frames(5, 2, 2, 8, 8))
    fast = sj_tac.convert(net, kept if backend == "auto" else "preserve", 2, backend=backend)
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


@answers
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy", "k"), [("plif", "preserve", 2), ("lif", "collapse", 4)])
def test_inductor(kind, policy, k):
    """torch's default compiler on the CPU, with its own kernels, for any T and N."""
    fast = sj_tac.convert(chains(kind), policy, k, example_input=frames(6, 2, 2, 8, 8))
    compiled = torch.compile(fast, dynamic=True)
    for steps, samples in ((7, 16), (5, 16), (9, 18), (12, 20)):
        x = frames(steps, samples, 2, 8, 8, seed=samples)
        expected = at_rest(fast, x, fast)
        assert expected.sum() > 0
        # It may order an addition otherwise: spikes that tip over are counted.
        assert (at_rest(compiled, x, fast) != expected).float().mean() <= 1e-3
    assert graphs() <= 2  # one more where T is a multiple of k


@pytest.mark.slow
def test_inductor_of_one_t():
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
