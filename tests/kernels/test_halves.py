"""bfloat16 as the CPU kernels read and write it: every number, and every way of rounding, as torch's."""

import torch

from sj_tac.kernels import aggregate_op

# Every bfloat16, and behind each the float32 around which rounding decides: just above it, below, at and above the tie.
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16)
EDGES = (
    EVERY.to(torch.int32)[:, None] * 2**16 + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
).flatten()


def test_every_number_comes_back_as_it_is():
    numbers = EVERY.view(torch.bfloat16).expand(2, -1).contiguous()
    found = aggregate_op.aggregate_now(numbers, torch.ones(2), 1)
    torch.testing.assert_close(found, numbers, rtol=0, atol=0, equal_nan=True)


def test_numbers_are_rounded_as_torch_rounds():
    """A weight of float32 times 1 is that weight, in whole vectors and in what is left over."""
    numbers = EDGES.view(torch.float32)
    found = aggregate_op.aggregate_now(torch.ones(numbers.numel(), 35, dtype=torch.bfloat16), numbers, 1)
    expected = numbers.bfloat16().unsqueeze(1).expand_as(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
