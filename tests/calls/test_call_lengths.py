"""A collapse in calls of every length, also of fewer frames than it makes one of: where the region ends hangs on no T.

Each call is compared with the definition on T frames, outputs, gradients and voltages, one call after another.
"""

import pytest
import torch
from defined import given, same
from definition import Setting, define, margins, planned_neurons
from hypothesis import HealthCheck, example, given as drawn, settings, strategies as st
from spikingjelly.activation_based import layer
from support import conv, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError, PolicyError

C = 3


def unit(narrow=None):
    return nn.Sequential(narrow or conv(C, C), norm(C), node("lif", v_threshold=0.3))


class Joined(nn.Module):
    """Two branches, each of one unit or two, whose sum or concatenation a third reads, and a readout."""

    def __init__(self, join, behind, deeper):
        super().__init__()
        self.join = join
        self.a, self.b = unit(), unit()
        self.more = unit() if deeper else nn.Identity()
        self.behind = behind()
        self.c, self.d = unit(conv(2 * C, C) if join == "cat" else conv(C, C)), unit()

    def forward(self, x):
        a, b = self.more(self.a(x)), self.b(x)
        return self.d(self.c(self.behind(torch.cat([a, b], 2) if self.join == "cat" else a + b)))


BEHIND = {
    "nothing": nn.Identity,
    "a mean": lambda: layer.AvgPool2d(2, step_mode="m"),
    "a printed shape": layer.PrintShapeModule,
}
if hasattr(layer, "Upsample"):
    BEHIND["a larger map"] = lambda: layer.Upsample(scale_factor=2, step_mode="m")
RULES = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["collapse", "collapse", "preserve", "keep"]),
        "k": st.sampled_from([2, 4, 3, 6, 1]),
        "spikes": st.sampled_from(["count", "count", "binary"]),
        "weights": st.sampled_from(["decay", "uniform"]),
    }
)
NEURONS = {f"{name}.0": f"{name}.2" for name in ("a", "b", "more", "c", "d")}


def made(join="sum", behind="nothing", deeper=False, seed=0):
    torch.manual_seed(seed)
    net = Joined(join, BEHIND[behind], deeper).double().eval()
    for module in net.modules():
        module.training = not isinstance(module, nn.BatchNorm2d)  # neurons of old hosts have no gradients in eval mode
        if isinstance(module, nn.Conv2d):
            module.weight.data *= 2
    return net


def policy_of(**rules):
    return {"default": {"mode": "keep"}, "rules": [{"match": f"{name}.0", **rule} for name, rule in rules.items()]}


def collapse(k, spikes="count"):
    return {"mode": "collapse", "k": k, "spikes": spikes, "weights": "decay"}


def check(net, policy, lengths, *, grad=True, seed=0):
    """Calls of these lengths, one after another, against the definition."""
    fast = sj_tac.convert(net, policy)
    report, rules = sj_tac.report(fast), {rule["match"]: rule for rule in policy["rules"]}
    of = {
        v.layer: Setting(v.mode, v.k, NEURONS[v.layer], **{key: rules[v.layer][key] for key in ("spikes", "weights")})
        for v in report.converted
    }
    wanted = define(net, of, planned_neurons(of, report))
    torch.manual_seed(seed + 1)
    for steps in lengths:
        x = torch.rand(steps, 2, C, 6, 6, dtype=torch.float64)
        with margins(wanted) as distances:
            found, expected = (given(one, x, grad, reset=False) for one in (fast, wanted))
        assert min(distances) > 1e-9, "a voltage lies on its threshold: choose another net"
        same(found, expected)


def test_one_step_of_many_frames_is_told_from_one_of_more():
    """Three frames to a step, and nine: seven frames are one step of either."""
    net = made(deeper=True)
    binary = collapse(3, "binary")
    check(net, policy_of(a=binary, more=binary, b=collapse(9, "binary")), [7, 9, 10])
    check(net, policy_of(a=binary, more=binary, b=binary, c=binary), [7, 2, 28])
    check(net, policy_of(a=binary, more=collapse(3), b=binary, c=binary), [3, 7, 10])


@pytest.mark.parametrize("spikes", ["count", "binary"])
def test_a_kept_transposed_convolution_carries_the_mark_on(spikes):
    net = made()
    net.c[0] = layer.ConvTranspose2d(C, C, 2, 2, step_mode="m").double()
    policy = policy_of(a=collapse(2, spikes), b=collapse(2, spikes))
    fast = sj_tac.convert(net, policy)
    assert {"c.2", "d.2"} <= {v.layer for v in sj_tac.report(fast).verdicts if v.status == "stretched"}
    check(net, policy, [5, 1])


SHORT = [2, 1, 3, 4, 6, 9]
OWN = {**collapse(1), "mode": "preserve"}
# Two and four steps to a frame: in a call of two the groups are equal, and the region ends there all the same.
TWO_AND_FOUR = {"a": collapse(2), "b": collapse(4), "c": OWN, "d": OWN | {"k": 4}}
IN_BINARY = TWO_AND_FOUR | {"a": collapse(2, "binary"), "b": collapse(4, "binary")}
# A mark that passes what stands between.
ONE, ONE_IN_BINARY = ({"a": collapse(2, how), "b": collapse(2, how), "d": collapse(2)} for how in ("count", "binary"))


@settings(max_examples=settings().max_examples // 2, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example(TWO_AND_FOUR, "sum", "nothing", SHORT, 0)
@example(IN_BINARY, "cat", "nothing", SHORT, 0)
@example(ONE, "sum", "a mean", [5, 1, 4], 0)
@example(ONE_IN_BINARY, "sum", "a printed shape", [5, 1, 4], 0)
@example(dict.fromkeys("abcd", OWN | {"k": 2}), "cat", "nothing", [5, 1, 4], 0)
@drawn(
    st.fixed_dictionaries(dict.fromkeys("abcd", RULES)),
    st.sampled_from(["sum", "cat"]),
    st.sampled_from([*BEHIND]),
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
    st.integers(0, 99),
)
def test_every_policy_in_calls_of_every_length(rules, join, behind, lengths, seed):
    net = made(join, behind, seed=seed)
    policy = policy_of(**rules)
    try:
        sj_tac.convert(net, policy)
    except (PolicyError, ConversionError):
        return  # a k that is no whole number of steps, a binary collapse that is not for this place, nothing to convert
    check(net, policy, lengths, grad=seed % 2 == 0, seed=seed)
