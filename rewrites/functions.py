"""Functions as a graph has them: by the first of torch's names, and autograd Functions that a trace cannot look into, each
call of which is a single value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from sj_tac.rewrites.buffers import Buffers, written
from sj_tac.runtime.entries import SECOND_METHODS, SECOND_NAMES


class _Tracer(Protocol):
    """``opaque``: what cannot be followed may be one value; ``forget``: what was recorded since."""

    opaque: bool
    buffers: Buffers

    def place(self) -> Any: ...

    def forget(self, place: Any) -> None: ...

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


@contextlib.contextmanager
def as_one_value(tracer: _Tracer) -> Iterator[None]:
    """Let ``apply`` of an autograd Function record one value where following it fails."""
    function: Any = torch.autograd.Function
    own = vars(function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run, leaves = own.__get__(None, cls), tree_leaves((args, kwargs))
        proxies = [(x, x.node) for x in leaves if isinstance(x, fx.Proxy)]
        if not proxies:
            return run(*args, **kwargs)
        place, held = tracer.place(), tracer.buffers.noted()
        try:
            return run(*args, **kwargs)
        except Exception:
            if not tracer.opaque:
                raise
        # Nothing is left of the attempt, of what it wrote neither.
        for proxy, node in proxies:
            proxy.node = node
        tracer.buffers.note_again(held)
        tracer.forget(place)

        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        call.__name__ = f"{cls.__name__}.apply"  # as reports call it
        found = tracer.create_proxy("call_function", call, args, kwargs)
        for x in leaves:
            if isinstance(x, Tensor):  # it may have been written into
                tracer.buffers.note(x, tracer.create_proxy("call_function", written, (x, None, [found]), {}))
        return found

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = own


def by_first_names(graph: fx.Graph) -> fx.Graph:
    """The graph, in which functions that torch has several names for are called by the first."""
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.target = (SECOND_NAMES if node.op == "call_function" else SECOND_METHODS).get(node.target, node.target)
    return graph
