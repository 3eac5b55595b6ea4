"""Random nets under random policies: branches, sums, concatenations, shared and foreign modules, every verdict and shape."""

import copy
import fnmatch
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, example, given, settings, strategies as st
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, frames, large_convolutions, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError
from sj_tac.functional import decay_weights
from sj_tac.runtime.borders import definition
from sj_tac.runtime.neurons import UnitModule
from sj_tac.runtime.values import Shared

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
    "conv without padding in time": lambda: layer.Conv2d(C, C, 1, bias=False, step_mode="m"),
    "norm": lambda: norm(C),
    "lif": lif,
    "plif": lambda: lif("plif"),
    "if": lambda: lif("if"),
    "block": lambda: nn.Sequential(conv(C, C), nn.Sequential(norm(C), lif())),
    "block without norm": lambda: nn.Sequential(conv(C, C), lif("plif"), layer.Dropout(0.2, step_mode="m")),
    "block and pool": lambda: nn.Sequential(conv(C, C), norm(C), lif(), layer.MaxPool2d(3, 1, 1, step_mode="m")),
    "block and mean": lambda: nn.Sequential(conv(C, C), norm(C), lif(), layer.AvgPool2d(3, 1, 1, step_mode="m")),
    "block and two pools": lambda: nn.Sequential(
        *[conv(C, C), norm(C), lif(), layer.Dropout(0.2, step_mode="m")],
        *[pool(3, 1, 1, step_mode="m") for pool in (layer.MaxPool2d, layer.AvgPool2d)],
    ),
    "pool and neuron": lambda: nn.Sequential(conv(C, C), norm(C), layer.AvgPool2d(3, 1, 1, step_mode="m"), lif()),
    "max pool and neuron": lambda: nn.Sequential(conv(C, C), layer.MaxPool2d(3, 1, 1, step_mode="m"), lif()),
    "container": lambda: nn.Sequential(layer.SeqToANNContainer(nn.Conv2d(C, C, 3, padding=1), nn.BatchNorm2d(C)), lif()),
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
COMMON = ["block", "block without norm", "block and pool", "block and mean", "block and two pools", "pool and neuron"]
COMMON += ["container"]
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
        "weights": st.sampled_from(["decay", "uniform", "learned"]),
        "spikes": st.sampled_from(["count", "count", "binary"]),
        "approximate": st.booleans(),
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
PROJECTED = [*BLOCKS[:2], ("ms, projected", 0, 1, False), ("block", 0, 1, False)]
PLAIN = {"weights": "decay", "spikes": "count", "approximate": False}
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
    outputs(net, x)
    functional.reset_net(net)
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


def converted(net, policy, x, **options):
    """The converted net, or None where nothing can be converted, which is an error of its own."""
    try:
        return sj_tac.convert(net, policy, example_input=x, **options)
    except ConversionError as error:
        if not str(error).startswith("no chain of Graph can be converted"):
            raise
    return None


def outputs(net, x):
    functional.reset_net(net)
    with torch.no_grad():
        y = net(x)
    return y if isinstance(y, tuple) else (y,)


@settings(max_examples=3 * settings().max_examples // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case)
@example(fixed(RESIDUAL, "last", {"mode": "collapse", "k": 2}, (), 5))
@example(fixed(POOLED_SUM, "last", {"mode": "preserve", "k": 1}, [("parts.[02468]*", {"mode": "collapse", "k": 2})], 4))
@example(fixed([*RESIDUAL, ("lif", 0, 1, False), *RESIDUAL], "mean", {"mode": "preserve", "k": 3}, (), 7, seed=1))
@example(fixed(PROJECTED, "last", {"mode": "preserve", "k": 3}, [("parts.3*", {"mode": "collapse", "k": 1})], 7))
@example(fixed(BLOCKS, "last", {"mode": "collapse", "k": 2}, [("parts.1*", {"mode": "collapse", "k": 2, **BINARY})], 5))
def test_every_graph(drawn):
    # Of half of them every convolution is run in parts, where nothing differentiates.
    with large_convolutions() if drawn["seed"] % 2 else nullcontext():
        check_graph(drawn)


def check_graph(drawn):
    net, x, names, policy = build(drawn)
    fast = converted(net, policy, x)
    if fast is None:
        return
    report = sj_tac.report(fast)
    seen = [v.layer for v in report.verdicts if v.layer in names]
    assert seen == names, "one verdict for every conv"
    assert {v.layer for v in report.verdicts if v.layer not in names} <= {n for n, m in net.named_modules()}
    assert all(v.reason and v.detail for v in report.refused)
    learned = [key for key in fast.state_dict() if key.endswith("tac_logits")]
    assert [key for key in fast.state_dict() if key not in learned] == list(net.state_dict())

    expected, got = outputs(net, x), outputs(fast, x)
    assert [t.shape for t in got] == [t.shape for t in expected]
    assert all(torch.isfinite(t).all() for t in got)
    # Fused is unfused; float64, so that no spike tips over at its threshold.
    unfused = outputs(converted(net, policy, x, fuse=False), x)
    for a, b in zip(got, unfused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    # Nor does it matter who runs the neurons, or whether values pass between the modules.
    with definition(fast):
        other_ways = [outputs(fast, x)]
    # Nor whether they pass at all: compiled and exported, the trace alone says where collapsed time ends.
    with definition(fast, traced=True):
        other_ways.append(outputs(fast, x))
    for module in fast.modules():
        if isinstance(module, UnitModule):
            module.store_v_seq = True
    other_ways.append(outputs(fast, x))
    for other in other_ways:
        for a, b in zip(other, unfused, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert outputs(sj_tac.restore(fast, drop_learned=True), x)[0].equal(expected[0])


@settings(max_examples=settings().max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case)
def test_k1_is_the_source(drawn):
    net, x, _, policy = build(drawn)
    policy = {"default": policy["default"] | {"k": 1}}
    fast = converted(net, policy, x, fuse=False)
    if fast is None:
        return
    assert all(torch.equal(a, b) for a, b in zip(outputs(fast, x), outputs(net, x), strict=True))


@settings(max_examples=settings().max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case)
def test_preserve_changes_converted_convs_and_nothing_else(drawn):
    """Each module on the input it was given: converted convs by the definition, all others as in the source."""
    net, x, _, policy = build(drawn)
    policy = {"default": policy["default"] | {"mode": "preserve", "weights": "decay"}}
    fast = converted(net, policy, x, fuse=False)
    if fast is None:
        return
    analysis = fast._sj_tac.plan
    sites = {analysis.chains[v.layer].site: v.layer for v in sj_tac.report(fast).converted}
    leaves = {
        n
        for n, m in net.named_modules()
        if n.startswith("parts.") and (n in sites or not [*m.children()] or "Container" in type(m).__name__)
    }
    inside = tuple(f"{s}." for s in leaves)
    leaves = {n for n in leaves if not n.startswith(inside) and analysis.graph.calls()[n] == 1}
    calls = {}
    for name in leaves:
        fast.get_submodule(name).register_forward_hook(
            lambda m, a, y, name=name: calls.update({name: (a[0].clone(), y.clone())})
        )
    outputs(fast, x)
    for name, (inputs, got) in calls.items():
        source = copy.deepcopy(net.get_submodule(name))
        if isinstance(source, layer.Dropout):
            continue  # its mask is its own
        with torch.no_grad():
            definition = by_definition(source, fast.get_submodule(name)._tac, inputs) if name in sites else source(inputs)
        torch.testing.assert_close(got, definition, rtol=1e-12, atol=1e-12, msg=name)


def by_definition(source, place, x):
    node = place.node
    beta = (
        1.0 if isinstance(node, neuron.IFNode) else 1 - node.w.sigmoid().item() if hasattr(node, "w") else 1 - 1 / node.tau
    )
    drives = []
    for group in x.split(place.k):
        weights = decay_weights(beta, [1] * len(group))
        drives += [source(sum(w * f for w, f in zip(weights, group, strict=True)).unsqueeze(0))] * len(group)
    return torch.cat(drives)


def test_the_programs_do_convert_and_fire():
    """The space is not empty: most of its nets have chains and fire, many collapse, and most change by it."""
    counts = Counter()

    @settings(max_examples=60, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(case)
    def look(drawn):
        net, x, _, policy = build(drawn)
        rates = []
        for module in net.modules():
            if isinstance(module, neuron.BaseNode):
                module.register_forward_hook(lambda m, a, out: rates.append(out.mean().item()))
        expected = outputs(net, x)[0]
        fast = converted(net, policy, x)
        counts.update(nets=1, neurons=len(rates), firing=sum(0.02 < rate < 0.7 for rate in rates))
        if fast is not None:
            got = outputs(fast, x)[0]
            modes = {v.mode for v in sj_tac.report(fast).converted}
            counts.update({"converted": 1, "changed": int(not torch.equal(got, expected)), **dict.fromkeys(modes, 1)})

    look()
    assert counts["firing"] > 0.9 * counts["neurons"]
    assert counts["converted"] > 0.6 * counts["nets"]
    assert min(counts["collapse"], counts["preserve"]) > 0.2 * counts["converted"]
    assert counts["changed"] > 0.5 * counts["converted"]


@pytest.mark.parametrize("ending", ["last", "mean", "pair"])
@pytest.mark.parametrize("what", ["flip", "multiply", "square", "floor", "mean", "relu", "single step"])
def test_a_collapse_ends_before_what_needs_every_frame(ending, what):
    program = [("block", 0, 0, False), ("block", 0, 0, False), (what, 0, 0, False), ("block", 0, 0, False)]
    drawn = {"program": program, "readout": "identity", "ending": ending, "default": {}, "rules": [], "steps": 5, "seed": 0}
    net, x, _, _ = build(drawn)
    fast = sj_tac.convert(net, "collapse", 2, example_input=x)
    counts = {}

    def rate(x):
        return len(x.expression.compact) if isinstance(x, Shared) else len(x)

    def count(name):
        return lambda module, args, y: counts.update({name: (rate(args[0]), rate(y))})

    for i in (0, 1, 3):
        fast.parts[str(i)][0].register_forward_hook(count(i))
    assert [t.shape for t in outputs(fast, x)] == [t.shape for t in outputs(net, x)]
    # Two layers in one region at T/2, then frames for the operation in between, then a region again.
    assert counts == {0: (5, 3), 1: (3, 3), 3: (5, 3)}
