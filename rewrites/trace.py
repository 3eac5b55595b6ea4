"""A graph of the model's modules: by torch.fx on symbols alone or, where forward asks for values, beside a real sample."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sj_tac import host
from sj_tac.errors import TraceError


class _LeafTracer(fx.Tracer):
    """Keeps step modules and the host's layers whole, and remembers which module it is in.

    The host's composite layers (attention) are looked into, until one of them turns out to be ``closed``.
    """

    def __init__(self, closed: Collection[nn.Module]) -> None:
        super().__init__()
        self.closed = closed
        self.entered: list[nn.Module] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self.closed or (host.is_leaf(m) and not host.is_composite(m)):
            return True
        return not host.is_composite(m) and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.submodule_paths is not None and m not in self.submodule_paths:
            # Made in forward, so no part of the model: what it does is part of the function that made it.
            return forward(*args, **kwargs)
        self.entered.append(m)
        result = super().call_module(m, forward, args, kwargs)
        self.entered.pop()
        return result

    def where(self) -> str:
        """The innermost module whose forward was running when tracing stopped."""
        if not self.entered:
            return f"the forward of {type(self.root).__name__}"
        module = self.entered[-1]
        name = self.submodule_paths.get(module, "?") if self.submodule_paths else "?"
        return f"module {name!r} ({type(module).__name__})"


class _ValueProxy(fx.Proxy):
    """A proxy that holds the tensor it stands for, so that questions about its shape or content have an answer."""

    def __init__(self, node: fx.Node, tracer: _ValueTracer, held: Any) -> None:
        super().__init__(node, tracer)
        self._held = held

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._held, name)
        if callable(found):
            return lambda *args, **kwargs: self.tracer.create_proxy("call_method", name, (self, *args), kwargs)
        if isinstance(found, Tensor):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return found

    def __bool__(self) -> bool:
        return bool(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Any:
        return iter([self.tracer.create_proxy("call_function", operator.getitem, (self, i), {}) for i in range(len(self))])

    def __int__(self) -> int:
        return int(self._held)

    def __float__(self) -> float:
        return float(self._held)

    def __index__(self) -> int:
        return int(self._held)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_tensor(v) for v in value)
    if isinstance(value, dict):
        return any(_holds_tensor(v) for v in value.values())
    return isinstance(value, Tensor)


class _ValueTracer(_LeafTracer):
    """Runs the model on ``example`` while it records; whatever is not a tensor (shapes, flags) is a plain value.

    The graph is good for looking at which modules feed which. It is not run again: shapes are frozen into it.
    """

    def __init__(self, closed: Collection[nn.Module], example: tuple[Any, ...]) -> None:
        super().__init__(closed)
        self._inputs = list(example)
        self._running = False

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._running:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[fx.Node], fx.Proxy] | None = None,
    ) -> Any:
        value = self._value(kind, target, args, kwargs)
        if not _holds_tensor(value):
            return value

        def make(node: fx.Node) -> fx.Proxy:
            if isinstance(value, Tensor):
                node.meta["shape"] = tuple(value.shape)
            return _ValueProxy(node, self, value)

        return super().create_proxy(kind, target, args, kwargs, name, type_expr, make)

    def _value(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def held(item: Any) -> Any:
            return item._held if isinstance(item, _ValueProxy) else item

        values = torch.utils._pytree.tree_map(held, args)
        named = torch.utils._pytree.tree_map(held, kwargs)
        if kind == "placeholder":
            return self._inputs.pop(0) if self._inputs else (values[0] if values else None)
        self._running = True
        try:
            if kind == "get_attr":
                return operator.attrgetter(str(target))(self.root)
            if kind == "call_module":
                return self.root.get_submodule(target)(*values, **named)
            if kind == "call_method":
                return getattr(values[0], target)(*values[1:], **named)
            return target(*values, **named)
        finally:
            self._running = False


def _defaults(model: nn.Module, given: int) -> dict[str, Any]:
    """Arguments of forward that have a default and that the caller does not give: not part of the data flow."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    return {p.name: p.default for p in parameters[given:] if p.default is not inspect.Parameter.empty}


def as_arguments(example_input: Any) -> tuple[Any, ...]:
    """``example_input`` as the positional arguments of forward."""
    return tuple(example_input) if isinstance(example_input, (tuple, list)) else (example_input,)


@dataclass(frozen=True)
class Traced:
    """A model's graph, and the modules that it could not look into, by name, with what stopped it there.

    Attributes:
        sampled: a real sample ran beside the symbols.
    """

    graph: fx.Graph
    closed: dict[str, str]
    sampled: bool


def trace(model: nn.Module, example_input: Any = None) -> Traced:
    """The graph of ``model``; its state, mode and hooks are as before afterwards.

    Symbols alone come first; then ``example_input`` beside them. A submodule that cannot be followed either way becomes one
    opaque node.

    Args:
        example_input: a real input (a tensor, or a tuple of forward's arguments), for models that ask their input's
            shape or content in forward. Tried only where symbols alone do not do.

    Raises:
        TraceError: torch.fx cannot follow the model's own forward; says what to do.
    """
    with host.looked_at(model), _no_new_attributes(model):
        if example_input is None:
            return _closing(model, _LeafTracer, 1, sampled=False)
        with contextlib.suppress(Exception):
            return Traced(_LeafTracer(()).trace(model, concrete_args=_defaults(model, 1) or None), {}, False)
        arguments = as_arguments(example_input)
        try:
            return _closing(model, lambda closed: _ValueTracer(closed, arguments), len(arguments), sampled=True)
        except TraceError as error:
            shapes = [list(a.shape) if isinstance(a, Tensor) else a for a in arguments]
            raise TraceError(
                f"tracing failed with example_input of shape {shapes}: {error.__cause__}; "
                "check that model(*example_input) runs, and that its modules are called with tensors"
            ) from error.__cause__


def _closing(model: nn.Module, make: Callable[[Collection[nn.Module]], _LeafTracer], given: int, *, sampled: bool) -> Traced:
    """Trace; where that fails inside a submodule, once more with that one as a leaf."""
    closed: dict[nn.Module, str] = {}
    names = {module: name for name, module in model.named_modules()}
    while True:
        tracer = make(closed)
        try:
            graph = tracer.trace(model, concrete_args=_defaults(model, given) or None)
            return Traced(graph, {names[m]: why for m, why in closed.items()}, sampled)
        except Exception as error:
            # The innermost module that is the model's own: a forward may call modules that it has just made.
            stopped = next((m for m in reversed(tracer.entered) if m in names), None)
            if stopped is not None and stopped not in closed:
                closed[stopped] = _first_line(error)
                continue
            raise TraceError(
                f"torch.fx cannot follow {tracer.where()} on symbols alone ({_first_line(error)}); it probably asks "
                "for the shape or content of its input: pass example_input=, a real batch [T, N, C, H, W]"
            ) from error


@contextlib.contextmanager
def _no_new_attributes(model: nn.Module) -> Iterator[None]:
    """torch.fx puts constants of forward on the model (``_tensor_constant0``); take them off again."""
    held = [model.__dict__, model._parameters, model._buffers]
    known = [set(attributes) for attributes in held]
    try:
        yield
    finally:
        for attributes, names in zip(held, known, strict=True):
            for name in set(attributes) - names:
                del attributes[name]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
