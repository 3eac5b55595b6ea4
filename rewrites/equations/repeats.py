"""An image that a net repeats T times is an expand by T: what follows runs once, whatever k is.

repeat(y, T) = expand(y, T, T)                          one group of T equal frames
aggregate(expand(y, T, T)) = expand(y, G, G)            G groups of equal frames, weights that sum to 1
expand(expand(y, G, G), k, T) = expand(y, T, T)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from sj_tac.definition.ops import groups
from sj_tac.rewrites.equations.nodes import (
    AGGREGATE,
    EXPAND,
    each,
    emit,
    is_frozen,
    is_tensor,
    replace,
    shape,
    sums_to_one,
    through_reshapes,
)  # fmt: skip


def repeat(graph: Graph) -> None:
    """repeat(y, T) = expand(y, T, T)."""
    for node in each(graph):
        if node.target not in ("repeat", "expand", torch.Tensor.expand) or is_frozen(node) or node.kwargs:
            continue
        x, *given = node.args
        sizes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        if not is_tensor(node) or not all(type(s) is int for s in sizes):
            continue
        steps, adds_time = sizes[0], len(sizes) == len(shape(x)) + 1
        is_one_frame = adds_time or (len(sizes) == len(shape(x)) and shape(x)[0] == 1)
        if steps > 1 and is_one_frame and set(sizes[1:]) <= {1 if node.target == "repeat" else -1}:
            source = emit(node, "unsqueeze", (x, 0)) if adds_time else x
            replace(node, emit(node, EXPAND, (source, steps, steps)))


def share(graph: Graph) -> bool:
    """Let aggregates, and expands of what is shared, read one frame for all; return whether there were any."""
    found = [
        _aggregate(node) if node.target is AGGREGATE else node.target is EXPAND and _expand(node) for node in each(graph)
    ]
    return any(found)


def _is_one_group(node: Any) -> bool:
    return isinstance(node, Node) and node.target is EXPAND and type(node.args[2]) is int and node.args[1] >= node.args[2]


def _aggregate(node: Node) -> bool:
    x, weights, by, steps, form = node.args
    source = through_reshapes(x)
    if not _is_one_group(source) or is_frozen(node, x, source) or source.args[2] != steps:
        return False
    k = len(weights) if by is None else shape(by)[0]
    # A shorter group's plain weights are the last ones, whatever their sum.
    if not sums_to_one(weights, by, form) or (form == "plain" and steps % k):
        return False
    count = groups(steps, k)
    return _put(node, source.args[0], x, (count, count) if count > 1 else ())


def _put(node: Node, y: Node, like: Node, by: tuple[int, ...]) -> bool:
    """Put y, with frames of ``like``'s shape if that is fixed, in a node's place; expanded ``by`` (T, T), if given."""
    if any(type(size) is not int for size in shape(like)[1:]):
        return False
    rows = emit(node, "reshape", (y, (-1, *shape(like)[1:])))
    replace(node, emit(node, EXPAND, (rows, *by)) if by else rows)
    return True


def _expand(node: Node) -> bool:
    y, k, steps = node.args
    inner = through_reshapes(y)
    if not _is_one_group(inner) or is_frozen(node, y, inner) or type(steps) is not int or inner.args[2] != groups(steps, k):
        return False
    return _put(node, inner.args[0], y, (steps, steps))
