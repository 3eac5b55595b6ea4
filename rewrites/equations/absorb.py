"""``pool(fire(..)) = fire(.., pool)`` and ``aggregate(fire(..)) = fire(.., sums)``: a neuron takes what is behind it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch.fx import Graph, Node

from sj_tac.definition.ops import groups
from sj_tac.rewrites.equations.fuse import fire
from sj_tac.rewrites.equations.nodes import (
    AGGREGATE,
    POOLS,
    argument,
    each,
    emit,
    is_frozen,
    is_tensor,
    only_reader,
    same,
    shape,
)  # fmt: skip


def absorb(graph: Graph) -> None:
    """pool(fire(..)) = fire(.., pool), then aggregate(fire(..)) = fire(.., sums), where no other node reads the spikes."""
    for node, spikes in list(_fires(graph)):
        reader = only_reader(spikes)
        if not is_tensor(reader) or not all(isinstance(size, int) for size in shape(reader)[2:]):
            continue
        if reader.target in POOLS and len(shape(spikes)) == 5:
            found = window(reader)
            if found and shape(reader.args[0])[1:] == shape(spikes)[2:]:
                node.kwargs = {**node.kwargs, "pool": found}
                _give(spikes, reader, (*shape(spikes)[:2], *shape(reader)[1:]))
                reader = only_reader(spikes)
        if is_tensor(reader) and reader.target is AGGREGATE and not is_frozen(node):
            _, weights, by, steps, form = reader.args
            if not same(steps, node.kwargs["steps"]):
                continue
            if not moves(node, spikes, reader):  # behind the nodes that make the weights
                continue
            k = len(weights) if by is None else shape(by)[0]
            node.kwargs = {**node.kwargs, "sums": (k, tuple(weights), by, form)}
            sizes = shape(spikes)
            _give(spikes, reader, (groups(sizes[0], k), *sizes[1:]))


def _fires(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield each neuron and the node of its spikes."""
    for node in each(graph):
        if node.target is fire:
            yield from (
                (node, u) for u in node.users if u.target is operator.getitem and u.args[1] == 0 and not is_frozen(u)
            )


def moves(node: Node, spikes: Node, before: Node) -> bool:
    """Move a neuron and what it gives in front of the one node that reads its spikes, if its voltage is not read earlier.

    A neuron that is called again begins with it.
    """
    order = {n: place for place, n in enumerate(node.graph.nodes)}
    if any(order[user] < order[before] for given in node.users if given is not spikes for user in given.users):
        return False
    for moved in (node, *node.users):
        before.prepend(moved)
    return True


def window(pool: Node) -> tuple[int, ...] | None:
    """Return (kind, kh, kw, sh, sw, ph, pw) of a pool that the kernels know: kind 1 is a maximum, 2 a mean."""

    def pair(x: Any) -> tuple[int, int]:
        return (x, x) if isinstance(x, int) else tuple(x)

    size = argument(pool, 1, "kernel_size")
    stride, padding = argument(pool, 2, "stride") or size, argument(pool, 3, "padding", 0)
    if pool.target is F.avg_pool2d:
        plain = not argument(pool, 4, "ceil_mode", False) and argument(pool, 6, "divisor_override") is None
        plain, kind = plain and (argument(pool, 5, "count_include_pad", True) or pair(padding) == (0, 0)), 2
    else:
        plain = pair(argument(pool, 4, "dilation", 1)) == (1, 1) and not argument(pool, 5, "ceil_mode", False)
        plain, kind = plain and not argument(pool, 6, "return_indices", False), 1
    return (kind, *pair(size), *pair(stride), *pair(padding)) if plain else None


def _give(spikes: Node, reader: Node, sizes: tuple[Any, ...]) -> None:
    """Let the spikes, now of these sizes, be what the reader made of them."""
    made = reader.meta["example_value"]
    with made.fake_mode:
        spikes.meta["example_value"] = made.new_empty(sizes)
    if shape(spikes) == shape(reader):
        reader.replace_all_uses_with(spikes)
    else:  # folded, [T, N, ...] -> [T * N, ...], or flattened
        reader.replace_all_uses_with(emit(reader, "reshape", (spikes, (-1, *shape(reader)[1:]))))
    gone: Any = reader
    while not gone.users and gone is not spikes:  # the reader, and the reshapes in front of it
        ahead = gone.args[0]
        gone.graph.erase_node(gone)
        gone = ahead
