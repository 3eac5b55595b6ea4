"""A mark becomes what today's settings say of its layer; the captured graph itself does not depend on k."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from sj_tac import host
from sj_tac.rewrites.equations.nodes import AGGREGATE, EXPAND, MARK, RESHAPES, WANTED_IN_INT8, emit, replace
from sj_tac.rewrites.equations.sink import commute


def powers(decay: Any, k: int, like: Tensor) -> Tensor:
    """Return ``decay^(k-1-j)`` for j = 0 .. k-1, [k], on ``like``'s device, in the dtype of its sums."""
    wide = host.wide_dtype(like.dtype)
    exponents = torch.arange(k - 1, -1, -1, device=like.device)
    if isinstance(decay, Tensor):
        return decay.to(wide) ** exponents
    return torch.full((k,), decay, dtype=wide, device=like.device) ** exponents


def want_int8(graph: Graph, layers: Container[str]) -> None:
    """Note on convolutions behind marks that their layer was asked to run in int8, for ``integers.in_int8``."""
    graph.sj_tac_int8 = {}  # type: ignore[attr-defined]
    for node in graph.nodes:
        if node.target is MARK and node.args[5] in layers:
            graph.sj_tac_int8[node.args[5]] = "no Conv2d or Linear reads its input as it is"  # type: ignore[attr-defined]
            for reader in _readers(node):
                reader.meta[WANTED_IN_INT8] = node.args[5]


def _readers(node: Node) -> Iterator[Node]:
    """Yield what reads a node through reshapes."""
    for reader in node.users:
        if reader.target in RESHAPES:
            yield from _readers(reader)
        else:
            yield reader


def replace_marks(graph: Graph, settings: Mapping[str, tuple[int, str, bool]]) -> None:
    """mark(x) = expand(aggregate(x)) at k > 1, and x at k = 1."""
    for node in list(graph.nodes):
        if node.target is not MARK:
            continue
        x, logits, beta, decay, steps, layer = node.args
        k, weights, normalize = settings[layer]
        if k == 1:
            replace(node, x)
            continue
        form, numbers, by = "normalized" if normalize else "plain", [], None
        if weights == "learned":
            form, by = "logits", logits
        elif weights == "uniform":
            numbers = [1.0] * k
        elif isinstance(beta, Node) or isinstance(decay, Node):
            by = emit(node, powers, (decay if beta is None else beta, k, x))
        else:
            numbers = [decay ** (k - 1 - j) for j in range(k)]
        sums = emit(node, AGGREGATE, (x, numbers, by, steps, form))
        replace(node, emit(node, EXPAND, (sums, k, steps)))


def keep_convolutions_shared(graph: Graph) -> None:
    """conv(expand(y)) = expand(conv(y)) where nothing else was rewritten, so that the definition costs no more than it does
    eagerly. The nodes follow each other: what the graph writes cannot come between them.
    """
    for node in list(graph.nodes):
        if node.target is EXPAND and len(node.users) == 1:
            commute(node)
