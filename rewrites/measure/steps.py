"""How T of folded rows follows from the shapes of a call: rules that fit every example that was tried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from sj_tac.definition.frames import Rule
from sj_tac.rewrites.measure.survey import Survey


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


def seen(name: str, neuron: str, surveys: list[Survey]) -> list[tuple[int, int]]:
    """Return rows and T of a convolution in each run; its T is that of the neuron that it drives."""
    return [(s.inputs[name][0].shape[0], s.neurons[neuron].layout.T) for s in _of(name, neuron, surveys)]


def _of(name: str, neuron: str, surveys: list[Survey]) -> list[Survey]:
    return [s for s in surveys if name in s.inputs and neuron in s.neurons]


def rules(name: str, neuron: str, surveys: list[Survey]) -> tuple[str, tuple[Rule, ...]]:
    """Return the module around a convolution whose calls tell its T, and all rules that find it in each of the runs.

    The nearest module that tells T is taken: then a call of a part of the net shares as well. A size alone tells it only if
    T was seen to vary; it may be the number of channels.
    """
    shown = seen(name, neuron, surveys)
    if not shown:
        return "", ()
    varies = len({T for _, T in shown}) > 1
    parts = name.split(".")[:-1]
    for of in [".".join(parts[:i]) for i in range(len(parts), -1, -1)]:
        found = _rules_of([s.shapes.get(of, ()) for s in _of(name, neuron, surveys)], shown)
        kinds = {rule.kind for rule in found}
        if "quotient" in kinds or (varies and "size" in kinds) or not of:
            return of, found
    raise AssertionError("the net itself is the last")


def _rules_of(shapes: list[tuple[tuple[int, ...], ...]], shown: list[tuple[int, int]]) -> tuple[Rule, ...]:
    candidates = [Rule("rows"), Rule("number", shown[0][1])]
    kinds: tuple[Literal["size", "quotient"], ...] = ("size", "quotient")
    sizes = [(i, d) for i, shape in enumerate(shapes[0]) for d in range(min(2, len(shape)))]
    candidates += [Rule(kind, argument=i, dim=d) for kind in kinds for i, d in sizes]
    examples = list(zip(shown, shapes, strict=True))
    return tuple(r for r in candidates if all(r.steps(rows, of) == T for (rows, T), of in examples))
