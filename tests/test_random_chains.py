"""Random chains under random policies, against an interpreter that knows only the equations and counts every step."""

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
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def interpret(net, policy, x):
    """The net's output, frame by frame and step by step, and the last voltage of every neuron.

    A stream is a list of (frame, steps that a neuron takes on it, source frames it stands for).
    """
    stream, voltages = [(frame, 1, 1) for frame in x], []
    chosen = iter(policy)
    modules = list(net)
    i = 0
    while i < len(modules):
        if isinstance(modules[i], layer.Conv2d):
            convolution, normalize, neuron = modules[i : i + 3]
            mode, k, spikes = next(chosen)
            pool = modules[i + 3] if i + 3 < len(modules) and isinstance(modules[i + 3], layer.MaxPool2d) else None
            stream = chain(stream, (convolution, normalize, neuron, pool), mode, k, spikes, voltages)
            i += 3 + (pool is not None)
        elif isinstance(modules[i], layer.Linear):
            linear, neuron = modules[i : i + 2]
            stream = fire([(linear(f.unsqueeze(0))[0], s, n) for f, s, n in stream], neuron, None, voltages)
            i += 2
        else:
            stream = [(modules[i](f.unsqueeze(0))[0], s, n) for f, s, n in stream]
            i += 1
    return torch.stack([f for f, _, n in stream for _ in range(n)]), voltages


def chain(stream, modules, mode, k, spikes, voltages):
    convolution, normalize, neuron, pool = modules
    beta = decay(neuron)
    step = max(s for _, s, _ in stream)
    size = 1 if mode == "keep" else max(1, k // step)
    out = []
    for start in range(0, len(stream), size):
        group = stream[start : start + size]
        total = sum(s for _, s, _ in group)
        # What each frame's steps still weigh in the membrane at the end of the group.
        weights, after = [], total
        for _, steps, _ in group:
            after -= steps
            weights.append(sum(beta ** (after + j) for j in range(steps)))
        aggregated = sum(w / sum(weights) * f for w, (f, _, _) in zip(weights, group, strict=True))
        drive = normalize(convolution(aggregated.unsqueeze(0)))[0]
        if mode == "collapse":
            out.append((drive, total, sum(n for _, _, n in group)))
        else:
            out += [(drive, s, n) for _, s, n in group]
    if mode == "collapse" and spikes == "binary":
        return fire_merged(out, neuron, pool, voltages)
    return fire(out, neuron, pool, voltages)


def decay(neuron):
    return 1.0 if not hasattr(neuron, "tau") else 1 - 1 / neuron.tau


def gain(neuron):
    return 1 / neuron.tau if getattr(neuron, "decay_input", False) else 1.0


def spike_and_reset(h, neuron):
    s = neuron.surrogate_function(h - THRESHOLD)
    return s, (h - s * THRESHOLD if neuron.v_reset is None else s * neuron.v_reset + (1 - s) * h)


def fire(drives, neuron, pool, voltages):
    rest = neuron.v_reset or 0.0
    v, out = torch.full_like(drives[0][0], rest), []
    for drive, steps, sources in drives:
        emitted = []
        for _ in range(steps):
            h = rest + decay(neuron) * (v - rest) + gain(neuron) * drive
            s, v = spike_and_reset(h, neuron)
            emitted.append(pool(s.unsqueeze(0))[0] if pool is not None else s)
        out.append((sum(emitted) / steps, steps, sources))
    voltages.append(v)
    return out


def fire_merged(drives, neuron, pool, voltages):
    rest, beta = neuron.v_reset or 0.0, decay(neuron)
    v, out = torch.full_like(drives[0][0], rest), []
    for drive, steps, sources in drives:
        charge = gain(neuron) * sum(beta**j for j in range(steps)) * drive
        s, v = spike_and_reset(rest + beta**steps * (v - rest) + charge, neuron)
        out.append((pool(s.unsqueeze(0))[0] if pool is not None else s, 1, sources))
    voltages.append(v)
    return out


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
    with margins(net) as distances:
        y, voltages = interpret(net, [choice for _, choice in rows], x)
    assume(min(distances) > 1e-9)
    (y * torch.linspace(-1, 1.5, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    found = defined.given(fast, x)
    torch.testing.assert_close(found["output 0"], y.detach(), **CLOSE)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[f"gradient of {name}"], parameter.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
    names = [name for name, module in net.named_modules() if isinstance(module, neuron.BaseNode)]
    for name, voltage in zip(names, voltages, strict=True):
        torch.testing.assert_close(found[f"voltage of {name}"], voltage.detach(), **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
    with torch.no_grad():
        torch.testing.assert_close(defined.given(fast, x, grad=False)["output 0"], y.detach(), **CLOSE)
