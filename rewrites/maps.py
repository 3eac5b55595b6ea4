"""Functions that map each frame linearly by constants, or move what is in it: dimensions of time and batch must stay.

Their counterparts in a call are in sj_tac/runtime/maps.py and, of layers, in sj_tac/runtime/table.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from sj_tac.rewrites.buffers import written
from sj_tac.rewrites.kinds import Kind
from sj_tac.rewrites.layouts import Layout, Sample, layout_of
from sj_tac.runtime.maps import fills, multiplies_within, sums_within_frames

_FLIPS = {torch.flip, "flip"}
_ROLLS = {torch.roll, "roll"}
_SELECTS = {torch.index_select, "index_select"}
_REPEATS = {torch.repeat_interleave, "repeat_interleave"}
_PRODUCTS = {torch.matmul, operator.matmul, "matmul", "__matmul__"}
_CONVOLVES: dict[Any, int] = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}


def map_kind(node: fx.Node, x: fx.Node, kept: int) -> Kind | None:
    """What a function of frames ``x`` and constants is; None of functions that are not of these.

    Args:
        kept: dimensions in front of a frame's own, one where time is folded into the batch.
    """
    rule = _RULES.get(node.target)
    if rule is None:
        return None
    if not node.args:
        return Kind.FIXED  # frames by name
    args, before, after = _arguments(node), x.meta.get("shape") or (), node.meta.get("shape") or ()
    if args is None or len(before) <= kept or before[:kept] != after[:kept]:
        return Kind.FIXED
    return rule(args, x, len(before), kept)


def filled_kind(node: fx.Node, sample: Sample | None, frames: Container[fx.Node]) -> Kind | None:
    """What frames are, to places of which a constant was written, ``x[:, :, 0, :] = values``; None of anything else."""
    if node.target is not written or sample is None:
        return None
    x, index, value = node.args
    if not isinstance(x, fx.Node) or x not in frames:
        return None
    constant = value if isinstance(value, fx.Node) else None
    if constant in frames if constant is not None else type(value) not in (int, float):
        return None
    before, shape, layout = x.meta.get("shape"), () if constant is None else constant.meta.get("shape"), layout_of(x)
    if before is None or shape is None or layout is Layout.OTHER:
        return None
    ahead = fills(index, len(before), layout.kept, shape)
    unknown = ahead is None or (ahead and constant is not None and is_unclear(constant, sample))
    return None if unknown else Kind.WRITTEN


def is_unclear(constant: fx.Node, sample: Sample) -> bool:
    """Whether nobody can tell a 1 of a tensor's shape from what there is of time or batch; of a parameter's it need not."""
    return constant.op != "get_attr" and 1 in (sample.steps, sample.batch)


def _moved(dims: list[Any], rank: int, kept: int) -> Kind:
    """Places in another order along dimensions, given one by one or as one sequence."""
    flat = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
    return Kind.LINEAR if flat and all(type(d) is int and d % rank >= kept for d in flat) else Kind.FIXED


def _taken(args: list[Any], x: fx.Node, dim: Any, rank: int, kept: int) -> Kind:
    """Some places along a dimension, or each several times."""
    return Kind.AFFINE if args[0] is x and type(dim) is int and dim % rank >= kept else Kind.FIXED


def _multiplied(args: list[Any], x: fx.Node, rank: int, kept: int) -> Kind:
    """By a matrix, on either side."""
    if len(args) != 2 or not all(isinstance(a, fx.Node) for a in args) or args[0] is args[1]:
        return Kind.FIXED
    shape = (args[1] if args[0] is x else args[0]).meta.get("shape")
    within = shape is not None and multiplies_within(len(shape), rank - kept, args[0] is x)
    return Kind.AFFINE if within else Kind.FIXED


def _summed(args: list[Any], x: fx.Node, rank: int, kept: int) -> Kind:
    """By an einsum of two operands."""
    which = args.index(x) - 1 if x in args else -1
    return Kind.AFFINE if sums_within_frames(args, which, kept) else Kind.FIXED


def _normalised(args: list[Any], x: fx.Node, rank: int, kept: int) -> Kind:
    """By BatchNorm in eval mode."""
    known = args[0] is x and kept == 1 and args[1] is not None and (len(args) < 6 or args[5] is False)
    return Kind.AFFINE if known else Kind.FIXED


def _convolved(dims: int) -> Rule:
    def rule(args: list[Any], x: fx.Node, rank: int, kept: int) -> Kind:
        return Kind.AFFINE if args[0] is x and kept == 1 and rank == dims else Kind.FIXED

    return rule


Rule = Callable[[list[Any], fx.Node, int, int], Kind]
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_FLIPS, lambda args, x, rank, kept: _moved(args[1:], rank, kept)),
    **dict.fromkeys(_ROLLS, lambda args, x, rank, kept: _moved(args[2:], rank, kept)),
    **dict.fromkeys(_SELECTS, lambda args, x, rank, kept: _taken(args, x, args[1], rank, kept)),
    **dict.fromkeys(_REPEATS, lambda args, x, rank, kept: _taken(args, x, args[2] if len(args) > 2 else None, rank, kept)),
    **dict.fromkeys(_PRODUCTS, _multiplied),
    **{function: _convolved(dims) for function, dims in _CONVOLVES.items()},
    torch.channel_shuffle: lambda args, x, rank, kept: Kind.LINEAR if kept == 1 else Kind.FIXED,
    torch.einsum: _summed,
    F.linear: lambda args, x, rank, kept: Kind.AFFINE if args[0] is x else Kind.FIXED,
    F.batch_norm: _normalised,
}
# Names of arguments that may be given by name, in order.
_NAMES: dict[Any, tuple[str, ...]] = {
    "flip": ("input", "dims"),
    "roll": ("input", "shifts", "dims"),
    "index_select": ("input", "dim", "index"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "channel_shuffle": ("input", "groups"),
    "linear": ("input", "weight", "bias"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
}


def _arguments(node: fx.Node) -> list[Any] | None:
    """The arguments by position, as far as they are given; None where one is left out in front of one that is given."""
    target: Any = node.target
    names = _NAMES.get(target if isinstance(target, str) else target.__name__, ())
    found, given = list(node.args), dict(node.kwargs)
    for name in names[len(found) :]:
        if not given:
            break
        found.append(given.pop(name, None))
    return None if given else found
