"""What every equation needs of torch.fx: shapes of nodes, new nodes with their shapes, and who reads a node.

``node.meta["example_value"]`` is the fake tensor that Dynamo computed. Dimension 0 of frames is T * n, T outermost.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from sj_tac.definition import ops

AGGREGATE, EXPAND, NEURON = (
    getattr(torch.ops.sj_tac, name).default for name in ("aggregate_frames", "expand_frames", "neuron_steps")
)
MARK = ops.mark._opoverload
ADDS = {operator.add, operator.iadd, torch.add, "add"}
RESHAPES = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous",
    torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.unflatten,
}  # fmt: skip
POOLS = {F.max_pool2d, F.avg_pool2d, torch.max_pool2d}
# In a node's meta: no equation may match the node, because the graph writes into its memory or into that of an operand.
FROZEN = "sj_tac_frozen"
# In the meta of a convolution: its layer's name, which was asked to run in int8.
WANTED_IN_INT8 = "sj_tac_int8"
# What a node has of the one that it was made for.
_KEPT = "nn_module_stack", "stack_trace", WANTED_IN_INT8


def is_frozen(*nodes: Any) -> bool:
    """Return whether one of the nodes must stay where it is."""
    return any(isinstance(node, Node) and FROZEN in node.meta for node in nodes)


def value(x: Any) -> Any:
    """Return x with each node in it replaced by the fake tensor or number that it stands for."""
    return map_arg(x, lambda node: node.meta["example_value"])


def is_tensor(x: Any) -> bool:
    """Return whether x is a node of one tensor."""
    return isinstance(x, Node) and isinstance(x.meta.get("example_value"), Tensor)


def shape(node: Any) -> torch.Size:
    """Return the shape of a node's tensor; sizes of dimensions that vary are SymInts."""
    size: torch.Size = node.meta["example_value"].shape
    return size


def dtype(node: Any) -> torch.dtype:
    """Return the dtype of a node's tensor."""
    found: torch.dtype = node.meta["example_value"].dtype
    return found


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, given by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def begin(graph: Graph, stage: Callable[..., Any]) -> None:
    """Note which function rewrites the graph now, for the error if it fails."""
    graph.sj_tac_equation, graph.sj_tac_at = stage.__name__, None  # type: ignore[attr-defined]


def each(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that the graph has now; where an equation fails, ``graph.sj_tac_at`` is the node that it looked at."""
    for node in list(graph.nodes):
        graph.sj_tac_at = node  # type: ignore[attr-defined]
        yield node


def same(a: Any, b: Any) -> bool:
    """Return whether nodes or numbers are equal for every size that a dimension may have."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    x, y = value(a), value(b)
    if isinstance(x, torch.SymInt) and isinstance(y, torch.SymInt):
        return bool(x.node.expr == y.node.expr)
    return type(x) is type(y) and bool(x == y)


def emit(
    before: Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    made: Callable[[], Any] | None = None,
) -> Node:
    """Insert a call before a node, and compute its shape. A target that is a string is a method of Tensor.

    Args:
        made: returns the example value in place of the call itself.
    """
    kind = "call_method" if isinstance(target, str) else "call_function"
    with before.graph.inserting_before(before):
        node = before.graph.create_node(kind, target, args, kwargs or {})
    node.meta.update({key: before.meta[key] for key in _KEPT if key in before.meta})
    compute(node, made)
    return node


def compute(node: Node, made: Callable[[], Any] | None = None) -> None:
    """Compute a node's example value, from those of what it reads now."""
    call: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    fake: Any = next((n.meta["example_value"] for n in node.all_input_nodes if is_tensor(n)), None)
    with contextlib.nullcontext() if fake is None else fake.fake_mode:
        node.meta["example_value"] = made() if made else call(*value(node.args), **value(node.kwargs))


def replace(node: Node, new: Node) -> None:
    """Let everybody read ``new`` instead of ``node``, and erase ``node``."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def sums_to_one(weights: Any, by: Any, form: str) -> bool:
    """Return whether the weights of an aggregate's whole groups sum to 1."""
    return form != "plain" or (by is None and abs(sum(weights) - 1) < 1e-6)


def through_reshapes(node: Any) -> Any:
    """Return the node whose rows a chain of reshapes shows in another shape."""
    while isinstance(node, Node) and node.target in RESHAPES and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def only_reader(node: Node) -> Node | None:
    """Return the one node that reads this one, through reshapes that have no other reader; None if there are others."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target not in RESHAPES or is_frozen(node):
            return None if is_frozen(node) else node
    return None


def is_eval(node: Node) -> bool:
    """Return whether a batch norm treats every frame alike, by stored numbers."""
    return not argument(node, 5, "training", False) and isinstance(argument(node, 1, "running_mean"), Node)


def memory(node: Any) -> Any:
    """Return what identifies the memory of a node's tensor; None for what is no tensor."""
    x = node.meta.get("example_value") if isinstance(node, Node) else None
    return x.untyped_storage()._cdata if isinstance(x, Tensor) else None


def outputs_share(graph: Graph) -> list[tuple[Any, ...]]:
    """Return, for each output, the places of the inputs and of the earlier outputs whose memory it shares."""
    inputs = [memory(node) for node in graph.nodes if node.op == "placeholder"]
    outputs = next(node for node in graph.nodes if node.op == "output").all_input_nodes
    found = []
    for place, node in enumerate(outputs):
        here = memory(node)
        others = inputs + [memory(other) for other in outputs[:place]]
        found.append(tuple(i for i, other in enumerate(others) if here is not None and other == here))
    return found
