"""The arithmetic of int8: exact sums of whole numbers, and kernels that write them."""

import math

import pytest
import torch
import torch.nn.functional as F
from fire_cases import POOLS, build, space
from hypothesis import given, settings, strategies as st

from sj_tac.functional import fire
from sj_tac.kernels import fire_op
from sj_tac.kernels.cpu import aggregate, int8
from sj_tac.kernels.cpu.fire import Beside

needs_vnni = pytest.mark.skipif(bool(int8.problem()), reason=int8.problem())
PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))
RANDOM = {"seed": st.integers(0, 999), "bias": st.booleans(), "norm": st.booleans(), "S": st.integers(1, 255)}


def operands(case, *shape):
    torch.manual_seed(case["seed"])
    weight = torch.randn(shape)
    bias = torch.randn(shape[0]) if case["bias"] else None
    norm = (torch.randn(shape[0]), torch.randn(shape[0])) if case["norm"] else None
    return weight, bias, norm


def expected(sums, weight, case, bias, norm):
    """Scale and shift, once, on sums that float32 holds exactly."""
    w8, scale = int8.rounded(weight)
    assert sums(w8).abs().max() < 2**24
    scale, shift = scale / case["S"], torch.zeros(len(scale)) if bias is None else bias
    if norm is not None:
        scale, shift = scale * norm[0], shift * norm[0] + norm[1]
    whole = sums(w8)
    by = (-1, *[1] * (whole.dim() - 2)) if whole.dim() == 4 else (-1,)
    return whole * scale.view(by) + shift.view(by)


@needs_vnni
@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(
    st.fixed_dictionaries(
        RANDOM | {
            "channels": st.integers(1, 70), "out": st.integers(1, 40), "kernel": PAIR, "stride": PAIR, "padding": PAIR,
            "dilation": PAIR, "map": st.integers(7, 11), "last": st.booleans(), "rows": st.integers(1, 4),
        }
    )
)  # fmt: skip
def test_a_convolution_is_the_float32_one_of_whole_numbers(case):
    weight, bias, norm = operands(case, case["out"], case["channels"], *case["kernel"])
    x = torch.randint(0, 256, (case["rows"], case["channels"], case["map"], case["map"] + 1), dtype=torch.uint8)
    how = case["stride"], case["padding"], case["dilation"]
    layout = torch.channels_last if case["last"] else torch.contiguous_format
    run = int8.convolution(*how)
    found = run(x.contiguous(memory_format=layout), weight, bias, case["S"], norm)
    wanted = expected(lambda w8: F.conv2d(x.double(), w8.double(), None, *how).float(), weight, case, bias, norm)
    assert torch.equal(found, wanted)
    # What was packed is used again, and not when the weight is another.
    assert torch.equal(run(x, weight, bias, case["S"], norm), wanted)
    weight.data.neg_()
    changed = expected(lambda w8: F.conv2d(x.double(), w8.double(), None, *how).float(), weight, case, bias, norm)
    assert torch.equal(run(x, weight, bias, case["S"], norm), changed)


@needs_vnni
@given(st.fixed_dictionaries(RANDOM | {"channels": st.integers(1, 300), "out": st.integers(1, 40)}))
def test_a_linear_is_the_float32_one_of_whole_numbers(case):
    weight, bias, norm = operands(case, case["out"], case["channels"])
    x = torch.randint(0, 256, (3, 2, case["channels"]), dtype=torch.uint8)
    found = int8.linear()(x, weight, bias, case["S"], norm)
    wanted = expected(lambda w8: (x.double() @ w8.double().t()).float(), weight, case, bias, norm)
    assert torch.equal(found, wanted)


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(space, st.booleans())
def test_fire_writes_whole_sums_and_adds_what_joins_them(case, joins):
    """Against the reference kernel, which sums by the same whole weights in float32."""
    case = case | {"dtype": torch.float32, "merge": False}
    y, spiking, k, options = build(case)
    pool = POOLS[case["pool"]]
    is_mean = pool is not None and type(pool).__name__ == "AvgPool2d"
    area = math.prod(_sides(pool)) if is_mean else 1
    top = 255 // (2 * area)
    if "weights" in options:
        options["weights"] = torch.randint(0, max(2, top // case["group"]), options["weights"].shape).float()
    calls, original = [], fire_op.fire_now
    wanted, v = fire(y, spiking, k, backend="reference", **options)
    wanted = (wanted * area).round()
    try:
        fire_op.fire_now = lambda *arguments: (calls.append(arguments), original(*arguments))[1]
        with torch.no_grad():
            fire(y, spiking, k, backend="cpp", **options)
    finally:
        fire_op.fire_now = original
    joined = torch.randint(0, 100, wanted.shape, dtype=torch.uint8) if joins else None
    found, last = fire_op.fire_of(Beside(None, joined, True), *calls[0])
    assert found.dtype == torch.uint8
    assert torch.equal(found.float(), wanted + (0 if joined is None else joined.float()))
    assert torch.equal(last, v)
    if joins:
        with pytest.raises(ValueError, match=r"fire got frames \[1, .* to join an output"):
            fire_op.fire_of(Beside(None, joined[:1, :, :0], True), *calls[0])


def _sides(pool):
    size = pool.kernel_size
    return size if isinstance(size, tuple) else (size, size)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_sums_of_whole_frames(frames, group, seed):
    torch.manual_seed(seed)
    x = torch.randint(0, 4, (frames, 2, 3, 5, 37), dtype=torch.uint8)
    weights = torch.randint(0, 12, (frames,)).float()
    found = aggregate.forward(x, weights, group)
    assert found.dtype == torch.uint8
    assert torch.equal(found.float(), aggregate.forward(x.float(), weights, group))


@pytest.mark.parametrize(
    ("beta", "k", "steps", "whole", "S"),
    [
        (0.5, 2, 4, [1, 2, 1, 2], 3),
        (0.5, 8, 8, [1, 2, 4, 8, 16, 32, 64, 128], 255),
        (1.0, 3, 6, [1] * 6, 3),
        (0.5, 2, 3, [1, 2, 3], 3),  # the frame of the last group counts for three
        (0.5, 4, 7, [7, 14, 28, 56, 15, 30, 60], 105),
        (0.5, 4, 3, [1, 2, 4], 7),  # no whole group
    ],
)
def test_decays_of_a_half_and_of_one_are_exact(beta, k, steps, whole, S):
    weights = tuple(beta ** (k - 1 - j) for j in range(k))
    for by in (None, torch.tensor(weights)):
        found, sum_of_group, off = int8.whole_sums(weights if by is None else (), by, steps, 255)
        assert (found.tolist(), sum_of_group) == (whole, S)
        assert off < 1e-6


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=8), st.integers(8, 255))
def test_whole_weights_are_the_nearest_of_their_sum(weights, top):
    (whole,), S, off = int8.whole_weights((tuple(weights),), top)
    assert top >= S
    assert sum(whole) == S
    shares = [w / sum(weights) for w in weights]
    assert off == pytest.approx(max(abs(n / S - w) for n, w in zip(whole, shares, strict=True)))
    assert off <= 1 / top + 1e-9
