"""Combinations of parameters in which every two values meet."""

from itertools import combinations, product

import pairs
import pytest


@pytest.mark.parametrize("sizes", [(3, 4, 2), (5, 2, 2, 3), (1, 3, 3), (2, 2, 2, 2, 2)])
def test_every_two_values_meet_and_nothing_comes_twice(sizes, monkeypatch):
    monkeypatch.setattr(pairs, "EVERY", False)
    found = pairs.rows(*map(range, sizes))
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in found} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(set(found)) == len(found) < 2 * max(x * y for x, y in combinations(sizes, 2))
    assert found == pairs.rows(*map(range, sizes))  # two processes that share the tests must find the same


def test_every_combination_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(pairs, "EVERY", True)
    assert pairs.rows("ab", "cd", "ef") == list(product(range(2), repeat=3))
