"""bfloat16 and float16 as the CPU kernels read and write them: every number, and every way of rounding, as torch's."""

import pytest
import torch

from sj_tac.kernels import aggregate_op

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def every(dtype):
    """All numbers of a dtype of 16 bits."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@HALVES
def test_every_number_comes_back_as_it_is(dtype):
    numbers = every(dtype).expand(2, -1).contiguous()
    found = aggregate_op.aggregate_now(numbers, torch.ones(2), 1)
    torch.testing.assert_close(found, numbers, rtol=0, atol=0, equal_nan=True)


@HALVES
def test_numbers_are_rounded_as_torch_rounds(dtype):
    """A weight of float32 times 1 is that weight, in whole vectors and in what is left over.

    Around each number those where rounding decides: just above it, and below, at and above the tie.
    """
    known = every(dtype).float()
    ties = (known[:-1] + known[1:]) / 2  # infinite and NaN ones, too
    numbers = torch.cat([known, ties, torch.tensor([65519.9, 65520.0, 1e30, 1e-30, -1e-45])])
    up, down = (numbers.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))
    numbers = torch.cat([numbers, up, down])
    found = aggregate_op.aggregate_now(torch.ones(numbers.numel(), 35, dtype=dtype), numbers, 1)
    expected = numbers.to(dtype).unsqueeze(1).expand_as(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
