"""bfloat16 as the CPU kernels read and write it: every number, and every way of rounding, as torch's."""

import numpy as np
import torch
from numba import njit

from sj_tac.kernels.cpu.halves import narrowed, widened


@njit
def widen(bits, out):
    for i in range(bits.size):
        out[i] = widened(bits[i])


@njit
def narrow(numbers, out):
    for i in range(numbers.size):
        out[i] = narrowed(numbers[i], out)


def bits_of(numbers):
    return numbers.bfloat16().view(torch.int16).numpy()


# Every bfloat16, and behind each the float32 around which rounding decides: just above it, below, at and above the tie.
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16)
EDGES = (
    EVERY.to(torch.int32)[:, None] * 2**16 + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
).flatten()


def test_every_number_is_widened_to_itself():
    bits = EVERY.numpy()
    found = np.empty(bits.size, np.float32)
    widen(bits, found)
    expected = EVERY.view(torch.bfloat16).float()
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=0, equal_nan=True)


def test_numbers_are_rounded_as_torch_rounds():
    """By compiled kernels, and by Python; what is no number stays none, whichever of its many bit patterns."""
    numbers = EDGES.view(torch.float32)
    found = np.empty(numbers.numel(), np.int16)
    narrow(numbers.numpy(), found)
    assert np.array_equal(found[~numbers.isnan()], bits_of(numbers[~numbers.isnan()]))
    assert torch.from_numpy(found).view(torch.bfloat16)[numbers.isnan()].isnan().all()
    few = [narrowed(x, np.empty(0, np.int16)) for x in numbers[:: 6 * 97 + 1].numpy()]
    assert np.array_equal(few, found[:: 6 * 97 + 1])
