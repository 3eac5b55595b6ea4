"""The operations that are known to treat all frames alike: the closed list. What is not here gets ordinary frames.

A missing entry is slow, a wrong one is silent: tests/runtime/test_table.py has each of them on every kind of value, intact,
folded, written and watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sj_tac import host
from sj_tac.host.dispatch import PLAIN
from sj_tac.runtime.entries import (
    enter_second_names,
    entering,
    inner,
    is_number,
    is_of_mode,
    per_frame,
    viewed,
    with_constant,
    with_sums,
)
from sj_tac.runtime.expressions import SharedExpression, both, over
from sj_tac.runtime.maps import MAPS
from sj_tac.runtime.marks import apart, is_collapsed
from sj_tac.runtime.recording import note_write, relatives
from sj_tac.runtime.shapes import SHAPES
from sj_tac.runtime.values import TABLE, Frames, Shared, Spikes, below_functions, on_frames, settle

TABLE.update(SHAPES)
TABLE.update(MAPS)
handles = entering(TABLE)


@handles(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def _requires_grad(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    with below_functions():
        return function(x if x._made is None else x._made)


# ---- sums --------------------------------------------------------------------------------------------------------------
_IN_PLACE = {Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__}
_DIVISIONS = {Tensor.div, Tensor.__truediv__, torch.div}
_MINUS = {torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__}


@handles(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)
@handles(torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__, Tensor.sub_, Tensor.__isub__)
def _add(function: Any, args: Any, kwargs: Any) -> Any:
    """A sum of two values of one shape."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args
    in_place = function in _IN_PLACE
    if not (isinstance(a, Frames) and isinstance(b, Frames)):
        return NotImplemented if in_place else _add_constant(function, a, b)
    if function is Tensor.__rsub__ or not _are_alike(a, b, in_place):
        return NotImplemented
    if in_place and (
        a is b or a.folded is not None or a._viewed is not None or a._made is not None or len(relatives(a)) > 1
    ):
        return _write(function, args)
    plain = torch.sub if function in _MINUS else torch.add
    if isinstance(a, Spikes) and isinstance(b, Spikes):
        sums = {wanted: plain(s, b.sums[wanted]) for wanted, s in a.sums.items() if wanted in b.sums}
        if in_place or not sums:
            return NotImplemented
        return with_sums(both(a.expression, b.expression, plain), a, next(iter(sums.values())), sums, a.folded)
    if in_place and not isinstance(a, Shared):
        return NotImplemented
    found = _sum_of_shared(a, b, plain)
    if found is None:
        return NotImplemented
    a.note_use()
    b.note_use()
    expression, means = found
    if in_place and isinstance(a, Shared):
        return _add_in_place(a, b, function, (expression, means))
    made = Shared.of(expression, means, a.folded)
    made.maker = a.maker
    return made


def _add_constant(function: Any, a: Any, b: Any) -> Any:
    """A value and a number behind it, or an ordinary tensor on either side."""
    if isinstance(a, Frames) and is_number(b):
        return per_frame(a, lambda t: function(t, b), False) if a.intact else NotImplemented
    return with_constant(function, a, b) if type(a if isinstance(b, Frames) else b) in PLAIN else NotImplemented


def _are_alike(a: Any, b: Any, in_place: bool) -> bool:
    """Whether both are intact values of one shape, or shared frames of which one has sizes of 1 in its place.

    An ordinary tensor is not noted: anybody may write into it before the sum is used.
    """
    if not all(isinstance(x, Frames) and x.intact and is_of_mode(x) for x in (a, b)):
        return False
    if (a.folded, a.kind) != (b.folded, b.kind) or a.dims == b.dims:
        return bool((a.dims, a.folded, a.kind) == (b.dims, b.folded, b.kind))
    widened = isinstance(a, Shared) and isinstance(b, Shared) and not in_place and len(a.dims) == len(b.dims)
    return widened and a.dims[: inner(a)] == b.dims[: inner(b)] and _of_one_grouping([a, b]) is not None


def _write(function: Any, args: Any) -> Any:
    """``a += b`` written as frames: of a view, whose base is written as well, of frames that somebody has read, of ``a``.

    Behind one collapse frames are alike as before, and stay so.
    """
    a = args[0]
    if not isinstance(a, Shared) or not a.intact or not is_collapsed(a) or a.merges:
        return NotImplemented
    if _of_one_grouping(args) is None:
        return NotImplemented
    on_frames(function, args, {})
    settle(a)
    return a


def _sum_of_shared(a: Any, b: Any, plain: Any) -> tuple[SharedExpression, Any] | None:
    """The expression of a sum, and the groups of a neuron's means behind it."""
    if not isinstance(a, Shared):
        if plain is torch.sub:
            return None
        a, b = b, a
    if not isinstance(a, Shared) or a.merges:
        return None
    left, pair = a.expression, _of_one_grouping([a, b])
    if pair is not None:
        left, right = pair
        if right.residual is not None and (left.residual is not None or plain is torch.sub):
            return None
        compact = plain(left.mapped(), right.mapped())
        residual = left.residual if left.residual is not None else right.residual
        return SharedExpression(compact, left.groups, None, residual), a.means if residual is None else None
    if left.residual is not None or left.groups.steps != left.groups.frames:
        return None
    b.expression.noted = True
    added = b.expression if plain is torch.add else over(b.expression, torch.neg)
    return SharedExpression(left.held, left.groups, left.affine, added), None


def _of_one_grouping(values: Sequence[Any]) -> list[SharedExpression] | None:
    """The expressions of shared values on the same groups; None where their frames are not of one kind."""
    if not all(isinstance(x, Shared) and not x.merges and x.means == values[0].means for x in values):
        return None
    groups = [x.expression.groups for x in values]
    if all(g == groups[0] for g in groups):
        return [x.expression for x in values]
    # Behind one collapse drives may be shared by more steps than it made one of: they are told apart down to those.
    wanted = values[0].means or groups[0].stepwise()
    if values[0].means is None and any(g.steps is g.frames for g in groups):
        return None
    found = [x.expression.split(wanted) for x in values]
    if (
        None in found
    ):  # frames of their own, beside what a collapse made one of: that they are alike is then for nobody to see
        found = [x.expression.split(groups[0].stepwise()) for x in values]
    return None if None in found else cast("list[SharedExpression]", found)


def _add_in_place(a: Shared, b: Any, function: Any, becoming: tuple[SharedExpression, Any]) -> Shared:
    """``a += b`` or ``a -= b`` without making frames: the value is the same object, of another expression."""
    if a._node is None and not (becoming[0].differentiates and torch.is_grad_enabled()):
        a._becoming = becoming
        a._become()
        a._becoming = None
        note_write(a)
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
    values, dim = args[0], kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    if type(values) not in (tuple, list) or not values or type(dim) is not int or set(kwargs) - {"dim", "axis"}:
        return NotImplemented
    if not all(isinstance(x, Frames) and x.intact and is_of_mode(x) for x in values):
        return NotImplemented
    first = values[0]
    dim = dim % len(first.dims)
    same = (first.kind, first.steps, first.folded, len(first.dims))
    if dim < inner(first) or any((x.kind, x.steps, x.folded, len(x.dims)) != same for x in values):
        return NotImplemented
    behind = dim if first.folded is None else dim + 1  # in compact forms, which are never folded
    if all(isinstance(x, Shared) and x.is_bare for x in values):
        found = _of_one_grouping(values)
        if found is None:
            return NotImplemented
        joined = SharedExpression(torch.cat([e.mapped() for e in found], behind), found[0].groups)
        made = Shared.of(joined, first.means, first.folded)
        made.maker = first.maker
        return made
    if not all(isinstance(x, Spikes) for x in values):
        return NotImplemented
    sums = {w: torch.cat([x.sums[w] for x in values], behind) for w in first.sums if all(w in x.sums for x in values)}
    if not sums:
        return NotImplemented
    expression = values[0].expression
    for x in values[1:]:
        expression = both(expression, x.expression, lambda a, b: torch.cat([a, b], behind))
    return with_sums(expression, first, next(iter(sums.values())), sums, first.folded)


# ---- frame by frame ----------------------------------------------------------------------------------------------------
@handles(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div)
def _scale(function: Any, args: Any, kwargs: Any) -> Any:
    """A value times or divided by one number, which may stand in front in a product, or by a tensor."""
    if kwargs or len(args) != 2:
        return NotImplemented
    x, number = args
    if type(x if isinstance(number, Frames) else number) in PLAIN:
        divides = function in _DIVISIONS and isinstance(number, Frames)
        return NotImplemented if divides else with_constant(function, x, number)
    if is_number(x) and function is torch.mul:
        x, number = number, x
    if not isinstance(x, Frames) or not is_number(number) or not x.intact:
        return NotImplemented
    return per_frame(x, lambda t: function(t, number), True)


@handles(Tensor.neg, Tensor.__neg__, torch.neg, Tensor.clone, torch.clone, Tensor.__pos__, torch.positive)
def _copy(function: Any, args: Any, kwargs: Any) -> Any:
    kept = {"memory_format": torch.preserve_format}  # what torch takes for granted
    if (kwargs and kwargs != kept) or len(args) != 1 or not isinstance(args[0], Frames) or not args[0].intact:
        return NotImplemented
    same = torch.neg if function in (Tensor.neg, Tensor.__neg__, torch.neg) else torch.clone
    return per_frame(args[0], same, True)


@handles(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type_as)
def _cast(function: Any, args: Any, kwargs: Any) -> Any:
    """Drives in another dtype of floating point; a value that is of it already is what comes out, as of any tensor.

    Where autograd records, the gradients of frames are summed behind the cast: frame by frame, as they come.
    """
    x, dtype = args[0], _CASTS.get(function)
    if not isinstance(x, Frames):
        return NotImplemented
    if dtype is None and len(args) == 2 and not kwargs:
        other = args[1]
        dtype = other if isinstance(other, torch.dtype) else None
        if isinstance(other, Tensor) and other.device == x.kind[1]:
            dtype = other.dtype
    if dtype is None or kwargs or not dtype.is_floating_point or not x.intact:
        return NotImplemented
    if dtype is x.kind[0]:
        return x
    if torch.is_grad_enabled():
        if not isinstance(x, Shared) or not is_collapsed(x):
            return NotImplemented
        x = x if x.means is None else apart(x)
    return per_frame(x, lambda t: t.to(dtype), False)


_CASTS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


@handles(Tensor.detach, torch.detach)
def _detach(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    # Sums may hang on weights of their reader's, whose gradient stays.
    if not x.intact or (isinstance(x, Spikes) and torch.is_grad_enabled()):
        return NotImplemented
    return viewed(x, torch.detach)


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
    usable = isinstance(x, Frames) and x.intact
    if not usable or type(dims) not in (tuple, list) or not dims or kwargs.get("out") is not None:
        return NotImplemented
    rank, kept = len(x.dims), inner(x)
    if not all(type(d) is int and d % rank >= kept for d in dims):
        return NotImplemented
    return per_frame(x, lambda t: function(t, *args[1:], **kwargs), True)


@handles(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def _dropout(function: Any, args: Any, kwargs: Any) -> Any:
    """Dropout that is off; where it is on, every frame has a mask of its own, and none is like another.

    Where a neuron behind emits means of its steps, or each group is one step, it does so of such drives, too.
    """
    x, training = args[0], kwargs.get("training", args[2] if len(args) > 2 else True)
    if not isinstance(x, Frames) or not x.intact or kwargs.get("inplace", args[3] if len(args) > 3 else False):
        return NotImplemented
    if not training:
        return x
    if not isinstance(x, Shared) or not is_collapsed(x) or not is_of_mode(x):
        return NotImplemented
    # Behind a binary collapse each group is one step, which has one mask.
    return per_frame(x if x.means is None else apart(x), lambda t: function(t, *args[1:], **kwargs), False)


@handles(F.pad)
def _pad(function: Any, args: Any, kwargs: Any) -> Any:
    """A border around each map; modes other than "constant" look at how many dimensions there are."""
    x, pad = args[0], kwargs.get("pad", args[1] if len(args) > 1 else None)
    mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
    if not isinstance(x, Shared) or not x.intact or not isinstance(pad, (list, tuple)):
        return NotImplemented
    if len(pad) > 2 * (len(x.dims) - inner(x)) or (mode != "constant" and x.folded is None):
        return NotImplemented
    return per_frame(x, lambda t: function(t, *args[1:], **kwargs), False)


@handles(torch.pixel_shuffle, torch.pixel_unshuffle)
def _shuffle(function: Any, args: Any, kwargs: Any) -> Any:
    """Channels to places of each map, or back."""
    x = args[0]
    if not isinstance(x, Shared) or not x.intact or len(x.dims) < inner(x) + 3:
        return NotImplemented
    return per_frame(x, lambda t: function(t, *args[1:], **kwargs), False)


@handles(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
@handles(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.interpolate)
def _average(function: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not isinstance(x, Frames) or x.folded is None or not x.intact:
        return NotImplemented
    return per_frame(x, lambda t: function(t, *args[1:], **kwargs), True)


@handles(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
@handles(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.batch_norm, F.linear)
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


enter_second_names(TABLE)


def as_plain(output: Any, note: Callable[[Frames], None]) -> Any:
    """An output, however it is nested, with ordinary frames for every value in it, each of which is noted."""
    if isinstance(output, Frames):
        note(output)
        return output.frames("the model's output")
    if isinstance(output, tuple):
        plain = [as_plain(x, note) for x in output]
        if all(a is b for a, b in zip(plain, output, strict=True)):
            return output
        return type(output)(*plain) if hasattr(output, "_fields") else type(output)(plain)
    if isinstance(output, list):
        output[:] = [as_plain(x, note) for x in output]
    elif isinstance(output, dict):
        for name, x in output.items():
            output[name] = as_plain(x, note)
    elif host.is_record(output):
        host.put_record(output, {name: as_plain(x, note) for name, x in vars(output).items()})
    return output
