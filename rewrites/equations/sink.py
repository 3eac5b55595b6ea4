"""``f(expand(y)) = expand(f(y))``: what lies between a convolution and its neuron runs on one frame for k."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from sj_tac.kernels.weighted_norm import shared_batch_norm
from sj_tac.rewrites.equations.nodes import (
    ADDS,
    AGGREGATE,
    EXPAND,
    RESHAPES,
    argument,
    each,
    emit,
    is_eval,
    is_frozen,
    is_tensor,
    replace,
    same,
    shape,
    sums_to_one,
    through_reshapes,
    value,
)  # fmt: skip

CONVS = {torch.conv1d: 3, torch.conv2d: 4, torch.conv3d: 5}
# Functions whose second argument is the weight of a layer that may be shared.
WEIGHTED = {*CONVS, F.linear, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}
# Functions of the rows of dimension 0, one by one, and how many dimensions their input has at least: with one fewer,
# dimension 0 would be that of channels.
BY_ROW = {
    **CONVS, F.linear: 2, F.batch_norm: 2, F.relu: 1, torch.relu: 1, "relu": 1,
    F.max_pool1d: 3, F.max_pool2d: 4, torch.max_pool2d: 4, F.avg_pool2d: 4, F.adaptive_avg_pool2d: 4, F.avg_pool1d: 3,
}  # fmt: skip
# Functions of each element; "to" of a dtype, as convolutions in half precision have it.
SCALINGS = {operator.mul, operator.truediv, torch.mul, torch.div, "mul", "div", operator.neg, torch.neg, "neg", "to"}


def sink(graph: Graph) -> None:
    """Move each expand down until something reads single frames."""
    for node in each(graph):
        if node.target is AGGREGATE:
            cancel(node)
        elif any(n.target is EXPAND for n in node.all_input_nodes):
            sink_below(node)


def cancel(node: Node) -> None:
    """aggregate(expand(y)) = y, of the same groups, where weights sum to 1."""
    x, weights, by, steps, form = node.args
    source = through_reshapes(x)
    if source.target is not EXPAND or is_frozen(node, x, source, source.args[0]):
        return
    y, k, of = source.args
    if k == (len(weights) if by is None else shape(by)[0]) and same(of, steps) and sums_to_one(weights, by, form):
        inner = [size if type(size) is int else emit(node, "size", (x, i + 1)) for i, size in enumerate(shape(x)[1:])]
        replace(node, emit(node, "reshape", (y, (-1, *inner))))


def sink_below(node: Node) -> bool:
    """Move the expand in front of a node behind it, if the node treats all frames alike."""
    expands = [n for n in node.all_input_nodes if n.target is EXPAND]
    if is_frozen(node, *expands) or not is_tensor(node):
        return False
    _, k, steps = expands[0].args
    compact = _compact(node)
    if compact is None:
        return False
    made, wanted = compact.meta["example_value"], node.meta["example_value"]
    if made.shape[1:] != wanted.shape[1:] or made.dtype is not wanted.dtype:
        raise AssertionError(f"{node.format_node()} sank to {tuple(made.shape)} of {made.dtype}")
    # The expand has the shape of the node: no need to compute it, which takes long where sizes are symbols.
    replace(node, emit(node, EXPAND, (compact, k, steps), made=lambda: wanted))
    return True


def _compact(node: Node) -> Node | None:
    """Return the node on one frame for k, or None if it does not treat frames alike."""
    expands = [n for n in node.all_input_nodes if n.target is EXPAND]
    y, k, steps = expands[0].args
    if node.target in ADDS:
        return _sum(node)
    if len(expands) > 1 or node.args[0] is not expands[0] or any(a is expands[0] for a in node.args[1:]):
        return None
    if node.target in RESHAPES:
        return (
            _reshaped(node, expands[0]) if shape(node) and not node.kwargs and shape(node)[0] % value(steps) == 0 else None
        )
    if node.target in SCALINGS and all(isinstance(a, (int, float, torch.dtype)) for a in node.args[1:]) and not node.kwargs:
        return emit(node, node.target, (y, *node.args[1:]))
    if keeps_first(node):
        return emit(node, node.target, (y, *node.args[1:]))
    if node.target in BY_ROW and len(shape(expands[0])) >= BY_ROW[node.target]:
        if node.target is F.batch_norm and not is_eval(node):
            return _live_norm(node, y, k, steps)
        return emit(node, node.target, (y, *node.args[1:]), dict(node.kwargs))
    return None


def _sum(node: Node) -> Node | None:
    """expand(a) + expand(b) = expand(a + b), of the same groups; expand(a) + number = expand(a + number)."""
    if node.kwargs or len(node.args) != 2:
        return None
    tensors = [n for n in node.args if isinstance(n, Node)]
    if not all(is_tensor(n) and n.target is EXPAND and same(n.args[1:], tensors[0].args[1:]) for n in tensors):
        return None
    if len({len(shape(n)) for n in tensors}) > 1 or any(shape(n)[0] != shape(node)[0] for n in tensors):
        return None  # broadcast along dimension 0
    return emit(node, operator.add, tuple(n.args[0] if isinstance(n, Node) else n for n in node.args))


def _live_norm(node: Node, y: Node, k: int, steps: Any) -> Node | None:
    """A BatchNorm in training mode: the batch's statistics count y's frames as often as the expand repeats them."""
    names = (("running_mean", 1), ("running_var", 2), ("weight", 3), ("bias", 4), ("momentum", 6), ("eps", 7))
    given = {name: argument(node, place, name) for name, place in names}
    momentum = 0.1 if given["momentum"] is None else given["momentum"]
    eps = 1e-5 if given["eps"] is None else given["eps"]
    running, affine = (given["running_mean"], given["running_var"]), (given["weight"], given["bias"])
    operands = (y, running, affine, momentum, eps, k, steps)
    return emit(node, shared_batch_norm, operands, made=lambda: torch.empty_like(node.meta["example_value"][: shape(y)[0]]))


def _reshaped(node: Node, expand: Node) -> Node | None:
    """A reshape that leaves T outermost, of y in ``expand(y)``."""
    y, k, steps = expand.args
    kind, given = node.target, list(node.args[1:])
    if kind in ("squeeze", "unsqueeze", torch.squeeze, torch.unsqueeze):
        rank = len(shape(node.args[0])) + (1 if "un" in getattr(kind, "__name__", kind) else 0)
        if len(given) != 1 or not isinstance(given[0], int) or given[0] % rank == 0:
            return None
        return emit(node, kind, (y, *given))
    if kind in ("contiguous", "flatten", torch.flatten):
        return emit(node, kind, (y, *given))
    if _known(node):
        return emit(node, "reshape", (y, (-1, *shape(node)[1:])))
    first, *others = _sizes(node)
    # One size may be left open. Where the user left one open, that of T is told.
    return emit(node, "reshape", (y, (_grouped(node, first, k, steps) if -1 in others else -1, *others)))


def _grouped(node: Node, size: Any, k: int, steps: Any) -> Any:
    """Return the size of dimension 0, a multiple of T, with G in place of T: ``size / T * G``."""

    def of(function: Any, a: Any, b: Any) -> Any:
        return emit(node, function, (a, b)) if isinstance(a, Node) or isinstance(b, Node) else function(a, b)

    count = of(operator.floordiv, of(operator.add, steps, k - 1), k)
    return count if same(size, steps) else of(operator.mul, of(operator.floordiv, size, steps), count)


def _known(node: Node) -> bool:
    return all(type(size) is int for size in shape(node)[1:])


def _sizes(node: Node) -> list[Any]:
    """Return the sizes that a view or an unflatten asks for, as numbers and nodes; one may be -1."""
    given = list(node.args[1:])
    if node.target in ("unflatten", torch.unflatten):
        dimension, sizes = given
        before = [emit(node, "size", (node.args[0], i)) for i in range(len(shape(node.args[0])))]
        return [*before[:dimension], *_each(node, sizes), *before[dimension + 1 :]]
    return _each(node, given[0]) if len(given) == 1 and isinstance(value(given[0]), (tuple, list)) else given


def _each(node: Node, sizes: Any) -> list[Any]:
    """Return the sizes of a tuple, which may be a node."""
    if not isinstance(sizes, Node):
        return list(sizes)
    return [emit(node, operator.getitem, (sizes, i)) for i in range(len(value(sizes)))]


def keeps_first(node: Node) -> bool:
    """Return whether a permutation leaves dimension 0 where it is."""
    if node.target not in ("permute", "transpose", torch.permute, torch.transpose) or node.kwargs:
        return False
    given = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    if not all(isinstance(d, int) for d in given):
        return False
    dims = [d % len(shape(node)) for d in given]
    return dims[0] == 0 if "permute" in getattr(node.target, "__name__", node.target) else 0 not in dims


def commute(node: Node) -> None:
    """Move an expand below the reshapes, the casts and the one convolution that read it."""
    while node.target is EXPAND and len(node.users) == 1:
        (reader,) = node.users
        place, last = reader.prev, reader.target in CONVS or reader.target is F.linear
        if not (last or reader.target in RESHAPES or reader.target == "to") or not sink_below(reader):
            return
        node = place.next
        while node.target is not EXPAND:
            node = node.next
        if last:
            return
