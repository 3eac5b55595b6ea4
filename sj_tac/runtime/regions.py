"""Where collapsed time ends: a converted module goes by the mark of what it is handed, and by what the trace has there.

A value carries its mark through what treats all frames alike, and the trace knows the same operations. Where one of them
knows more, frames decide: a mark that the trace lacks ends there, and frames that are alike as it says have its mark. A call
then gives what it gives compiled, exported or counted, where modules hand on frames and only the trace is there to ask
(``Borders.go_by_trace`` says when).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sj_tac.kernels import reference
from sj_tac.kernels.weights import group_lengths
from sj_tac.runtime.borders import PLAIN, Span
from sj_tac.runtime.expressions import SharedExpression
from sj_tac.runtime.groups import Groups
from sj_tac.runtime.values import Frames, Shared, Spikes, ordinary

# Between frames that are alike: a matrix product may round the rows of one frame in another order than those of the next.
ROUNDINGS = 64


def mark_of(x: Any) -> tuple[Span, int]:
    """What a frame of a value stands for, and how many of its steps a neuron makes one of."""
    if isinstance(x, Shared):
        groups = x.expression.groups
        if x.merges:
            return Span(groups.per_step * groups.first, 1), groups.first
        if x.means is not None:
            return Span(x.means.per_step, x.means.first), 1
        return (PLAIN if groups.frames is groups.steps else Span(groups.per_step, 1)), 1
    if isinstance(x, Spikes) and x.means is not None:
        return Span(x.means.per_step, x.means.first), 1
    return PLAIN, 1


def as_traced(
    x: Tensor,
    name: str,
    span: Span,
    merge: int = 1,
    normalize: bool = True,
    unfold: Callable[[Tensor], Tensor | None] | None = None,
) -> Tensor:
    """What a module is handed, with the mark that the trace has there, or none.

    Args:
        x: a value or frames [T, N, ...]. name: of the module. span: what the trace says of them.
        merge: how many steps the module makes one of. normalize: whether it divides their drive by its weights' sum.
        unfold: from the folded frames [T * N, ...] that a module takes to frames; None where nobody knows how.
    """
    found = mark_of(x)
    if found == (span, merge):
        return x
    if found != (PLAIN, 1):
        x = ordinary(x, name)
    return x if span == PLAIN else _marked(x, name, (span, merge, normalize), unfold)


def _marked(
    x: Tensor, name: str, traced: tuple[Span, int, bool], unfold: Callable[[Tensor], Tensor | None] | None
) -> Tensor:
    """The value of frames that are alike as the trace says; what came where they are not."""
    span, merge, normalize = traced
    if isinstance(x, Frames) and (x.folded is not None) is not (unfold is not None):
        return x
    came: Any = ordinary(x, name)
    frames = came if unfold is None else unfold(came)
    if frames is None or frames.dim() < 2 or len(frames) < 2 or not frames.is_floating_point():
        return x
    lengths = group_lengths(frames.shape[0], span.factor)
    if not _are_near(frames.detach(), reference.repeat(reference.first(frames.detach(), lengths), lengths)):
        return x
    before, whole = span.merged // merge, merge * span.stretch
    steps = tuple(group_lengths(-(-frames.shape[0] // before), whole))
    groups = Groups(steps, steps if before == 1 else tuple(lengths), before, whole if whole > 1 else 0)
    compact = SharedExpression(reference.mean_of_alike(frames, lengths), groups)
    made = Shared.of(compact, groups if span.stretch > 1 else None, None if unfold is None else frames.shape[1])
    if merge > 1:
        made.merges, made.normalize = True, normalize
    return made


def _are_near(a: Tensor, b: Tensor) -> bool:
    """Equal but for roundings: of sums, which are taken in float32 at least, and of what is written in a half dtype."""
    if a.is_meta or not a.numel():
        return False
    most = float(b.abs().max())
    if not math.isfinite(most):
        return torch.equal(a, b)
    slack = ROUNDINGS * torch.finfo(reference.accumulation_dtype(a.dtype)).eps
    return bool(torch.allclose(a, b, rtol=max(slack, 2 * torch.finfo(a.dtype).eps), atol=slack * most))
