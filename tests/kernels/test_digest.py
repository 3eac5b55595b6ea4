"""The digest by which laid out weights are known to be those of a layer still: what changes, and how it may change."""

import numpy as np
from hypothesis import given, strategies as st

from sj_tac.kernels.cpu.digest import PIECE, digest

SIZES = st.sampled_from([1, 7, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])


@given(SIZES, st.integers(0, 2**32 - 1), st.data())
def test_one_bit_makes_another_digest(size, seed, data):
    numbers = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    before, bits = digest(numbers), numbers.view(np.uint32)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    bits[place] ^= np.uint32(1 << bit)
    assert digest(numbers) != before
    bits[place] ^= np.uint32(1 << bit)
    assert digest(numbers) == before


@given(SIZES.filter(lambda size: size > 1), st.integers(0, 2**32 - 1), st.data())
def test_numbers_that_change_places_or_signs_make_another_digest(size, seed, data):
    numbers = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    before = digest(numbers)
    a, b = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    numbers[[a, b]] = numbers[[b, a]]
    assert digest(numbers) != before
    numbers[[a, b]] = numbers[[b, a]]
    numbers[[a, b]] *= -1
    assert digest(numbers) != before
    numbers[[a, b]] *= -1
    assert digest(-numbers) != before
    assert digest(np.roll(numbers, 1)) != before


def test_digests_of_many_like_arrays_differ():
    numbers = np.zeros(PIECE, np.float32)
    seen = set()
    for i in range(2000):
        numbers[i] = numbers[(7 * i) % PIECE] = 1.0
        seen.add(digest(numbers))
    assert len(seen) == 2000
