"""The attributes that values note what they are in, which nobody else may set."""

from __future__ import annotations

import sys
from collections.abc import Sequence

OWN = {
    "expression",
    "steps",
    "dims",
    "folded",
    "kind",
    "maker",
    "means",
    "merges",
    "normalize",
    "sums",
    "narrowed",
    "pooled",
}
_HERE = __name__.partition(".")[0] + "."


def refuse_others(name: str, shape: Sequence[int]) -> None:
    """Raise AttributeError where who sets an attribute of a value is not of this package.

    To be called from the value's ``__setattr__``.
    """
    if not sys._getframe(2).f_globals.get("__name__", "").startswith(_HERE):
        raise AttributeError(
            f"{name!r} is an attribute of sj_tac's own on frames {list(shape)} between two layers of a converted net; "
            "give yours another name, or set it on a tensor of your own: x = x[:]"
        )
