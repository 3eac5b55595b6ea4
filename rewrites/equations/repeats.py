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
    through_reshapes,
)  # fmt: skip


def repeat(graph: Graph) -> None:
    """repeat(y, T) = expand(y, T, T)."""
    for node in each(graph):
        if (
            not is_tensor(node)
            or is_frozen(node)
            or node.kwargs
            or not isinstance(node.args[0] if node.args else None, Node)
        ):
            continue
        x, *given = node.args
        sizes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        if node.target not in ("repeat", "expand", torch.Tensor.expand) or not all(type(s) is int for s in sizes):
            continue
        steps, before = sizes[0], shape(x)
        if len(sizes) == len(before) + 1:
            first, is_first_alone = None, True
        else:
            first, is_first_alone = x, len(sizes) == len(before) and before[0] == 1
        others = {1} if node.target == "repeat" else {-1}
        if steps > 1 and is_first_alone and set(sizes[1:]) <= others:
            source = emit(node, "unsqueeze", (x, 0)) if first is None else first
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
    if form == "plain" and (by is not None or abs(sum(weights) - 1) > 1e-6):
        return False
    k = len(weights) if by is None else shape(by)[0]
    if form == "plain" and steps % k:  # a shorter group's weights are the last ones, whatever their sum
        return False
    count = groups(steps, k)
    y = source.args[0]
    if any(type(size) is not int for size in shape(x)[1:]):
        return False
    rows = emit(node, "reshape", (y, (-1, *shape(x)[1:])))
    replace(node, rows if count == 1 else emit(node, EXPAND, (rows, count, count)))
    return True


def _expand(node: Node) -> bool:
    y, k, steps = node.args
    inner = through_reshapes(y)
    if not _is_one_group(inner) or is_frozen(node, y, inner) or type(steps) is not int or inner.args[2] != groups(steps, k):
        return False
    if any(type(size) is not int for size in shape(y)[1:]):
        return False
    rows = emit(node, "reshape", (inner.args[0], (-1, *shape(y)[1:])))
    replace(node, emit(node, EXPAND, (rows, steps, steps)))
    return True
