"""How T of folded rows follows from the shapes of a call: rules that fit every example that was tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sj_tac.definition.frames import Rule


@dataclass(frozen=True)
class Example:
    """What one run showed.

    Attributes:
        shapes: of each module around convolutions, those of its input tensors. rows, steps: of each convolution; steps is T.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    rows: Mapping[str, int]
    steps: Mapping[str, int]


def shapes_of(arguments: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all tensors among the arguments of a call, in their order."""
    return tuple(tuple(x.shape) for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, Tensor))


def varied(arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments with one row more in dimension 0, and in dimension 1, of the first tensor and of those like it."""
    x = next((a for a in arguments if isinstance(a, Tensor)), None)
    if x is None:
        return
    for dim in (0, 1):
        if x.dim() > dim + 2:
            yield tuple(_longer(a, dim, x.shape[dim]) for a in arguments)


def _longer(value: Any, dim: int, size: int) -> Any:
    if isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == size:
        return torch.cat([value, value.narrow(dim, 0, 1)], dim)
    return value


def rules(name: str, examples: list[Example]) -> tuple[str, tuple[Rule, ...]]:
    """Return the module around a convolution whose calls tell its T, and all rules that find it in each of the examples.

    The nearest module that tells T is taken: then a call of a part of the net shares as well. A size alone tells it only if
    T was seen to vary; it may be the number of channels.
    """
    shown = [e for e in examples if name in e.steps and name in e.rows]
    if not shown:
        return "", ()
    varies = len({e.steps[name] for e in shown}) > 1
    parts = name.split(".")[:-1]
    for of in [".".join(parts[:i]) for i in range(len(parts), -1, -1)]:
        found = _rules_of(of, name, shown)
        kinds = {rule.kind for rule in found}
        if "quotient" in kinds or (varies and "size" in kinds) or not of:
            return of, found
    raise AssertionError("the net itself is the last")


def _rules_of(of: str, name: str, shown: list[Example]) -> tuple[Rule, ...]:
    candidates = [Rule("rows"), Rule("number", shown[0].steps[name])]
    kinds: tuple[Literal["size", "quotient"], ...] = ("size", "quotient")
    for kind in kinds:
        candidates += [
            Rule(kind, argument=i, dim=d)
            for i, shape in enumerate(shown[0].shapes.get(of, ()))
            for d in range(min(2, len(shape)))
        ]
    return tuple(r for r in candidates if all(r.steps(e.rows[name], e.shapes.get(of, ())) == e.steps[name] for e in shown))
