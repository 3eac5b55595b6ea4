"""Random chains under random policies, against their definition: a collapse in each layer that a policy lets begin one."""

import defined
import torch
from definition import margins
from hypothesis import assume, example, given, settings, strategies as st
from spikingjelly.activation_based import layer, neuron
from support import conv, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError

THRESHOLD = 0.35


neurons = st.tuples(
    st.sampled_from(["lif", "if"]), st.sampled_from([None, 0.0, -0.2]), st.booleans(), st.sampled_from([1.5, 3.0])
)
layers = st.tuples(neurons, st.sampled_from(["none", "max", "avg"]), st.booleans())
# Mostly powers of two, so that most ks are whole numbers of the frames that a collapse before them makes.
choices = st.tuples(
    st.sampled_from(["preserve", "collapse", "keep"]),
    st.sampled_from([1, 2, 2, 4, 4, 8, 3]),
    st.sampled_from(["count", "count", "binary"]),
)


LIF = ("lif", 0.0, True, 3.0)


def row(mode, k, spikes="count", pool="none"):
    return ((LIF, pool, False), (mode, k, spikes))


# Frames that stand for 2, 2, 2 and 1 steps, in whole groups of two: the last group has weights of its own.
@example([row("collapse", 2), row("preserve", 4)], LIF, 7, 0, "fused")
@example([row("collapse", 2, pool="max"), row("collapse", 4, pool="max")], LIF, 11, 1, "unfused")
@example([row("collapse", 2, "binary"), row("collapse", 2), row("preserve", 4)], LIF, 13, 2, "fused")
@example([row("collapse", 2), row("collapse", 2, "binary", "avg"), row("collapse", 4)], LIF, 5, 0, "v_seq kept")
@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(st.tuples(layers, choices), min_size=1, max_size=3),
    neurons,
    st.integers(1, 12),
    st.integers(0, 99),
    st.sampled_from(["fused", "fused", "unfused", "v_seq kept"]),
)
def test_values_voltages_and_gradients_of_random_chains(rows, head, steps, seed, way):
    torch.manual_seed(seed)
    modules, rules, channels, size = [], [], 2, 6
    for ((kind, v_reset, decay_input, tau), pool, bias), (mode, k, spikes) in rows:
        # A glob is only reported where an exact name would be an error.
        rules.append({"match": f"[{str(len(modules))[0]}]{str(len(modules))[1:]}", "mode": mode, "k": k, "spikes": spikes})
        spiking = node(kind, v_reset, decay_input, tau, v_threshold=THRESHOLD)
        modules += [conv(channels, 3, bias=bias), norm(3), spiking]
        if pool != "none" and size > 2:
            modules.append((layer.MaxPool2d if pool == "max" else layer.AvgPool2d)(2, step_mode="m"))
            size //= 2
        channels = 3
    kind, v_reset, decay_input, tau = head
    modules += [layer.Flatten(step_mode="m"), layer.Linear(3 * size * size, 4, step_mode="m")]
    modules += [node(kind, v_reset, decay_input, tau, v_threshold=THRESHOLD), layer.VotingLayer(2, step_mode="m")]
    net = nn.Sequential(*modules).double().eval()
    try:
        fast = sj_tac.convert(net, {"rules": rules}, fuse=way != "unfused", backend=defined.backend(net, rules))
    except ConversionError:
        assert all(mode == "keep" for _, (mode, _, _) in rows)
        return
    convs = [str(i) for i, m in enumerate(net) if isinstance(m, layer.Conv2d)]
    report = sj_tac.report(fast)
    assert [v.layer for v in report.verdicts if v.layer in convs] == convs
    x = (torch.rand(steps, 2, 2, 6, 6) < 0.5).double()
    if report.refused:
        # k is no whole number of frames behind a collapse: the region ends there; shapes and keys still hold.
        assert {v.reason for v in report.refused} == {"K_NOT_WHOLE"}
        with torch.no_grad():
            assert fast(x).shape == net(x).shape
        return
    for module in fast:
        if isinstance(module, neuron.BaseNode):
            module.store_v_seq = way == "v_seq kept"
    wanted = defined.defined(net, fast)
    with margins(wanted) as distances:
        expected = defined.given(wanted, x)
    assume(min(distances) > 1e-9)
    defined.same(defined.given(fast, x), expected)
    forwards = {name: value for name, value in expected.items() if not name.startswith("gradient")}
    defined.same(defined.given(fast, x, grad=False), forwards)
