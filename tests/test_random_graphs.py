"""Random nets under random policies: branches, sums, concatenations, shared and foreign modules, every verdict and value."""

import fnmatch

import pytest
import torch
import torch.nn.functional as F
from defined import OnThreshold, backend, check, given as outcome, same
from definition import margins
from hypothesis import HealthCheck, assume, example, given, settings, strategies as st
from spikingjelly.activation_based import functional, layer, neuron
from support import at_rest, conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError

C = 3


class Stubborn(neuron.LIFNode):
    """A neuron with dynamics of its own, as far as sj_tac can know."""


def lif(kind="lif"):
    return node(kind, v_threshold=0.4)


class Residual(nn.Module):
    """The three residual blocks: the sum before the neuron, before the next block's, or of spikes."""

    def __init__(self, kind, in_place=False):
        super().__init__()
        self.kind, self.in_place = kind, in_place
        self.conv, self.norm, self.node = conv(C, C), norm(C), lif()
        self.down = nn.Sequential(layer.Conv2d(C, C, 1, step_mode="m"), norm(C)) if in_place else nn.Identity()

    def forward(self, x):
        identity = self.down(x)
        if self.kind == "spiking":
            y = self.norm(self.conv(x))
            if self.in_place:
                y += identity
                return self.node(y)
            return self.node(y + identity)
        if self.kind == "ms":
            return self.norm(self.conv(self.node(x))) + identity
        return self.node(self.norm(self.conv(x))) + x


MODULES = {
    "conv": lambda: conv(C, C),
    "norm": lambda: norm(C),
    "lif": lif,
    "plif": lambda: lif("plif"),
    "if": lambda: lif("if"),
    "block": lambda: nn.Sequential(conv(C, C), nn.Sequential(norm(C), lif())),
    "block without norm": lambda: nn.Sequential(conv(C, C), lif("plif"), layer.Dropout(0.2, step_mode="m")),
    "block and pool": lambda: nn.Sequential(conv(C, C), norm(C), lif(), layer.MaxPool2d(3, 1, 1, step_mode="m")),
    "block and mean": lambda: nn.Sequential(conv(C, C), norm(C), lif(), layer.AvgPool2d(3, 1, 1, step_mode="m")),
    "pool and neuron": lambda: nn.Sequential(conv(C, C), norm(C), layer.AvgPool2d(3, 1, 1, step_mode="m"), lif()),
    "max pool and neuron": lambda: nn.Sequential(conv(C, C), layer.MaxPool2d(3, 1, 1, step_mode="m"), lif()),
    "container of more": lambda: layer.SeqToANNContainer(nn.Conv2d(C, C, 3, padding=1), nn.ReLU()),
    "spiking": lambda: Residual("spiking"),
    "spiking, projected": lambda: Residual("spiking", in_place=True),
    "ms": lambda: Residual("ms"),
    "ms, projected": lambda: Residual("ms", in_place=True),
    "sew": lambda: Residual("sew"),
    "stubborn": lambda: nn.Sequential(conv(C, C), Stubborn(step_mode="m", v_threshold=0.4)),
    "single step": lambda: neuron.LIFNode(step_mode="s", v_threshold=0.4),
    "max pool": lambda: layer.MaxPool2d(3, 1, 1, step_mode="m"),
    "avg pool": lambda: layer.AvgPool2d(3, 1, 1, step_mode="m"),
    "dropout": lambda: layer.Dropout(0.3, step_mode="m"),
    "relu": lambda: nn.ReLU(),
    "identity": lambda: nn.Identity(),
}
FUNCTIONS = {
    "add": lambda a, b: a + b,
    "add in place": lambda a, b: a.clone().add_(b),
    "subtract": lambda a, b: torch.sub(a, b),
    "multiply": lambda a, b: a * (1 - b),
    "cat": lambda a, b: torch.cat([a, b], 2)[:, :, :C],
    "scale": lambda a, b: a * 0.5,
    "square": lambda a, b: a * a,
    "floor": lambda a, b: torch.div(a, 2, rounding_mode="floor"),
    "mean": lambda a, b: a + b.mean(0, keepdim=True),
    "pool": lambda a, b: functional.seq_to_ann_forward(a, lambda x: F.max_pool2d(x, 3, 1, 1)),
    "flip": lambda a, b: torch.flip(a, [0]),
    "weigh steps": lambda a, b: a * torch.arange(1.0, len(a) + 1, dtype=a.dtype).view(-1, 1, 1, 1, 1),
}


class Graph(nn.Module):
    """A straight-line program over values of one shape [T, N, C, H, W]: each operation reads one or two earlier values."""

    def __init__(self, program, ending):
        super().__init__()
        self.program, self.ending = program, ending
        made = {}
        self.parts = nn.ModuleDict()
        for i, (what, _, _, shared) in enumerate(program):
            if what in MODULES:
                # A shared module is the very object of an earlier operation of its kind.
                part = made[what] if shared and what in made else MODULES[what]()
                made[what] = part
                self.parts[str(i)] = part
        self.widen = conv(2 * C, C)

    def forward(self, x):
        values = [x]
        for i, (what, first, second, _) in enumerate(self.program):
            a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
            values.append(self.parts[str(i)](a) if what in MODULES else FUNCTIONS[what](a, b))
        if self.ending == "cat":
            return self.widen(torch.cat([values[-1], values[len(values) // 2]], dim=2))
        if self.ending == "mean":
            return values[-1].mean(0)
        return values[-1] if self.ending == "last" else (values[-1], values[len(values) // 2])


# Mostly what drives and neurons are made of, so that most programs have chains; the rest is there to be in the way.
COMMON = ["block", "block without norm", "block and pool", "block and mean", "pool and neuron"]
COMMON += ["spiking", "spiking, projected", "ms", "ms, projected", "sew", "sew"]
PARTS = ["conv", "norm", "lif", "plif", "if", "avg pool", "dropout", "add", "add", "add in place", "cat", "scale"]
operation = st.tuples(
    st.one_of(st.sampled_from(COMMON), st.sampled_from(PARTS), st.sampled_from([*MODULES, *FUNCTIONS])),
    st.sampled_from([0, 0, 0, 1, 2, 5]),
    st.sampled_from([1, 1, 2, 3, 7]),
    st.sampled_from([False, False, False, True]),
)
rule = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["collapse", "preserve", "collapse", "preserve", "keep"]),
        "k": st.sampled_from([2, 3, 4, 2, 1]),
        "weights": st.sampled_from(["decay", "uniform"]),
        "spikes": st.sampled_from(["count", "count", "binary"]),
    }
)
case = st.fixed_dictionaries(
    {
        "program": st.lists(operation, min_size=3, max_size=12),
        "readout": st.sampled_from(["lif", "lif", "avg pool", "max pool"]),
        "ending": st.sampled_from(["last", "last", "cat", "mean", "pair"]),
        "default": rule,
        "rules": st.lists(st.tuples(st.sampled_from(["parts.[02468]*", "parts.[1357]*", "parts.3*"]), rule), max_size=2),
        "steps": st.sampled_from([5, 7, 4, 1]),
        "seed": st.integers(0, 99),
    }
)
RESIDUAL = [("block", 0, 1, False), ("conv", 0, 1, False), ("norm", 0, 1, False), ("add", 0, 2, False)]
BLOCKS = [("block", 0, 1, False)] * 3
# A region that must end between a conv and its neuron: the sum of that neuron's spikes goes to a MaxPool.
POOLED_SUM = [*BLOCKS, ("ms", 0, 1, False), ("max pool", 0, 1, False)]
PLAIN = {"weights": "decay", "spikes": "count"}
BINARY = {"spikes": "binary"}


def fixed(program, ending, default, rules, steps, *, seed=0):
    """A case of one's own, with the policy's other settings as usual."""
    rules = [(match, PLAIN | more) for match, more in rules]
    whole = {"program": program, "readout": "lif", "ending": ending, "steps": steps, "seed": seed}
    return whole | {"default": PLAIN | default, "rules": rules}


def wake(net, x):
    """Thresholds that some of each neuron's drives get over, also alone, and none meets exactly."""

    def fit(module, args):
        module.v_threshold = max(0.02, 0.47 * args[0].quantile(0.9).item())

    handles = [m.register_forward_pre_hook(fit) for m in net.modules() if isinstance(m, neuron.BaseNode)]
    at_rest(net, x)
    for handle in handles:
        handle.remove()


def build(drawn):
    torch.manual_seed(drawn["seed"])
    program = [*drawn["program"], (drawn["readout"], 0, 1, False)]
    net = Graph(program, drawn["ending"]).double().eval()
    x = frames(drawn["steps"], 2, C, 4, 4, dtype=torch.float64, seed=drawn["seed"])
    wake(net, x)
    names = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d)]
    rules, taken = [], set()
    for match, more in drawn["rules"]:
        fresh = {n for n in names if fnmatch.fnmatchcase(n, match)} - taken
        if fresh:  # a rule that takes nothing is an error of its own
            taken |= fresh
            rules.append({"match": match, **more})
    return net, x, names, {"default": drawn["default"], "rules": rules}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(case)
@example(fixed(RESIDUAL, "last", {"mode": "collapse", "k": 2}, (), 5))
@example(fixed(POOLED_SUM, "last", {"mode": "preserve", "k": 1}, [("parts.[02468]*", {"mode": "collapse", "k": 2})], 4))
@example(fixed([*RESIDUAL, ("lif", 0, 1, False), *RESIDUAL], "mean", {"mode": "preserve", "k": 3}, (), 7, seed=1))
@example(fixed(BLOCKS, "last", {"mode": "collapse", "k": 2}, [("parts.1*", {"mode": "collapse", "k": 2, **BINARY})], 5))
def test_every_graph(drawn):
    net, x, names, policy = build(drawn)
    try:
        fast = sj_tac.convert(net, policy, example_input=x, backend=backend(net, policy))
    except ConversionError as error:
        # Where nothing can be converted, that is an error of its own.
        if not str(error).startswith("no convolution of Graph can be converted"):
            raise
        return
    report = sj_tac.report(fast)
    assert [v.layer for v in report.verdicts if v.layer in names] == names, "one verdict for every conv"
    assert {v.layer for v in report.verdicts if v.layer not in names} <= {n for n, m in net.named_modules()}
    assert all(v.reason and v.detail for v in report.refused)
    assert list(fast.state_dict()) == list(net.state_dict())
    expected = at_rest(net, x)
    torch.testing.assert_close(at_rest(sj_tac.restore(fast), x), expected, rtol=0, atol=0)
    drives = fast._sj_tac.plan.measured.convolutions
    if {v.mode for v in report.converted} == {"preserve"}:
        try:
            check(net, policy, x, {v.layer: drives[v.layer].neurons[0] for v in report.converted}, example_input=x)
        except OnThreshold:
            assume(False)
        return
    # Which regions a collapse has in a graph like this is the package's choice: fused, it is what it is unfused.
    unfused = sj_tac.convert(net, policy, example_input=x, fuse=False)
    with margins(unfused) as distances:
        values = outcome(unfused, x)
    assume(min(distances, default=1) > 1e-9)
    same(outcome(fast, x), values)


@pytest.mark.parametrize("what", ["flip", "weigh steps", "multiply", "square", "floor", "mean", "relu", "single step"])
def test_a_collapse_ends_before_what_needs_every_frame(what):
    program = [("block", 0, 0, False), ("block", 0, 0, False), (what, 0, 0, False), ("block", 0, 0, False)]
    drawn = {"program": program, "readout": "identity", "ending": "last", "default": {}, "rules": [], "steps": 5, "seed": 0}
    net, x, _, _ = build(drawn)
    fast = check(net, "collapse", x, example_input=x)
    assert [v.macs_after * 5 // v.macs_before for v in sj_tac.report(fast).converted] == [3, 3, 3]
