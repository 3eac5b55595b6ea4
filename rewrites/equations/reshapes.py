"""Reshapes that do nothing, and nodes that are there twice."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from sj_tac.rewrites.equations.nodes import AGGREGATE, POOLS, RESHAPES, each, emit, is_frozen, is_tensor, replace, shape


def tidy(graph: Graph) -> None:
    """A reshape reads what is behind the reshapes in front of it; one to the shape that there was is none."""
    for node in each(graph):
        if node.target not in RESHAPES or node.target == "contiguous" or is_frozen(node) or not is_tensor(node):
            continue
        source = through_views(node)
        if shape(node) == shape(source):
            replace(node, source)
        elif source is not node.args[0] and all(type(size) is int for size in shape(node)):
            replace(node, emit(node, "reshape", (source, tuple(shape(node)))))


def through_views(node: Node) -> Node:
    """Return what is behind reshapes, but not behind a copy that "contiguous" may be: a view could fail without it."""
    while node.target in RESHAPES and node.target != "contiguous" and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def merge_equal(graph: Graph) -> None:
    """One node for equal reshapes, pools and aggregates of the same tensor."""
    known: dict[Any, Node] = {}
    for node in each(graph):
        if (node.target in RESHAPES or node.target in POOLS or node.target is AGGREGATE) and not is_frozen(node):
            key = (node.target, str(node.args), str(node.kwargs))
            if known.setdefault(key, node) is not node:
                replace(node, known[key])
