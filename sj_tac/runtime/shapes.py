"""Shapes of values: folding time into the batch and unfolding it, moving and taking the dimensions behind.

A reshape keeps the order of elements, so that what a value stands for goes on where the sizes in front say which it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sj_tac.errors import InputError
from sj_tac.runtime.entries import Function, Handlers, entering, inner, per_frame, places, viewed
from sj_tac.runtime.expressions import Made
from sj_tac.runtime.marks import is_collapsed
from sj_tac.runtime.values import Frames, Shared, Spikes

SHAPES: Handlers = {}
handles = entering(SHAPES)


def _refolded(x: Frames, folded: int | None, view: Function) -> Frames:
    """The same value with T and N as one dimension, or as two again; ``view`` makes its frames of those of ``x``."""
    if isinstance(x, Shared):
        made = Shared.of(x.expression, x.means, folded)
        made.merges, made.normalize = x.merges, x.normalize
        made.maker, made._strided = x.maker, x._strided
        return made.view_of(x, view)
    assert isinstance(x, Spikes)
    rest, batch = x.dims[inner(x) :], _batch(x)
    new = (x.steps, batch, *rest) if folded is None else (x.steps * batch, *rest)
    like = next(iter(x.sums.values())) if x.sums else _like(x)
    spikes = Spikes.of(
        x.expression, new, like, sums=x.sums, pooled=x.pooled, folded=None if folded is None else (x.steps, batch)
    )
    spikes.maker, spikes.means, spikes._strided = x.maker, x.means, x._strided
    spikes.unpooled = x.unpooled
    return spikes.view_of(x, view)


def _moved(x: Any, function: Function, strided: bool = False) -> Any:
    """``function`` of every frame, whose frames are views of those of ``x``; collapsed time ends there, as in the trace.

    ``strided``: elements of the view do not lie in order.
    """
    if is_collapsed(x) if isinstance(x, Shared) else isinstance(x, Spikes) and x.means is not None:
        return NotImplemented
    found = viewed(x, function)
    if isinstance(found, Frames) and (strided or x._strided):
        found._strided = True
    return found


def _same_frames(x: Frames, sizes: list[int]) -> Any:
    """Frames of other dimensions, or of the same."""
    way = viewed if sizes == [*x.dims] else _moved
    return way(x, lambda t: t.reshape(t.shape[0], *sizes[1:]))


def _batch(x: Frames) -> int:
    return x.dims[1] if x.folded is None else x.folded


def _like(x: Frames) -> Tensor:
    """Some tensor of the value's dtype and device."""
    expression = x.expression
    return expression.frames if isinstance(expression, Made) else expression.inputs[0]


def _reshaped(x: Frames, shape: Sequence[int], view: Function) -> Any:
    """A value as another shape, where that has T and N in front, or T * N; ``view`` makes its frames of those of ``x``."""
    steps, batch, rest = x.steps, _batch(x), x.dims[inner(x) :]
    sizes, total = list(shape), math.prod(x.dims)
    if not all(type(s) is int for s in sizes) or not total or sizes.count(-1) > 1:
        return NotImplemented
    if -1 in sizes:
        sizes[sizes.index(-1)] = total // -math.prod(sizes)
    if math.prod(sizes) != total:
        return NotImplemented  # torch says what is wrong
    if x.folded is None and sizes == [steps * batch, *rest]:
        return _refolded(x, batch, view)
    if x.folded is not None and sizes == [steps, batch, *rest]:
        return _refolded(x, None, view)
    # Frames of one sample look the same folded and not: there, a shape has time in front as it had before.
    if x.folded is None and sizes[:2] == [steps, batch]:
        return _same_frames(x, sizes)
    if x.folded is not None and sizes[0] == steps * batch:
        return _same_frames(x, sizes)
    if sizes[:2] == [steps, batch] or sizes[0] == steps * batch:
        # Folded or unfolded, and another shape behind, in one go.
        first = _refolded(
            x,
            batch if x.folded is None else None,
            lambda t: t.reshape(-1, *rest) if x.folded is None else t.reshape(steps, batch, *rest),
        )
        return _reshaped(first, sizes, view)
    if (
        x.folded is not None
        and isinstance(x, Shared)
        and len(sizes) == len(x.dims) + 1
        and sizes[0] * sizes[1] == steps * batch
    ):
        raise InputError(
            f"folded frames of T={steps} steps and N={batch} samples are unfolded as {sizes[0]} steps of {sizes[1]}: the "
            "model's own T is not that of its input; set it, or feed that many steps"
        )
    return NotImplemented


@handles(torch.flatten, Tensor.flatten)
def _flatten(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0)
    end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1)
    if not isinstance(x, Frames) or not x.intact or type(start) is not int or type(end) is not int:
        return NotImplemented
    if start == 0 and end == 1 and x.folded is None:
        return _refolded(x, x.dims[1], lambda t: t.flatten(0, 1))
    return viewed(x, lambda t: t.flatten(start, end)) if start >= inner(x) else NotImplemented


@handles(Tensor.unflatten, torch.unflatten)
def _unflatten(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    sizes = args[2] if len(args) > 2 else kwargs.get("sizes")
    if not isinstance(x, Frames) or not x.intact or type(dim) is not int or not isinstance(sizes, (tuple, list)):
        return NotImplemented
    dim = dim % len(x.dims)
    if dim == 0 and x.folded is not None and len(sizes) == 2:
        if (sizes[0], sizes[1]) == (-1, -1):
            return NotImplemented
        first = [*sizes]
        if -1 in first:
            first[first.index(-1)] = x.dims[0] // -math.prod(first)
        return _reshaped(x, [*first, *x.dims[1:]], lambda t: function(t, dim, sizes))
    return _moved(x, lambda t: function(t, dim, sizes)) if dim >= inner(x) else NotImplemented


@handles(Tensor.reshape, Tensor.view, torch.reshape)
def _reshape(function: Any, args: Any, kwargs: Any) -> Any:
    x, *shape = args
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = list(shape[0])
    if kwargs or not isinstance(x, Frames) or not x.intact or not shape:
        return NotImplemented
    return _reshaped(x, shape, lambda t: function(t, shape))


@handles(Tensor.view_as, Tensor.reshape_as)
def _reshape_as(function: Any, args: Any, kwargs: Any) -> Any:
    x, other = args
    if not isinstance(x, Frames) or not x.intact:
        return NotImplemented
    shape = tuple(other.shape)
    return _reshaped(x, shape, lambda t: t.reshape(shape))


@handles(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze)
def _squeeze(function: Any, args: Any, kwargs: Any) -> Any:
    """A dimension of one more or less, behind the batch's. The host's VotingLayer does so, in collapsed time, too."""
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(x, Frames) or not x.intact or type(dim) is not int:
        return NotImplemented
    at = dim % (len(x.dims) + (function in (Tensor.unsqueeze, torch.unsqueeze)))
    return viewed(x, lambda t: function(t, dim)) if at >= inner(x) else NotImplemented


@handles(Tensor.contiguous)
def _contiguous(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if kwargs or len(args) != 1 or not x.intact:
        return NotImplemented
    # Of a view whose elements do not lie in order torch gives a copy.
    return per_frame(x, lambda t: t.contiguous(), True) if x._strided else x


@handles(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes)
@handles(Tensor.movedim, torch.movedim, Tensor.moveaxis, torch.moveaxis)
def _transpose(function: Any, args: Any, kwargs: Any) -> Any:
    """Two dimensions behind the batch's in each other's places, or one in another place among them."""
    x, *dims = args
    if kwargs or not isinstance(x, Frames) or not x.intact or len(dims) != 2 or not all(type(d) is int for d in dims):
        return NotImplemented
    a, b = (d % len(x.dims) for d in dims)
    return _moved(x, lambda t: function(t, a, b), True) if min(a, b) >= inner(x) else NotImplemented


@handles(Tensor.permute, torch.permute)
def _permute(function: Any, args: Any, kwargs: Any) -> Any:
    x, *dims = args
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = list(dims[0])
    if kwargs or not isinstance(x, Frames) or not x.intact or not all(type(d) is int for d in dims):
        return NotImplemented
    order, kept = [d % len(x.dims) for d in dims], inner(x)
    return _moved(x, lambda t: t.permute(order), True) if order[:kept] == [*range(kept)] else NotImplemented


@handles(Tensor.__getitem__)
def _index(function: Any, args: Any, kwargs: Any) -> Any:
    """Slices and places in the dimensions behind the batch's."""
    x, index = args
    found = places(index, len(x.dims), inner(x)) if isinstance(x, Frames) and x.intact else None
    return NotImplemented if found is None else _moved(x, lambda t: t[found], True)


@handles(torch.chunk, Tensor.chunk, torch.split, Tensor.split)
def _split(function: Any, args: Any, kwargs: Any) -> Any:
    """Parts along a dimension behind the batch's."""
    x, size = args[0], args[1] if len(args) > 1 else None
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if not isinstance(x, Frames) or not x.intact or type(size) is not int or type(dim) is not int or set(kwargs) - {"dim"}:
        return NotImplemented
    dim = dim % len(x.dims)
    if dim < inner(x):
        return NotImplemented
    # Sizes of the parts, of a tensor that has nothing but the length.
    sizes = [len(part) for part in function(torch.empty(x.dims[dim], device="meta"), size)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [
        _moved(x, partial(torch.narrow, dim=dim - len(x.dims), start=a, length=n), True)
        for a, n in zip(starts, sizes, strict=True)
    ]
    return NotImplemented if any(part is NotImplemented for part in parts) else tuple(parts)


@handles(torch.unbind, Tensor.unbind)
def _unbind(function: Any, args: Any, kwargs: Any) -> Any:
    """The places along a dimension behind the batch's, each by itself."""
    x, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(x, Frames) or not x.intact or type(dim) is not int or set(kwargs) - {"dim"}:
        return NotImplemented
    dim = dim % len(x.dims)
    if dim < inner(x):
        return NotImplemented
    parts = [_moved(x, partial(torch.select, dim=dim - len(x.dims), index=i), True) for i in range(x.dims[dim])]
    return NotImplemented if any(part is NotImplemented for part in parts) else tuple(parts)
