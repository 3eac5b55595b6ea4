"""Writes in place: a captured graph may contain them, and equations are about values.

A write whose memory no other node reads is made an ordinary operation. Every other write freezes what reads or makes the
memory that it writes into, and nothing else: one counter of a BatchNorm does not keep a whole net from being fused.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from sj_tac.rewrites.equations.nodes import (
    ADDS,
    AGGREGATE,
    EXPAND,
    FROZEN,
    NEURON,
    POOLS,
    RESHAPES,
    argument,
    compute,
    emit,
    is_tensor,
    memory,
    outputs_share,
    replace,
    shape,
)  # fmt: skip

# An operation in place, and the same one that makes a new tensor.
VALUES: dict[Any, Any] = {
    operator.iadd: operator.add, "add_": operator.add, operator.isub: operator.sub, "sub_": operator.sub,
    operator.imul: operator.mul, "mul_": operator.mul, operator.itruediv: operator.truediv, "div_": operator.truediv,
    "relu_": torch.relu, torch.relu_: torch.relu,
}  # fmt: skip
# What changes how the nodes behind it compute.
SWITCHES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "inference_mode", "_enter_inference_mode")


# The higher-order node of torch.utils.checkpoint: its body is rewritten as a graph of its own.
CHECKPOINT = "tag_activation_checkpoint"


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def switches_modes(graph: Graph) -> bool:
    """Return whether the graph switches autocast or gradients on or off: shapes alone do not show what that changes."""
    return any(node.op == "call_function" and _name(node) in SWITCHES for node in graph.nodes)


def written(node: Node) -> list[Any]:
    """Return the nodes whose memory a node writes into."""
    if not node.op.startswith("call"):
        return []
    if node.target is F.batch_norm:
        return list(node.args[1:3]) if argument(node, 5, "training", False) else []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return [] if node.target.name() == CHECKPOINT else node.all_input_nodes
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        named = {**{a.name: x for a, x in zip(schema, node.args, strict=False)}, **node.kwargs}
        return [named.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
    name, found = _name(node), [node.kwargs["out"]] if isinstance(node.kwargs.get("out"), Node) else []
    in_place = name in ("iadd", "imul", "isub", "itruediv", "setitem", "ipow", "iand", "ior", "ixor", "ifloordiv", "imod")
    if in_place or node.kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__")) or _inplace(node):
        found.append(node.args[0] if node.args else node.kwargs.get("input"))
    return found


def _inplace(node: Node) -> bool:
    """Return whether torch's own function was called with ``inplace=True`` by place: its result is its input's memory."""
    inner = node.args[0] if node.args else None
    functional = getattr(node.target, "__module__", "") == "torch.nn.functional"
    return functional and is_tensor(inner) and is_tensor(node) and memory(inner) == memory(node)


def skip_dropouts(graph: Graph) -> None:
    """dropout(x) = x in eval mode: the tensor itself, which torch gives back, too."""
    for node in list(graph.nodes):
        if node.target in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d) and not argument(node, 2, "training", True):
            replace(node, argument(node, 0, "input"))


def functionalize(graph: Graph) -> None:
    """``a += b`` is ``a + b`` where no later node reads a's memory, by whatever name, and it is no input's."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        of = node.args[0] if node.op.startswith("call") and node.args else None
        if not is_tensor(node) or not is_tensor(of) or not written(node):
            continue
        functional = node.target in (F.relu, F.dropout)
        if not (functional or node.target in VALUES) or shape(of) != shape(node) or (node.kwargs and not functional):
            continue
        here = memory(of)
        aliases = [n for n in order if n is not node and order[n] < order[node] and memory(n) == here]
        later = [n for n in aliases if n is not of and any(order[u] > order[node] for u in n.users)]
        if later or any(n.op == "placeholder" for n in aliases):
            continue
        if functional:
            args = node.args[:1] if node.target is F.relu else node.args[:3]
            new = emit(node, node.target, args, {**node.kwargs, "inplace": False})
        else:
            new = emit(node, VALUES[node.target], node.args)
        if new.meta["example_value"].dtype is not node.meta["example_value"].dtype:
            graph.erase_node(new)  # in place the result is rounded to a's dtype
            continue
        views = [n for n in order if order[n] > order[node] and is_tensor(n) and memory(n) == here]
        node.replace_all_uses_with(new)
        # Who reads a by its old name, behind the write, reads what was written.
        for user in [user for user in of.users if user is not new and order[user] > order[node]]:
            user.replace_input_with(of, new)
        graph.erase_node(node)
        for view in views:  # which are now views of the new tensor
            compute(view)
        order = {n: place for place, n in enumerate(graph.nodes)}


def freeze(graph: Graph) -> None:
    """Mark each node that touches memory into which the graph writes."""
    touched = {memory(x) for node in graph.nodes for x in written(node)} - {None}
    for node in graph.nodes:
        node.meta.pop(FROZEN, None)
        values = node.meta.get("example_value")
        made = (
            {x.untyped_storage()._cdata for x in values if isinstance(x, torch.Tensor)}
            if isinstance(values, tuple)
            else set()
        )
        # A BatchNorm in training mode writes its own statistics, where it stands.
        live = node.target is F.batch_norm and written(node)
        read = [n for n in node.all_input_nodes if not (live and n in written(node))]
        if made & touched or {memory(n) for n in (node, *read)} & touched:
            node.meta[FROZEN] = True


# What equations leave without a reader, and what may then go. Everything else stays where the user's forward has it.
REMOVABLE = {AGGREGATE, EXPAND, NEURON, F.batch_norm, operator.getitem} | RESHAPES | POOLS | ADDS


def sweep(graph: Graph) -> None:
    """Erase nodes that no node reads any more.

    ``Graph.eliminate_dead_code`` is not for this: it sweeps graphs inside the graph, too, and takes ``x.add_(1)`` for dead.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in REMOVABLE and not written(node):
            graph.erase_node(node)


def part_outputs(graph: Graph, before: list[tuple[Any, ...]]) -> None:
    """Give an output memory of its own where only the rewritten graph shares it: a user may write into it."""
    output = next(node for node in graph.nodes if node.op == "output")
    nodes = output.all_input_nodes
    for node, was, now in zip(nodes, before, outputs_share(graph), strict=True):
        if set(now) - set(was):
            output.replace_input_with(node, emit(output, "clone", (node,)))
