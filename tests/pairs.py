"""Cover every pair of two parameters' values, not every combination of all of them.

A fault that no single value shows nearly always takes two values together (all-pairs testing). ``pytest --exhaustive``
runs the whole product.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

# Set by conftest.py before it collects any test.
EXHAUSTIVE = False


def parametrize(*fixtures: str, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Return ``pytest.mark.parametrize`` over rows of ``axes`` in which every two values of two axes meet.

    Args:
        fixtures: the axes whose values go to a fixture of that name.
        axes: the values of each parameter; of a dict, its keys.
    """
    values = [list(axis) for axis in axes.values()]
    places = [list(range(len(axis))) for axis in values]
    rows = product(*places) if EXHAUSTIVE or len(places) < 3 else AllPairs(places)

    def word(axis: int, place: int) -> str:
        value = values[axis][place]
        if isinstance(value, (str, int, float, torch.dtype, torch.memory_format, type(None))):
            return str(value)
        return getattr(value, "__name__", f"{list(axes)[axis]}{place}")

    found = [
        pytest.param(*(values[axis][i] for axis, i in enumerate(row)), id="-".join(word(*at) for at in enumerate(row)))
        for row in rows
    ]
    return pytest.mark.parametrize(list(axes), found, indirect=list(fixtures))
