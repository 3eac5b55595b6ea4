"""What the handlers of operations on values share (table.py, shapes.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sj_tac.runtime.expressions import Expression, over
from sj_tac.runtime.marks import is_collapsed
from sj_tac.runtime.values import Frames, Shared, Spikes

Function = Callable[[Any], Any]
Handlers = dict[Any, Callable[..., Any]]
# Second names of torch's for the same function, with the first: of functions, and of methods.
SECOND_NAMES: dict[Any, Any] = {
    torch.multiply: torch.mul, torch.divide: torch.div, torch.true_divide: torch.div, torch.subtract: torch.sub,
    torch.negative: torch.neg,
}  # fmt: skip
SECOND_METHODS = {
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg", "multiply_": "mul_",
    "divide_": "div_", "true_divide_": "div_", "subtract_": "sub_",
}  # fmt: skip


def entering(handlers: Handlers) -> Callable[..., Callable[[Any], Any]]:
    """A decorator that enters a handler for torch functions; it is called with (function, args, kwargs), and may be
    NotImplemented."""

    def handles(*functions: Any) -> Callable[[Any], Any]:
        def enter(handler: Any) -> Any:
            for function in functions:
                handlers[function] = handler
            return handler

        return enter

    return handles


def enter_second_names(handlers: Handlers) -> None:
    """Handlers for second names: those of the first, which are told the first."""
    methods = {getattr(Tensor, second): getattr(Tensor, first) for second, first in SECOND_METHODS.items()}
    for second, first in (SECOND_NAMES | methods).items():
        if first in handlers:
            handlers[second] = lambda _, args, kwargs, first=first: handlers[first](first, args, kwargs)


def is_usable(x: Any) -> bool:
    """True for an intact value [T, N, ...]."""
    return isinstance(x, Frames) and x.folded is None and x.intact


def is_of_mode(x: Frames) -> bool:
    """False for a value that was born unrecorded where autograd records now: its frames hang on nothing.

    An expression of its expression's inputs would, as a value that was born here does.
    """
    alone = isinstance(x, Shared) and x.is_bare
    return alone or x._recorded or not torch.is_grad_enabled()


def is_number(x: Any) -> bool:
    return type(x) in (int, float)


def inner(x: Frames) -> int:
    """The first dimension that is neither time nor batch."""
    return 2 if x.folded is None else 1


def places(index: Any, rank: int, kept: int) -> tuple[Any, ...] | None:
    """An index that takes all of the first ``kept`` of ``rank`` dimensions, and says what of those behind, item by item.

    None of any other. Slices and whole numbers alone: what a tensor takes hangs on what is in it.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is Ellipsis or type(item) in (slice, int) for item in items):
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank - len(items) + 1)
    if Ellipsis in items or not kept < len(items) <= rank or any(item != slice(None) for item in items[:kept]):
        return None
    return tuple(items)


def per_frame(x: Any, function: Function, linear: bool) -> Any:
    """``function`` of every frame, on the compact form; ``linear``: weighted sums of frames may stand for them.

    ``function`` takes [any, N, ...], or [any * N, ...] where ``x`` is folded.
    """
    if isinstance(x, Shared):
        if not x.is_bare:
            return NotImplemented
        compact = x.expression.mapped()
        if x.folded is None:
            return x.like(function(compact))
        return x.like(function(compact.flatten(0, 1)).unflatten(0, (compact.shape[0], x.folded)), x.folded)
    if not linear or not isinstance(x, Spikes) or not x.sums or not is_of_mode(x):
        return NotImplemented

    def unfolded(frames: Any) -> Any:
        if x.folded is None:
            return function(frames)
        return function(frames.flatten(0, 1)).unflatten(0, (frames.shape[0], frames.shape[1]))

    sums = {wanted: unfolded(s) for wanted, s in x.sums.items()}
    first = next(iter(sums.values()))
    return with_sums(over(x.expression, unfolded), x, first, sums, x.folded)


def with_constant(function: Callable[..., Any], a: Any, b: Any) -> Any:
    """``function`` of shared frames and an ordinary tensor, on either side, that is the same for every frame and sample.

    At once: of frames that are made later, it might have been written in between.
    """
    x, constant = (a, b) if isinstance(a, Frames) else (b, a)
    if not isinstance(x, Shared) or not x.intact:
        return NotImplemented
    ahead = max(0, constant.dim() - len(x.dims) + inner(x))
    if constant.dim() > len(x.dims) or any(size != 1 for size in constant.shape[:ahead]):
        return NotImplemented
    # Such a size may be 1 in this call alone. Frames know better; collapsed time ends there, whatever it is.
    if ahead and is_collapsed(x) and not isinstance(constant, torch.nn.Parameter):
        return NotImplemented
    return per_frame(x, (lambda t: function(t, constant)) if x is a else (lambda t: function(constant, t)), False)


def with_sums(expression: Expression, x: Frames, like: Tensor, sums: Any, folded: int | None = None) -> Spikes:
    """A value of T frames with these sums; ``like``: one of them."""
    shape = (x.steps, *like.shape[1:]) if folded is None else (x.steps * like.shape[1], *like.shape[2:])
    made = Spikes.of(expression, shape, like, sums=sums, folded=None if folded is None else (x.steps, folded))
    made.maker = x.maker
    return made


def viewed(x: Any, function: Function) -> Any:
    """``function`` of every frame, whose frames are views of those of ``x``."""
    found = per_frame(x, function, True)
    return found.view_of(x, function) if isinstance(found, Frames) else found
