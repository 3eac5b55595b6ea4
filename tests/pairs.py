"""Parameters of tests in combinations: every pair of values meets, not every combination of all of them.

A defect that no single value brings about is nearly always two values' (all-pairs testing). With
``SJ_TAC_EVERY_COMBINATION=1`` in the environment the whole product runs; it takes a few times as long.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

EVERY = os.environ.get("SJ_TAC_EVERY_COMBINATION") == "1"


def rows(*axes: Sequence[Any]) -> list[tuple[int, ...]]:
    """Places in ``axes`` such that every two values of two axes meet in one of them: always the same, in order."""
    everything = list(product(*(range(len(axis)) for axis in axes)))
    if EVERY or len(axes) < 3:
        return everything
    places = list(combinations(range(len(axes)), 2))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, b, row[a], row[b]) for a, b in places}

    missing, found = set().union(*map(pairs, everything)), []
    while missing:
        best = max(everything, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        found.append(best)
    return sorted(found)


def parametrize(*fixtures: str, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` of all names, in combinations in which every two values meet.

    Args:
        fixtures: names among ``axes`` whose values are handed to a fixture.
        axes: values by name; of a dict, its keys. Tests are called by those that have a short word, and by places.
    """
    values = [list(axis) for axis in axes.values()]

    def word(axis: int, place: int) -> str:
        value = values[axis][place]
        if isinstance(value, (str, int, float, torch.dtype, torch.memory_format, type(None))):
            return str(value)
        return getattr(value, "__name__", f"{list(axes)[axis]}{place}")

    found = [
        pytest.param(*(values[axis][i] for axis, i in enumerate(row)), id="-".join(word(*at) for at in enumerate(row)))
        for row in rows(*values)
    ]
    return pytest.mark.parametrize(list(axes), found, indirect=list(fixtures))
