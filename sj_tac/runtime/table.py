"""The operations that are known to treat all frames alike: the closed list. What is not here gets ordinary frames.

A missing entry is slow, a wrong one is silent: tests/runtime/test_table.py has each of them on every kind of value, intact,
folded, written and watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sj_tac.runtime.expressions import Expression, Made, SharedExpression, both, over
from sj_tac.runtime.values import TABLE, Frames, Shared, Spikes, below_functions, ordinary

Function = Callable[[Any], Any]


def handles(*functions: Any) -> Callable[[Any], Any]:
    """Enter a handler for torch functions; it is called with (function, args, kwargs), and may be NotImplemented."""

    def enter(handler: Any) -> Any:
        for function in functions:
            TABLE[function] = handler
        return handler

    return enter


def is_usable(x: Any) -> bool:
    """True for an intact value [T, N, ...]."""
    return isinstance(x, Frames) and x.folded is None and x.intact


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
    if not linear or not isinstance(x, Spikes) or not x.sums:
        return NotImplemented

    def unfolded(frames: Any) -> Any:
        if x.folded is None:
            return function(frames)
        return function(frames.flatten(0, 1)).unflatten(0, (frames.shape[0], frames.shape[1]))

    sums = {wanted: unfolded(s) for wanted, s in x.sums.items()}
    first = next(iter(sums.values()))
    return _spikes(over(x.expression, unfolded), x, first, sums, x.folded)


def _spikes(expression: Expression, x: Frames, like: Tensor, sums: Any, folded: int | None = None) -> Spikes:
    """A value of T frames with these sums; ``like``: one of them."""
    shape = (x.steps, *like.shape[1:]) if folded is None else (x.steps * like.shape[1], *like.shape[2:])
    made = Spikes.of(expression, shape, like, sums=sums, folded=None if folded is None else (x.steps, folded))
    made.maker = x.maker
    return made


@handles(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def _requires_grad(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    with below_functions():
        return function(x if x._made is None else x._made)


# ---- sums --------------------------------------------------------------------------------------------------------------
_IN_PLACE = {Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__}
_MINUS = {torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__}


@handles(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
@handles(torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__, Tensor.sub_, Tensor.__isub__)
def _add(function: Any, args: Any, kwargs: Any) -> Any:
    """A sum of two values of one shape."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args
    in_place = function in _IN_PLACE
    if isinstance(a, Frames) and _is_number(b) and function not in _IN_PLACE and a.intact:
        return per_frame(a, lambda t: function(t, b), False)
    # An ordinary tensor is not noted: anybody may write into it before the sum is used.
    if (
        function is Tensor.__rsub__
        or not (is_usable(a) and is_usable(b))
        or (a is b and in_place)
        or a.dims != b.dims
        or a.kind != b.kind
    ):
        return NotImplemented
    plain = torch.sub if function in _MINUS else torch.add
    if isinstance(a, Spikes) and isinstance(b, Spikes):
        sums = {wanted: plain(s, b.sums[wanted]) for wanted, s in a.sums.items() if wanted in b.sums}
        if in_place or not sums:
            return NotImplemented
        return _spikes(both(a.expression, b.expression, plain), a, next(iter(sums.values())), sums)
    if in_place and (not isinstance(a, Shared) or a._made is not None):
        return NotImplemented
    found = _sum_of_shared(a, b, plain)
    if found is None:
        return NotImplemented
    a.note_use()
    b.note_use()
    expression, means = found
    if in_place:
        return _add_in_place(a, b, function, (expression, means))
    made = Shared.of(expression, means)
    made.maker = a.maker
    return made


def _sum_of_shared(a: Any, b: Any, plain: Any) -> tuple[SharedExpression, Any] | None:
    """The expression of a sum, and the groups of a neuron's means behind it."""
    if not isinstance(a, Shared):
        if plain is torch.sub:
            return None
        a, b = b, a
    if not isinstance(a, Shared) or a.merges:
        return None
    left = a.expression
    if isinstance(b, Shared) and b.expression.groups == left.groups and b.means == a.means and not b.merges:
        right = b.expression
        if right.residual is not None and (left.residual is not None or plain is torch.sub):
            return None
        compact = plain(left.mapped(), right.mapped())
        residual = left.residual if left.residual is not None else right.residual
        return SharedExpression(compact, left.groups, None, residual), a.means if residual is None else None
    if left.residual is not None or left.groups.steps != left.groups.frames:
        return None
    b.expression.noted = True
    added = b.expression if plain is torch.add else over(b.expression, torch.neg)
    return SharedExpression(left.compact, left.groups, left.affine, added), None


def _add_in_place(a: Shared, b: Any, function: Any, becoming: tuple[SharedExpression, Any]) -> Shared:
    """``a += b`` or ``a -= b`` without making frames: the value is the same object, of another expression."""
    if a._node is None and not (becoming[0].differentiates and torch.is_grad_enabled()):
        a._becoming = becoming
        a._become()
        a._becoming = None
        return a
    if function in _MINUS:
        b = -b
    a._becoming = becoming
    try:
        with below_functions():
            Tensor.add_(a, b)  # autograd moves the value; below it, __torch_dispatch__ takes the new expression
            a._node = a.grad_fn
    finally:
        a._becoming = None
    return a


@handles(torch.cat, torch.concat, torch.concatenate)
def _cat(function: Any, args: Any, kwargs: Any) -> Any:
    """Values side by side in any dimension but time and batch."""
    values, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if type(values) not in (tuple, list) or not values or type(dim) is not int or set(kwargs) - {"dim"}:
        return NotImplemented
    if not all(is_usable(x) for x in values):
        return NotImplemented
    first = values[0]
    dim = dim % len(first.dims)
    if dim < 2 or any(x.kind != first.kind or x.steps != first.steps for x in values):
        return NotImplemented
    if all(isinstance(x, Shared) and x.is_bare and not x.merges for x in values):
        groups, means = first.expression.groups, first.means
        if any(x.expression.groups != groups or x.means != means for x in values):
            return NotImplemented
        return first.like(torch.cat([x.expression.mapped() for x in values], dim))
    if not all(isinstance(x, Spikes) for x in values):
        return NotImplemented
    sums = {w: torch.cat([x.sums[w] for x in values], dim) for w in first.sums if all(w in x.sums for x in values)}
    if not sums:
        return NotImplemented
    expression = values[0].expression
    for x in values[1:]:
        expression = both(expression, x.expression, lambda a, b: torch.cat([a, b], dim))
    return _spikes(expression, first, next(iter(sums.values())), sums)


# ---- shapes ------------------------------------------------------------------------------------------------------------
def _refolded(x: Frames, folded: int | None, view: Function) -> Frames:
    """The same value with T and N as one dimension, or as two again; ``view`` makes its frames of those of ``x``."""
    if isinstance(x, Shared):
        made = Shared.of(x.expression, x.means, folded)
        made.merges, made.normalize = x.merges, x.normalize
        made.maker = x.maker
        return made.view_of(x, view)
    assert isinstance(x, Spikes)
    rest = x.dims[2:] if x.folded is None else x.dims[1:]
    batch = x.dims[1] if x.folded is None else x.folded
    new = (x.steps, batch, *rest) if folded is None else (x.steps * batch, *rest)
    like = next(iter(x.sums.values())) if x.sums else _like(x)
    spikes = Spikes.of(x.expression, new, like, sums=x.sums, folded=None if folded is None else (x.steps, batch))
    spikes.maker, spikes.means = x.maker, x.means
    return spikes.view_of(x, view)


def _like(x: Frames) -> Tensor:
    """Some tensor of the value's dtype and device."""
    expression = x.expression
    return expression.frames if isinstance(expression, Made) else expression.inputs[0]


@handles(torch.flatten, Tensor.flatten)
def _flatten(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0)
    end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1)
    if not isinstance(x, Frames) or not x.intact or type(start) is not int or type(end) is not int:
        return NotImplemented
    if start == 0 and end == 1 and x.folded is None:
        return _refolded(x, x.dims[1], lambda t: t.flatten(0, 1))
    if start >= (2 if x.folded is None else 1):
        return _view(x, lambda t: t.flatten(start, end))
    return NotImplemented


def _view(x: Any, function: Function) -> Any:
    """``function`` of every frame, whose frames are views of those of ``x``."""
    found = per_frame(x, function, True)
    return found.view_of(x, function) if isinstance(found, Frames) else found


def _unfold(x: Any, sizes: Any, view: Function) -> Any:
    """[T * N, ...] as [T, N, ...], where ``sizes`` begin with T and N."""
    t, n = sizes[0], sizes[1]
    if (t, n) == (-1, -1) or t not in (x.steps, -1) or n not in (x.folded, -1) or x.steps * x.folded == 0:
        return NotImplemented
    return _refolded(x, None, view)


@handles(Tensor.unflatten, torch.unflatten)
def _unflatten(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    sizes = args[2] if len(args) > 2 else kwargs.get("sizes")
    if not isinstance(x, Frames) or x.folded is None or not x.intact or dim != 0 or len(sizes or ()) != 2:
        return NotImplemented
    return _unfold(x, sizes, lambda t: function(t, dim, sizes))


@handles(Tensor.reshape, Tensor.view, torch.reshape)
def _reshape(function: Any, args: Any, kwargs: Any) -> Any:
    x, *shape = args
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = list(shape[0])
    if kwargs or not isinstance(x, Frames) or not x.intact or not all(type(s) is int for s in shape):
        return NotImplemented
    have = x.dims
    if x.folded is not None and len(shape) == len(have) + 1 and tuple(shape[2:]) == have[1:]:
        return _unfold(x, shape, lambda t: function(t, shape))
    folds = len(shape) == len(have) - 1 and tuple(shape[1:]) == have[2:] and shape[0] in (-1, have[0] * have[1])
    if x.folded is not None or not folds or not have[0] * have[1]:
        return NotImplemented
    return _refolded(x, have[1], lambda t: function(t, shape))


@handles(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze)
def _squeeze(function: Any, args: Any, kwargs: Any) -> Any:
    """A dimension of one more or less, behind the batch's."""
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(x, Frames) or not x.intact or type(dim) is not int:
        return NotImplemented
    return _view(x, lambda t: function(t, dim)) if dim >= (2 if x.folded is None else 1) else NotImplemented


@handles(Tensor.contiguous)
def _contiguous(function: Any, args: Any, kwargs: Any) -> Any:
    return args[0] if args[0].intact and not kwargs and len(args) == 1 else NotImplemented


# ---- frame by frame ----------------------------------------------------------------------------------------------------
def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


@handles(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div)
def _scale(function: Any, args: Any, kwargs: Any) -> Any:
    """A value times or divided by one number."""
    if kwargs or len(args) != 2 or not isinstance(args[0], Frames) or not _is_number(args[1]) or not args[0].intact:
        return NotImplemented
    return per_frame(args[0], lambda t: function(t, args[1]), True)


@handles(Tensor.neg, Tensor.__neg__, torch.neg, Tensor.clone, torch.clone, Tensor.__pos__, torch.positive)
def _copy(function: Any, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or not isinstance(args[0], Frames) or not args[0].intact:
        return NotImplemented
    same = torch.neg if function in (Tensor.neg, Tensor.__neg__, torch.neg) else torch.clone
    return per_frame(args[0], same, True)


@handles(Tensor.detach, torch.detach)
def _detach(function: Any, args: Any, kwargs: Any) -> Any:
    return _view(args[0], torch.detach) if args[0].intact else NotImplemented


@handles(Tensor.detach_, torch.detach_)
def _detach_in_place(function: Any, args: Any, kwargs: Any) -> Any:
    args[0].cut("detach_")
    return args[0]


@handles(torch.mean, Tensor.mean, torch.sum, Tensor.sum)
def _reduce(function: Any, args: Any, kwargs: Any) -> Any:
    """A mean or sum over dimensions behind the batch's."""
    x = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = (dims,) if type(dims) is int else dims
    if not is_usable(x) or type(dims) not in (tuple, list) or not dims or kwargs.get("out") is not None:
        return NotImplemented
    rank = len(x.dims)
    if not all(type(d) is int and d % rank >= 2 for d in dims):
        return NotImplemented
    return per_frame(x, lambda t: function(t, *args[1:], **kwargs), True)


@handles(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def _dropout(function: Any, args: Any, kwargs: Any) -> Any:
    """Dropout that is off; where it is on, frames behind a collapse, each of which has a mask of its own."""
    x, training = args[0], kwargs.get("training", args[2] if len(args) > 2 else True)
    if not isinstance(x, Frames) or not x.intact or kwargs.get("inplace", args[3] if len(args) > 3 else False):
        return NotImplemented
    if not training:
        return x
    behind = isinstance(x, Shared) and x.means is not None and x.means == x.expression.groups
    return per_frame(x, lambda t: function(t, *args[1:], **kwargs), False) if behind else NotImplemented


@handles(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
@handles(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
def _average(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not isinstance(x, Frames) or x.folded is None or not x.intact:
        return NotImplemented
    return per_frame(x, lambda t: function(t, *args[1:], **kwargs), True)


@handles(F.conv1d, F.conv2d, F.conv3d, F.max_pool1d, F.max_pool2d, F.max_pool3d, F.batch_norm, F.linear)
def _layer(function: Any, args: Any, kwargs: Any) -> Any:
    """A layer of the host's on shared frames: convolutions, Linear, MaxPool and BatchNorm in eval mode."""
    x = args[0]
    others = [*args[1:], *kwargs.values()]
    if not isinstance(x, Shared) or not x.intact or any(isinstance(a, Frames) for a in others):
        return NotImplemented
    if x.folded is None and function is not F.linear:
        return NotImplemented
    if function is F.batch_norm and kwargs.get("training", args[5] if len(args) > 5 else False):
        return NotImplemented
    if kwargs.get("return_indices"):
        return NotImplemented
    return per_frame(x, lambda t: function(t, *args[1:], **kwargs), False)


def as_plain(output: Any) -> Any:
    """An output, however it is nested, with ordinary frames for every value in it."""
    if isinstance(output, Tensor):
        return ordinary(output, "the model's output")
    if isinstance(output, tuple):
        plain = [as_plain(x) for x in output]
        if all(a is b for a, b in zip(plain, output, strict=True)):
            return output
        return type(output)(*plain) if hasattr(output, "_fields") else type(output)(plain)
    if isinstance(output, list):
        output[:] = [as_plain(x) for x in output]
    elif isinstance(output, dict):
        for name, x in output.items():
            output[name] = as_plain(x)
    return output
