"""What a graph does to time, value by value: the one place that knows which operations treat frames alike.

The result holds names only, so that it can be kept with a converted model and read again without tracing.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrize

from sj_tac import host

_SUMS = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, "add", "add_", "sub", "sub_"}
_CATS = {torch.cat, torch.concat, torch.concatenate}
_SCALINGS = {operator.mul, operator.imul, operator.truediv, operator.itruediv, torch.mul, torch.div, "mul", "mul_", "div"}
_COPIES = {"contiguous", "clone", "detach", operator.pos, operator.neg, torch.neg}
_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, "add_", "sub_", "mul_"}
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
_RESHAPES = {torch.reshape, "reshape", "view", torch.flatten, "flatten", "unflatten", "squeeze", "unsqueeze"}
_QUERIES = {"shape", "ndim", "dtype", "device", "is_cuda"}
_ASKING = {"size", "dim", "numel", "is_contiguous", "stride"}


class Kind(StrEnum):
    """What an operation may be handed instead of the frames of the input."""

    INPUT = "input"
    OUTPUT = "output"
    SITE = "site"  # a conv or Linear, or a container that begins with one: affine, frame by frame
    NORM = "norm"  # an affine map in eval mode
    NEURON = "neuron"
    MAX_POOL = "max pool"
    SUM = "sum"  # of values, or their concatenation: a weighted sum of frames may pass where it passes all of them
    LINEAR = "linear"  # weighted sums of frames may pass
    AFFINE = "affine"  # weighted sums may pass where the weights sum to 1
    WRITTEN = "written"  # in place by a number: affine, but frames are made to write into
    RESHAPE = "reshape"  # linear, but it may have T written into it
    ALIKE = "alike"  # every frame is treated alike, but not linearly
    FIXED = "fixed"  # whatever it does, it needs the frames of the input


# Through these a drive that is shared by several frames may reach a neuron and still be that neuron's own, weighted drive.
CARRIES_DRIVES = {Kind.SITE, Kind.NORM, Kind.SUM, Kind.LINEAR, Kind.AFFINE, Kind.WRITTEN, Kind.RESHAPE}
# Frames that stand for several steps may pass through these.
CARRIES_SPANS = CARRIES_DRIVES - {Kind.RESHAPE, Kind.WRITTEN} | {Kind.MAX_POOL, Kind.ALIKE}
# Weighted sums of frames may pass through these, whatever the weights sum to.
CARRIES_SUMS = {Kind.SUM, Kind.LINEAR}


@dataclass(frozen=True)
class Node:
    """One value of a forward: the operation that makes it, of which values, and who reads it.

    Attributes:
        module: qualified name of the module that is called, None for a function.
        once: no other call of that module in the same forward; always true of a function.
        label: what errors and reports call it.
    """

    index: int
    kind: Kind
    module: str | None
    once: bool
    label: str
    inputs: tuple[int, ...]
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """The values of a model's forward in the order they are made."""

    nodes: tuple[Node, ...]

    def of(self, module: str) -> Node:
        """The (first) call of a module. Raises KeyError."""
        for node in self.nodes:
            if node.module == module:
                return node
        raise KeyError(module)

    def readers(self, node: Node) -> list[Node]:
        return [self.nodes[i] for i in node.readers]

    def inputs(self, node: Node) -> list[Node]:
        return [self.nodes[i] for i in node.inputs]

    def calls(self) -> Counter[str]:
        """How often each module is called, by its first name."""
        return Counter(n.module for n in self.nodes if n.module is not None)


def read(model: nn.Module, graph: fx.Graph) -> Graph:
    """The graph of a traced model. Changes nothing."""
    names = {module: name for name, module in model.named_modules()}
    data = _data_nodes(graph)
    index = {node: i for i, node in enumerate(data)}
    called = Counter(model.get_submodule(str(n.target)) for n in data if n.op == "call_module")
    nodes = []
    for node, i in index.items():
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        inputs = tuple(index[n] for n in node.all_input_nodes if n in index)
        readers = tuple(index[n] for n in node.users if n in index)
        name = names[module] if module is not None else None
        nodes.append(
            Node(
                i,
                _kind(node, module, inputs),
                name,
                module is None or called[module] == 1,
                _label(node, module, name),
                inputs,
                readers,
            )
        )
    return Graph(tuple(nodes))


def straight(model: nn.Module, names: list[str]) -> Graph:
    """The graph of children that are called one after the other."""
    kinds = [module_kind(model.get_submodule(name)) for name in names]
    nodes = [Node(0, Kind.INPUT, None, True, "the input", (), (1,))]
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True), start=1):
        label = f"{name!r} ({type(model.get_submodule(name)).__name__})"
        nodes.append(Node(i, kind, name, True, label, (i - 1,), (i + 1,)))
    last = len(nodes)
    return Graph((*nodes, Node(last, Kind.OUTPUT, None, True, "the output", (last - 1,), ())))


def _data_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that carry frames: no parameters, no questions about shapes, and nothing that is computed of these alone."""
    kept: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "get_attr" or _asks(node):
            continue
        if node.op == "placeholder" and not node.users:
            continue
        if node.op in ("placeholder", "output") or any(n in kept for n in node.all_input_nodes):
            kept[node] = None
    return list(kept)


def _asks(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target in _ASKING) or (
        node.target is getattr and len(node.args) > 1 and node.args[1] in _QUERIES
    )


def _label(node: fx.Node, module: nn.Module | None, name: str | None) -> str:
    if module is not None:
        return f"{name!r} ({type(module).__name__})"
    if node.op == "placeholder":
        return f"the model's input {node.name!r}"
    if node.op == "output":
        return "the model's output"
    return f"{getattr(node.target, '__name__', node.target)}()"


def _kind(node: fx.Node, module: nn.Module | None, inputs: tuple[int, ...]) -> Kind:
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "output":
        return Kind.OUTPUT
    if any(n.op == "get_attr" for n in node.all_input_nodes):
        # A parameter may have T in it.
        return Kind.FIXED
    if module is not None:
        return module_kind(module) if len(inputs) == 1 else Kind.FIXED
    return _function_kind(node, len(inputs))


def module_kind(module: nn.Module) -> Kind:
    """What a module does to time, by its exact type and step mode."""
    kind = type(module)
    if not host.is_multi_step(module) or parametrize.is_parametrized(module):
        return Kind.FIXED
    if kind in host.NEURONS:
        return Kind.NEURON
    if kind in (*host.CONVS, *host.LINEARS) or site_layer(module) is not None:
        return Kind.SITE
    if kind in host.NORMS:
        return Kind.FIXED if host.uses_batch_statistics(module) else Kind.NORM
    if kind in host.LINEAR_IN_TIME:
        return Kind.LINEAR
    if kind in host.AFFINE:
        return Kind.AFFINE
    if kind in host.MAX_POOLS:
        return Kind.FIXED if getattr(module, "return_indices", False) else Kind.MAX_POOL
    return Kind.ALIKE if kind in host.PER_FRAME else Kind.FIXED


def site_layer(container: nn.Module) -> nn.Module | None:
    """The conv or Linear of a container that runs it, a norm and pools frame by frame; None for any other module."""
    if type(container) not in host.CONTAINERS:
        return None
    first, *behind = [*container.children()] or [container]
    if type(first) not in (*host.INNER_CONVS, *host.INNER_LINEARS):
        return None
    allowed = (*host.NORMS, *host.PLAIN_NORMS, *host.INNER_AVG_POOLS, nn.MaxPool2d, nn.Identity)
    plain = all(type(m) in allowed and not parametrize.is_parametrized(m) for m in behind)
    norms = [m for m in behind if host.is_norm(m)]
    if not plain or any(host.uses_batch_statistics(m) for m in norms) or (norms and behind[0] is not norms[0]):
        return None
    return None if len(norms) > 1 or parametrize.is_parametrized(first) else first


def _function_kind(node: fx.Node, inputs: int) -> Kind:
    target, others = node.target, [a for a in _flat(node.args[1:]) if not isinstance(a, fx.Node)]
    if target in _SUMS and (inputs == 2 or len(node.all_input_nodes) == 2):
        return Kind.SUM if inputs == 2 and not others and not node.kwargs else Kind.FIXED
    if target in _SUMS and inputs == 1 and all(isinstance(a, (int, float)) for a in others):
        return Kind.FIXED if node.kwargs else Kind.WRITTEN if target in _IN_PLACE else Kind.AFFINE
    if target in _CATS:
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        return Kind.SUM if isinstance(dim, int) and (dim >= 2 or dim == -1) else Kind.FIXED
    if inputs != 1 or len(node.all_input_nodes) != 1:
        return Kind.FIXED
    if target in _SCALINGS:
        # One number, beside the value and not in front of it; x * x has the same single input, and rounding is a keyword.
        number = len(others) == 1 and isinstance(others[0], (int, float)) and isinstance(node.args[0], fx.Node)
        if not number or node.kwargs:
            return Kind.FIXED
        return Kind.WRITTEN if target in _IN_PLACE else Kind.LINEAR
    if target in _COPIES:
        return Kind.LINEAR
    if target in _DROPOUTS:
        return Kind.ALIKE
    return _shape_kind(node, others)


def _shape_kind(node: fx.Node, others: list[Any]) -> Kind:
    """Of a function of one value: does it leave T and N alone?"""
    target = node.target
    if target in (torch.flatten, "flatten"):
        start = node.kwargs.get("start_dim", others[0] if others else 0)
        return Kind.LINEAR if isinstance(start, int) and start >= 1 else Kind.FIXED
    if target in (torch.mean, "mean", torch.sum, "sum"):
        dims = _flat([node.kwargs.get("dim", others or None)])
        return Kind.LINEAR if dims and all(isinstance(d, int) and (d >= 2 or d == -1) for d in dims) else Kind.FIXED
    before, after = node.all_input_nodes[0].meta.get("shape"), node.meta.get("shape")
    if before is None or after is None or len(before) < 2 or len(after) < 2 or before[:2] != after[:2]:
        return Kind.FIXED
    if target in _RESHAPES:
        return Kind.RESHAPE
    if target in ("transpose", torch.transpose, "permute", torch.permute):
        dims = [d % len(before) for d in _flat(others) if isinstance(d, int)]
        kept = dims[:2] == [0, 1] if target in ("permute", torch.permute) else all(d >= 2 for d in dims)
        return Kind.RESHAPE if kept and dims else Kind.FIXED
    return Kind.FIXED


def _flat(items: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in items:
        flat += _flat(item) if isinstance(item, (tuple, list)) else [item]
    return flat
