"""The definition's three operators against its equations, SpikingJelly's neurons, float64, and torch's operator checks."""

import pairs
import pytest
import torch
from hypothesis import given, strategies as st
from spikingjelly.activation_based import neuron, surrogate
from torch.autograd import forward_ad

from sj_tac import host
from sj_tac.definition import ops
from sj_tac.rewrites.equations.nodes import AGGREGATE, EXPAND, NEURON

KINDS = {"lif": neuron.LIFNode, "if": neuron.IFNode, "plif": neuron.ParametricLIFNode}
ALPHA, NUMBER = 2.0, host.FUSED_SURROGATES.index(surrogate.ATan)


# Forward-mode derivatives make torch script functions of its own, and warn of it; so do its checks of other tensors' grads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]


def frames(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(steps=st.integers(1, 9), k=st.integers(1, 5), n=st.integers(1, 3), normalize=st.booleans(), trained=st.booleans())
def test_sums_and_frames_of_any_t_and_k_are_their_equations(steps, k, n, normalize, trained):
    """w_j = beta^(l-1-j) / S_l of a group of l frames, without / S_l where not normalised."""
    x, beta = frames(steps * n, 2), 0.7
    weights = torch.tensor([beta ** (k - 1 - j) for j in range(k)], dtype=x.dtype)
    weights = weights / weights.sum() if normalize else weights
    form = "normalized" if normalize else "plain"
    found = ops.aggregate(x, [] if trained else weights.tolist(), weights if trained else None, steps, form)
    expected = []
    for group in x.view(steps, n, 2).split(k):
        own = [beta ** (len(group) - 1 - j) for j in range(len(group))]
        expected.append(sum(w * f for w, f in zip(own, group, strict=True)) / (sum(own) if normalize else 1))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-12, atol=1e-12)
    again = ops.expand(found, k, steps).view(steps, n, 2)
    assert all(
        torch.equal(again[t], expected[t // k]) or (again[t] - expected[t // k]).abs().max() < 1e-12 for t in range(steps)
    )
    if normalize:  # aggregate(expand(y)) = y
        back = ops.aggregate(again.flatten(0, 1), weights.tolist(), None, steps, form)
        torch.testing.assert_close(back, found, rtol=1e-12, atol=1e-12)


def made(kind, reset, detach, decay_input=True):
    options = {} if kind == "if" else {"decay_input": decay_input}
    if kind == "lif":
        options["tau"] = 1.7
    return KINDS[kind](
        v_threshold=0.4,
        v_reset=reset,
        detach_reset=detach,
        surrogate_function=surrogate.ATan(ALPHA),
        step_mode="m",
        **options,
    ).double()


def numbers(node, kind):
    tau = node.tau if kind == "lif" else 1.0
    decays = kind != "if" and node.decay_input
    return kind, tau, decays, node.v_threshold, node.v_reset, node.detach_reset, NUMBER, ALPHA


@pairs.parametrize(
    kind=KINDS, reset=[None, 0.0, -0.2], detach=[False, True], decay_input=[True, False], carried=[False, True]
)
def test_a_neuron_is_spikingjellys_with_its_gradients(kind, reset, detach, decay_input, carried):
    node, x = made(kind, reset, detach, decay_input), frames(6, 2, 3, 4)
    start = frames(2, 3, 4, seed=1) * 0.2
    results = []
    for ours in (False, True):
        drive, v, w = x.clone().requires_grad_(), start.clone().requires_grad_(), getattr(node, "w", None)
        node.zero_grad()
        if ours:
            spikes, last = ops.neuron(drive, v if carried else None, w, *numbers(node, kind))
        else:
            node.reset()
            if carried:
                node.v = v
            spikes, last = node(drive), node.v
        along = torch.linspace(0.5, 1.5, spikes.numel(), dtype=spikes.dtype).view_as(spikes)
        ((spikes * along).sum() + 2 * last.sum()).backward()
        results.append([spikes, last, drive.grad, v.grad if carried else None, None if w is None else w.grad.clone()])
    assert 0.05 < results[0][0].mean() < 0.6
    for expected, found in zip(*results, strict=True):
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_inputs_are_stepped_and_summed_in_float32_whatever_autocast_says(dtype, autocast):
    x, node = frames(6, 2, 3, dtype=dtype), made("lif", 0.0, False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        spikes, last = ops.neuron(x, None, None, *numbers(node, "lif"))
        sums = ops.aggregate(x, [0.3, 0.7], None, 6, "normalized")
    wide, wide_last = ops.neuron(x.float(), None, None, *numbers(node, "lif"))
    assert (spikes.dtype, last.dtype, sums.dtype) == (dtype, torch.float32, dtype)
    assert torch.equal(spikes.float(), wide)
    assert torch.equal(last, wide_last)
    assert torch.equal(sums, ops.aggregate(x.float(), [0.3, 0.7], None, 6, "normalized").to(dtype))


def test_learned_weights_of_a_short_last_group_are_finite_however_far_apart_logits_are():
    logits = torch.tensor([900.0, 0.0], dtype=torch.float64, requires_grad=True)
    x = frames(3, 2)
    found = ops.aggregate(x, [], logits, 3, "logits")
    torch.testing.assert_close(found, torch.stack([x[0], x[2]]), rtol=0, atol=0)
    found.sum().backward()
    assert logits.grad.abs().max() == 0


def test_no_samples_are_no_error():
    x = torch.zeros(6, 0, 3)
    assert ops.aggregate(x.flatten(0, 1), [0.5, 0.5], None, 6, "normalized").shape == (0, 3)
    assert ops.expand(x.flatten(0, 1)[:0], 2, 6).shape == (0, 3)
    assert [t.shape for t in ops.neuron(x, None, None, *numbers(made("lif", 0.0, False), "lif"))] == [(6, 0, 3), (0, 3)]


def lying(how):
    x = frames(6, 2, 3, 4, 5)
    if how == "channels_last":
        return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (6, 2))
    if how == "time inside":
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if how == "with gaps":
        return torch.stack([x, x], -1)[..., 0]
    return x


CALLS = {
    "aggregate": lambda x: (AGGREGATE, (x, [0.25, 0.75], None, 6, "normalized")),
    "aggregate, trained": lambda x: (AGGREGATE, (x, [], x.new_tensor([0.2, 0.3, 0.1]).requires_grad_(), 6, "logits")),
    "expand": lambda x: (EXPAND, (x, 2, 12)),
    "neuron": lambda x: (NEURON, (x, x[0].detach().clone(), None, *numbers(made("lif", None, False), "lif"))),
    "plif": lambda x: (NEURON, (x, None, x.new_tensor(0.3).requires_grad_(), *numbers(made("plif", 0.0, True), "plif"))),
}


@pairs.parametrize(call=CALLS, how=["contiguous", "channels_last", "time inside", "with gaps"])
def test_torchs_checks_of_operators(call, how):
    """Schema, fake kernel (shapes, strides, dtypes) and autograd, under compilation with symbolic sizes, too."""
    operator, args = CALLS[call](lying(how).detach().requires_grad_())
    torch.library.opcheck(operator, args)
    if how == "channels_last" and call != "expand":
        out = operator(*args)
        out = out[0] if isinstance(out, tuple) else out
        assert out.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("call", CALLS)
def test_derivatives_that_are_not_there_are_refused_by_name(call):
    x = lying("contiguous").requires_grad_()
    operator, args = CALLS[call](x)
    name = operator._name.rpartition(":")[2]

    def of(x):
        made = operator(x, *args[1:])
        return made[0] if isinstance(made, tuple) else made

    first = args[0].detach()
    with pytest.raises(NotImplementedError, match=f"{name}: forward-mode derivatives are not implemented"):
        torch.func.jvp(of, (first,), (torch.ones_like(first),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"forward[- ]mode"):
        of(forward_ad.make_dual(first, torch.ones_like(first)))
    leaf = first.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name} has no gradient of a gradient"):
        torch.autograd.grad(of(leaf).square().sum(), leaf, create_graph=True)
