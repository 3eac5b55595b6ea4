"""How kernels are compiled for the CPU and run by threads, and what Numba may keep of them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.digest import PIECE, digest

ROOT = Path(__file__).resolve().parents[2]


def _fill(begin, end, a, b, c, d):
    if begin >= b:
        raise MemoryError
    for i in range(begin, end):
        d[i] = a[i] + c


def test_a_kernel_is_run_for_the_types_in_front_of_it_and_a_thread_that_fails_is_an_error():
    """An array that is read only or not contiguous is another type, whose kernel takes it apart in another way."""
    fill, readonly = kernel(_fill), np.arange(4.0)
    readonly.flags.writeable = False
    for _ in range(2):
        for a in (np.arange(4.0), readonly, np.arange(8.0)[::2], np.arange(4, dtype=np.int32)):
            out = np.zeros(4)
            fill.parallel(2, 4, a, 4, 2.5, out)
            assert np.array_equal(out, a + 2.5)
    with pytest.raises(MemoryError, match="2 of 4 threads of _fill"):
        fill.parallel(4, 4, np.arange(4.0), 2, 2.5, np.zeros(4))


@given(st.sampled_from([2, 1000, PIECE, PIECE + 1, 3 * PIECE + 5]), st.integers(0, 2**32 - 1), st.data())
def test_one_bit_or_two_numbers_that_change_places_make_another_digest(size, seed, data):
    """By which laid out weights are known to be those of a layer still."""
    numbers = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    before, bits = digest(numbers), numbers.view(np.uint32)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    bits[place] ^= np.uint32(1 << bit)
    assert digest(numbers) != before
    bits[place] ^= np.uint32(1 << bit)
    assert digest(numbers) == before
    a, b = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    numbers[[a, b]] = numbers[[b, a]]
    assert digest(numbers) != before
