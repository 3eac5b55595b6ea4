"""Tensors that a forward makes itself and writes values into: a trace would lose sight of what is in them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map


def written(buffer: Any, index: Any, value: Any) -> Any:
    """Stands in a graph for ``buffer`` after ``buffer[index] = value``; ``index`` is None for any other way of writing."""
    return buffer


written.__name__ = "__setitem__"  # as reports call it


_IN_PLACE = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow),
    *(operator.iand, operator.ior, operator.ixor, operator.imatmul, written),
}


def follow_writes(graph: fx.Graph) -> None:
    """Let whoever reads a value after it was written in place read what was written."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        name = (
            node.target
            if node.op == "call_method"
            else getattr(node.target, "__name__", "")
            if node.op == "call_function"
            else ""
        )
        writes = node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        base = node.kwargs.get("out") or (node.args[0] if writes and node.args else None)
        if isinstance(base, fx.Node):
            later = partial(_is_later, order, order[node])
            base.replace_all_uses_with(node, delete_user_cb=later)


def _is_later(order: dict[fx.Node, int], at: int, user: fx.Node) -> bool:
    return order[user] > at


def is_whole(index: Any) -> bool:
    """True for an index that means all of a tensor."""
    items = list(index) if isinstance(index, tuple) else [index]
    return all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in items) and bool(items)


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function, of a proxy that stands where a tensor stood: methods of tensors know no proxies."""
    first = args[0] if args else None
    if isinstance(first, fx.Proxy) and torch.overrides.is_tensor_method_or_property(function):
        if function.__name__ == "__get__":
            return getattr(first, function.__self__.__name__)
        return getattr(first, function.__name__)(*args[1:], **kwargs)
    return function(*args, **kwargs)


class Buffers(torch.overrides.TorchFunctionMode):
    """While a model is traced: whoever reads a tensor that values were written into reads the graph's value of it.

    Args:
        record: writes, and makes the graph's value of what was written: of (function, arguments, keywords, tensor).
    """

    def __init__(self, record: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]) -> None:
        super().__init__()
        self.record = record
        # By identity: the tensor, which is kept alive, and the graph's value of what is in it.
        self._held: dict[int, tuple[Tensor, Any]] = {}
        # While a module of the model runs on its own, tensors are what they are.
        self.paused = False

    def now(self, x: Any) -> Any:
        """The graph's value of a tensor that was written into; anything else as it is."""
        found = self._held.get(id(x)) if isinstance(x, Tensor) and not self.paused else None
        return x if found is None else found[1]

    def note(self, x: Tensor, found: Any) -> None:
        """Whoever reads ``x`` from now on reads this value of the graph."""
        self._held[id(x)] = x, found

    def noted(self) -> dict[int, tuple[Tensor, Any]]:
        """All that was noted so far."""
        return dict(self._held)

    def note_again(self, noted: dict[int, tuple[Tensor, Any]]) -> None:
        self._held = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        into = args[0] if writes and args else kwargs.get("out")
        args, kwargs = tree_map(self.now, (args, kwargs))
        if not isinstance(into, Tensor) or not any(isinstance(x, fx.Proxy) for x in tree_leaves((args, kwargs))):
            return _call(func, args, kwargs)
        found = self.record(func, args, kwargs, self.now(into))
        self.note(into, found)
        return None if name == "__setitem__" else found
