"""A convolution that is computed as its neurons step: drives that are exact in float32, so that no order of sums matters."""

import pytest
import torch
import torch.nn.functional as F
from fire_cases import POOLS, space
from hypothesis import given, settings, strategies as st
from spikingjelly.activation_based import functional
from support import awake, conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac import host
from sj_tac.functional import fire
from sj_tac.rewrites import lower

CL = torch.channels_last
SIDES = st.tuples(st.integers(1, 3), st.integers(1, 3))
CONVOLUTIONS = st.fixed_dictionaries(
    {
        "channels": st.integers(1, 4), "kernel": SIDES, "stride": SIDES, "padding": SIDES, "dilation": SIDES,
        "bias": st.booleans(), "N": st.integers(1, 3), "G": st.integers(1, 6),
        # Fewer than a vector, as many, several vectors and a rest, as many as a tile of neurons.
        "out": st.sampled_from([1, 5, 8, 16, 24, 33, 48, 64, 96, 130, 300, 512]), "map": st.integers(7, 12),
    }
)  # fmt: skip


def eighths(*shape):
    return torch.randint(-6, 7, shape) / 8


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(CONVOLUTIONS, space)
def test_drives_computed_on_the_way_are_the_convolutions(case, of):
    torch.manual_seed(of["seed"])
    kind, v_reset, decay_input = of["neuron"]
    spiking, pool, k = node(kind, v_reset, decay_input, 2.0, v_threshold=0.5), POOLS[of["pool"]], of["k"]
    groups, out = case["G"], case["out"]
    x = torch.randint(0, 3, (groups * case["N"], case["channels"], case["map"], case["map"] + 2)).float()
    weight = eighths(out, case["channels"], *case["kernel"]).contiguous(memory_format=CL)
    bias = eighths(out) if case["bias"] else None
    how = case["stride"], case["padding"], case["dilation"]
    drives = F.conv2d(x, weight, bias, *how).unflatten(0, (groups, -1))
    steps = groups * k
    sums = (of["group"], (1.0,) * of["group"], None) if of["group"] else None
    options = {"weights": torch.ones(steps), "group": of["group"]} if sums else {}
    expected = fire(drives, spiking, k, steps=steps, pool=pool, backend="reference", **options)
    numbers = (*host.numbers_of(spiking)[:6], *host.fused_surrogate(spiking))
    window = pool and ((1 if "Max" in type(pool).__name__ else 2), *host.pool_window(pool))
    run = lower.Fire(numbers, k, 3, window, "plain")
    with torch.no_grad():
        last = not weight.is_contiguous()
        assert (lower._convolved(x, groups, weight, bias, *how)[1] is not None) == last
        w = spiking.w if kind == "plif" else None
        got = run(x, None, None, None, w, ((weight, bias, *how), None), sums, (steps, None))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not last or got[0].flatten(0, 1).is_contiguous(memory_format=CL)


@pytest.mark.captured
@pytest.mark.parametrize("k", [1, 3])
def test_a_net_computes_its_first_layer_so_in_inference_and_not_in_training(k):
    torch.manual_seed(0)
    layers = conv(2, 24, padding=1), norm(24), node("lif"), conv(24, 8, padding=1), norm(8), node("if")
    net, x = nn.Sequential(*layers).eval(), frames(7, 2, 2, 9, 8)
    net = awake(net, x).to(memory_format=CL)
    fast, slow = (sj_tac.convert(net, "preserve", k, fuse=fuse) for fuse in (True, False))
    for training in (False, True):
        with torch.set_grad_enabled(training):
            found, wanted = fast(x), slow(x)
        assert 0.05 < wanted.mean() < 0.5
        assert (found != wanted).float().mean() < 1e-3
        code = sj_tac.report(fast).graphs[-1].code
        assert code.count("conv2d(") == (2 if training else 1)
        functional.reset_net(fast), functional.reset_net(slow)
    # Weights that are written behind the net's back count at once: nothing of them is kept.
    for changed in (fast, slow):
        changed[0].weight.data.mul_(-1)
    with torch.no_grad():
        assert (fast(x) != slow(x)).float().mean() < 1e-3


def test_maps_that_hold_no_window_are_torchs_error():
    weight = torch.randn(4, 2, 3, 3).contiguous(memory_format=CL)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        lower._convolved(torch.randn(2, 2, 2, 2), 1, weight, None, (1, 1), (0, 0), (1, 1))
