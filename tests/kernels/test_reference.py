"""The reference kernels against float64 sums, finite differences and each other."""

import pytest
import torch
from hypothesis import given, strategies as st

from sj_tac import functional

steps = st.integers(1, 40)
sizes = st.integers(1, 12)


@given(steps, sizes, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_aggregate_is_the_weighted_sum(total, k, dtype):
    x = torch.randn(total, 2, 3).to(dtype)
    weights = torch.rand(k, dtype=torch.float64)
    y = functional.aggregate(x, weights.tolist(), k)
    rows = []
    for start in range(0, total, k):
        group = x[start : start + k].double()
        chosen = weights[-len(group) :] if len(group) < k else weights
        chosen = chosen * weights.sum() / chosen.sum()
        rows.append((chosen.view(-1, 1, 1) * group).sum(0))
    assert y.dtype == dtype
    # One rounding to the dtype, after sums in float32 or better.
    torch.testing.assert_close(y.double(), torch.stack(rows), rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_half_sums_do_not_lose_small_frames():
    """256 frames of 1 summed in bfloat16 itself would stop growing at 256 / 2."""
    x = torch.ones(512, 1, dtype=torch.bfloat16)
    assert functional.aggregate(x, [1.0] * 512, 512).item() == 512


@given(st.floats(0.05, 1.0), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_decay_weights_are_what_the_membrane_still_holds(beta, lengths):
    weights = functional.decay_weights(beta, lengths, normalize=False)
    for j, weight in enumerate(weights):
        membrane = 0.0
        for i, length in enumerate(lengths):
            for _ in range(length):
                membrane = beta * membrane + (1.0 if i == j else 0.0)
        assert weight == pytest.approx(membrane)
    assert sum(functional.decay_weights(beta, lengths)) == pytest.approx(1.0)


def test_wrong_arguments_say_what_was_wrong():
    x = torch.zeros(7, 1)
    with pytest.raises(ValueError, match=r"aggregate needs frames .* got shape \[0, 1\]"):
        functional.aggregate(x[:0], [1.0], 1)
    with pytest.raises(ValueError, match="aggregate got 2 weights for k=3"):
        functional.aggregate(x, [0.5, 0.5], 3)
    with pytest.raises(ValueError, match="aggregate got 2 tail weights, but T=7 and k=3 leave 1"):
        functional.aggregate(x, [1.0, 1.0, 1.0], 3, [0.5, 0.5])
    with pytest.raises(ValueError, match="expand got 7 frames, but 9 steps in groups of 3 make 3"):
        functional.expand(x, 3, 9)
    assert functional.expand(x[:3], 3, 8).shape == (8, 1)
