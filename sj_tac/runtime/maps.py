"""Functions of values that map each frame linearly by constants, or move what is in it: at once, on the compact form.

What a trace says of them is in rewrites/maps.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sj_tac.host.dispatch import PLAIN
from sj_tac.runtime.entries import Handlers, entering, inner, is_number, per_frame, places
from sj_tac.runtime.expressions import SharedExpression
from sj_tac.runtime.marks import is_collapsed
from sj_tac.runtime.recording import Birth, BornAgain, note_write, packs, relatives
from sj_tac.runtime.values import Frames, Shared, below_functions

MAPS: Handlers = {}
handles = entering(MAPS)


def multiplies_within(rank: int, inner: int, first: bool) -> bool:
    """Whether a product with a constant of ``rank`` dimensions is of a frame's ``inner`` ones; ``first``: by it."""
    if not rank:
        return False
    reached = 1 if first and rank <= 2 else 2
    return inner >= max(reached, rank)


def sums_within_frames(args: list[Any], which: int, kept: int) -> bool:
    """Whether an einsum of two operands, of which ``which`` is frames, has their first dimensions in front and alone."""
    if which not in (0, 1) or len(args) != 3 or type(args[0]) is not str:
        return False
    left, arrow, right = args[0].replace(" ", "").partition("->")
    operands = left.split(",")
    if not arrow or "." in left or len(operands) != 2:
        return False
    frames, constant = operands[which], operands[1 - which]
    front = frames[:kept]
    once = all((frames + right).count(letter) == 2 and letter not in constant for letter in front)
    return len(frames) > kept and right[:kept] == front and once


def fills(index: Any, rank: int, kept: int, shape: Sequence[int]) -> int | None:
    """Of ``x[index] = constant``: how many of the constant's dimensions stand where a frame has none of its own.

    None where it is not the same for every frame, or fits nowhere.

    Args:
        rank: dimensions of the frames, of which the first ``kept`` are of time and batch; shape: the constant's.
    """
    found = places(index, rank, kept)
    if found is None:
        return None
    ahead = max(0, len(shape) - rank + kept + sum(type(item) is int for item in found))
    return ahead if ahead <= kept and all(size == 1 for size in shape[:ahead]) else None


def _dims(given: Any) -> list[int]:
    """Dimensions, given one by one or as one sequence; empty where they are anything else."""
    dims = [*given[0]] if len(given) == 1 and isinstance(given[0], (list, tuple)) else [*given]
    return dims if all(type(d) is int for d in dims) else []


@handles(torch.flip, Tensor.flip, torch.roll, Tensor.roll)
def _move(function: Any, args: Any, kwargs: Any) -> Any:
    """Places in another order, along dimensions behind the batch's."""
    x, *others = args
    rolls = function in (torch.roll, Tensor.roll)
    given = (kwargs["dims"],) if "dims" in kwargs else others[rolls:]
    if not isinstance(x, Frames) or not x.intact or set(kwargs) - {"dims", "shifts"}:
        return NotImplemented
    dims, rank = _dims(given), len(x.dims)
    if not dims or not all(-rank <= d < rank and d % rank >= inner(x) for d in dims):
        return NotImplemented
    return per_frame(x, lambda t: function(t, *others, **kwargs), True)


@handles(torch.index_select, Tensor.index_select, torch.repeat_interleave, Tensor.repeat_interleave)
def _take(function: Any, args: Any, kwargs: Any) -> Any:
    """Some places, or each several times, along a dimension behind the batch's."""
    x, *others = args
    at = 1 if function in (torch.repeat_interleave, Tensor.repeat_interleave) else 0
    dim = kwargs.get("dim", others[at] if len(others) > at else None)
    if not isinstance(x, Shared) or not x.intact or type(dim) is not int or dim % len(x.dims) < inner(x):
        return NotImplemented
    if any(isinstance(a, Frames) for a in (*others, *kwargs.values())):
        return NotImplemented
    return per_frame(x, lambda t: function(t, *others, **kwargs), False)


@handles(torch.channel_shuffle)
def _shuffle_channels(function: Any, args: Any, kwargs: Any) -> Any:
    """Channels of folded frames in another order."""
    x, *others = args
    if not isinstance(x, Frames) or not x.intact or x.folded is None:
        return NotImplemented
    return per_frame(x, lambda t: function(t, *others, **kwargs), True)


@handles(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
def _multiply(function: Any, args: Any, kwargs: Any) -> Any:
    """A matrix product with a constant, on either side."""
    if kwargs or len(args) != 2:
        return NotImplemented
    a, b = reversed(args) if function is Tensor.__rmatmul__ else args
    first = isinstance(a, Frames)
    x, constant = (a, b) if first else (b, a)
    if not isinstance(x, Shared) or not x.intact or type(constant) not in PLAIN:
        return NotImplemented
    if not multiplies_within(constant.dim(), len(x.dims) - inner(x), first):
        return NotImplemented
    return per_frame(x, (lambda t: torch.matmul(t, constant)) if first else (lambda t: torch.matmul(constant, t)), False)


@handles(torch.einsum)
def _einsum(function: Any, args: Any, kwargs: Any) -> Any:
    """A sum over products with a constant, within each frame."""
    which = next((i for i, a in enumerate(args[1:]) if isinstance(a, Frames)), -1)
    if kwargs or which < 0 or not isinstance(args[1 + which], Shared) or not args[1 + which].intact:
        return NotImplemented
    x = args[1 + which]
    if not sums_within_frames(list(args), which, inner(x)) or type(args[2 - which]) not in PLAIN:
        return NotImplemented
    equation, constant = args[0], args[2 - which]
    if which:
        return per_frame(x, lambda t: torch.einsum(equation, constant, t), False)
    return per_frame(x, lambda t: torch.einsum(equation, t, constant), False)


@handles(Tensor.__setitem__)
def _fill(function: Any, args: Any, kwargs: Any) -> Any:
    """Constants written to places of each frame's map, ``x[:, :, 0, :] = values``: into a copy of the compact form.

    Where others have seen the frames, or time is collapsed, frames are written.
    """
    x, index, value = args
    if not isinstance(x, Shared) or not x.intact or not x.is_bare or is_collapsed(x):
        return NotImplemented
    # A checkpoint counts what is saved, which is less where frames exist when it runs again.
    of_mode = x._recorded is torch.is_grad_enabled() and not (x._recorded and packs())
    if not of_mode or x._made is not None or x._viewed is not None or len(relatives(x)) > 1:
        return NotImplemented
    if not is_number(value) and type(value) not in PLAIN:
        return NotImplemented
    rank, kept = len(x.dims), inner(x)
    if fills(index, rank, kept, value.shape if isinstance(value, Tensor) else ()) is None:
        return NotImplemented
    at = places(index, rank, kept)
    assert at is not None
    compact = x.expression.mapped()
    if torch.is_inference_mode_enabled() and not x.expression.inputs[0].is_inference():
        return NotImplemented  # the value outlives that mode
    compact = compact.clone()
    try:
        compact[(slice(None), slice(None), *at[kept:])] = value
    except RuntimeError:
        return NotImplemented  # torch says what is wrong, of the frames
    _bear_again(x, SharedExpression(compact, x.expression.groups))
    return None


def _bear_again(x: Shared, expression: SharedExpression) -> None:
    """The same object, of another expression, whose gradients are its own."""
    held = x.__dict__
    held["expression"] = expression
    if torch.is_grad_enabled() and expression.differentiates:
        held["_birth"] = birth = Birth(type(x), expression, x.dims, x.kind, x.folded)
        with below_functions():
            BornAgain.apply(x, birth, *expression.inputs)
            held["_node"] = x.grad_fn
        held["_taken"] = False  # whoever used the compact form used what was there before
    else:
        note_write(x)
