"""The values of a model's forward, as the passes read them.

The result holds names only, so that it can be kept with a converted model and read again without tracing.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from sj_tac import host
from sj_tac.rewrites.buffers import follow_writes
from sj_tac.rewrites.kinds import CARRIES_EQUALS, Kind
from sj_tac.rewrites.layouts import Layout, Sample, Shape, layout_of, note_layouts, repeats, sample_of
from sj_tac.rewrites.operations import asks, kind_of, module_kind, read_by


@dataclass(frozen=True)
class Node:
    """One value of a forward: the operation that makes it, of which values, and who reads it.

    Attributes:
        module: qualified name of the module that is called, None for a function.
        once: no other call of that module in the same forward; always true of a function.
        label: what errors and reports call it. shape, layout: of the sample, and where time stands.
        repeated: one frame T times over, by how it is made. ambiguous: it may be folded frames; the sample cannot tell.
    """

    index: int
    kind: Kind
    module: str | None
    once: bool
    label: str
    inputs: tuple[int, ...]
    readers: tuple[int, ...]
    shape: Shape | None = None
    layout: Layout = Layout.OTHER
    repeated: bool = False
    ambiguous: bool = False

    @property
    def folded(self) -> bool:
        return self.layout.folded


@dataclass(frozen=True)
class Graph:
    """The values of a model's forward in the order they are made. ``sample``: T and N that their shapes come from."""

    nodes: tuple[Node, ...]
    sample: Sample | None = None

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
    """The graph of a traced model. Changes nothing in the model."""
    follow_writes(graph)
    names = {module: name for name, module in model.named_modules()}
    data = _data_nodes(graph)
    sample = sample_of(model, data)
    note_layouts(data, sample)
    index = {node: i for i, node in enumerate(data)}
    called = Counter(model.get_submodule(str(n.target)) for n in data if n.op == "call_module")
    nodes: list[Node] = []
    for node, i in index.items():
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        inputs = tuple(index[n] for n in read_by(node) if n in index)
        readers = tuple(index[n] for n in node.users if n in index and node in read_by(n))
        name = names[module] if module is not None else None
        kind, shape = kind_of(node, module, len(inputs), sample, index), node.meta.get("shape")
        carried = kind in CARRIES_EQUALS and bool(inputs) and all(nodes[j].repeated for j in inputs)
        nodes.append(
            Node(
                i,
                kind,
                name,
                module is None or called[module] == 1,
                _label(node, module, name),
                inputs,
                readers,
                shape,
                layout_of(node),
                carried or repeats(node, sample),
                sample is not None and not sample.tells_folds and sample.might_be_folded(shape),
            )
        )
    return Graph(tuple(nodes), sample)


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
        if node.op == "get_attr" or asks(node):
            continue
        if node.op == "placeholder" and not node.users:
            continue
        if node.op in ("placeholder", "output") or any(n in kept for n in read_by(node)):
            kept[node] = None
    for node in reversed(list(kept)):
        # A frame of which nothing but the shape is asked, as for ``zeros_like(x[0])``.
        if node.target is operator.getitem and node.users and all(asks(user) for user in node.users):
            del kept[node]
    return list(kept)


def _label(node: fx.Node, module: nn.Module | None, name: str | None) -> str:
    if module is not None:
        return f"{name!r} ({type(module).__name__})"
    if node.op == "placeholder":
        return f"the model's input {node.name!r}"
    if node.op == "output":
        return "the model's output"
    around = [*(node.meta.get("nn_module_stack") or {}).values()]
    where = f" in {around[-1][0]!r} ({_class_name(around[-1][1])})" if around else ""
    return f"{getattr(node.target, '__name__', node.target)}(){where}"


def _class_name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def pool_problem(node: Node, pool: nn.Module) -> str:
    """Why the mean over a neuron's steps cannot be taken at this MaxPool; empty where it can."""
    if not node.once:
        return f"its MaxPool {node.module!r} is called more than once in one forward"
    if getattr(pool, "return_indices", False):
        return f"its MaxPool {node.module!r} returns indices"
    return "" if host.is_multi_step(pool) else f"its MaxPool {node.module!r} is in step_mode 's'"
