"""A graph of the model's modules: by torch.fx on symbols alone or, where forward asks for values, beside a real sample."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from sj_tac import host
from sj_tac.errors import TraceError
from sj_tac.rewrites.answers import as_tensors
from sj_tac.rewrites.arguments import as_arguments, by_name, copied, holds_tensor
from sj_tac.rewrites.buffers import Buffers, written
from sj_tac.rewrites.failures import first_line, why_not
from sj_tac.rewrites.forwards import RootForward, concrete, guesses, root_forward
from sj_tac.rewrites.functions import as_one_value, by_first_names
from sj_tac.rewrites.operations import site_layer


def _is_known(module: nn.Module) -> bool:
    """True for a subclass of the user's that adds nothing, and for a registered one: one operation, whatever it calls."""
    return host.is_added_to(module) or host.is_registered_neuron(module) or host.is_registered_affine(module)


class _LeafTracer(fx.Tracer):
    """Keeps step modules and the host's layers whole, and remembers which module it is in.

    The host's composite layers (attention) are looked into. What cannot be followed is ``closed``: one opaque node, with the
    reason; unless ``opaque`` is off, where it is an error.
    """

    # Into containers that are no conv, norm and pool: their frames are folded, which only a sample can tell.
    looks_inside = False

    def __init__(self, *, opaque: bool = True) -> None:
        super().__init__()
        self.opaque = opaque
        self.closed: dict[nn.Module, str] = {}
        self._stopped: tuple[BaseException, nn.Module] | None = None
        self._thread = threading.get_ident()
        self.buffers = Buffers(self.write)
        self.forward: RootForward | None = None

    def read(self, forward: RootForward) -> None:
        """Trace this call instead of what torch.fx reads from the model's class."""
        self.forward, self.traced_func_name = forward, forward.entry
        if forward.home is not None:
            self._autowrap_search.append(forward.home)  # as torch.fx does with the home of what it reads

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        if self.forward is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in self.forward.inputs]
        return self.forward.call, [self.root, *inputs]

    def write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any) -> Any:
        """The graph's value of a tensor that a forward made itself and wrote a value into."""
        if not self.opaque:
            raise TypeError(f"{getattr(function, '__name__', function)} writes a value into a tensor that the forward made")
        index, value = (args[1], args[2]) if function is Tensor.__setitem__ else (None, list(args))
        return self.create_proxy("call_function", written, (into, index, value), {})

    def is_instance(self, proxy: fx.Proxy, classes: Any) -> bool:
        """What ``isinstance`` says of a symbol: it stands for a tensor, for all one knows without a sample."""
        if not issubclass(Tensor, classes):
            return False
        if not self.opaque:
            raise TypeError(f"whether {proxy} is a tensor: the sample knows")
        return True

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, np.generic):
            return super().create_arg(a.item())  # a scalar of NumPy's counts as Python's number, to torch
        return super().create_arg(vars(a) if type(a) is SimpleNamespace else self.buffers.now(a))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if host.kind(m) in host.CONTAINERS and self.looks_inside and site_layer(m) is None:
            return m in self.closed
        if m in self.closed or (host.is_leaf(m) and not host.is_composite(m)) or _is_known(m):
            return True
        return not host.is_composite(m) and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_elsewhere() or (self.submodule_paths is not None and m not in self.submodule_paths):
            # Made in forward, so no part of the model: what it does is part of the function that made it.
            return forward(*args, **kwargs)
        place = self.place()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            if self._stopped is not None and self._stopped[0] is error:
                raise
            if self.opaque and not self.is_leaf_module(m, ""):
                # Once more with this one as a leaf, here and now: starting over would be quadratic in what is closed.
                self.forget(place)
                self.closed[m] = first_line(error)
                return self.call_module(m, forward, args, kwargs)
            self._stopped = error, m
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._is_elsewhere():
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def _is_elsewhere(self) -> bool:
        """True in a thread that runs modules while another one traces: torch.fx patches the class of all modules."""
        return threading.get_ident() != self._thread

    def place(self) -> tuple[fx.Node | None, int]:
        """Where the trace is: behind which node, in how many modules."""
        return next(iter(reversed(self.graph.nodes)), None), len(self.module_stack)

    def forget(self, place: tuple[fx.Node | None, int]) -> None:
        """Take off what was recorded since."""
        last, depth = place
        for node in list(takewhile(lambda node: node is not last, reversed(self.graph.nodes))):
            if node.op != "get_attr":  # fx hands these out again, and they are no data
                self.graph.erase_node(node)
        while len(self.module_stack) > depth:
            self.module_stack.popitem()

    def where(self, error: BaseException) -> str:
        """The module that ``error`` stopped."""
        if self._stopped is None or self._stopped[0] is not error:
            return f"the forward of {type(getattr(self, 'root', None)).__name__}"
        module = self._stopped[1]
        name = self.submodule_paths.get(module, "?") if self.submodule_paths else "?"
        return f"module {name!r} ({type(module).__name__})"


class _ValueProxy(fx.Proxy):
    """A proxy that holds the tensor it stands for, so that questions about its shape or content have an answer."""

    __array_priority__ = Tensor.__array_priority__  # NumPy's scalars leave what they are multiplied with to it

    def __init__(self, node: fx.Node, tracer: _ValueTracer, held: Any) -> None:
        super().__init__(node, tracer)
        self._held = held

    def __getattr__(self, name: str) -> Any:
        if name == "_held":  # a copy that has not been filled
            raise AttributeError(name)
        found = getattr(self._held, name)
        if callable(found):
            return lambda *args, **kwargs: self.tracer.create_proxy("call_method", name, (self, *args), kwargs)
        if isinstance(found, Tensor):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        # Whoever reads this proxy from now on reads what was written.
        tracer: Any = self.tracer
        self.node = tracer.write(Tensor.__setitem__, (self, index, value), {}, self).node

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

    def __format__(self, spec: str) -> str:
        return format(self._held, spec)

    def __contains__(self, item: Any) -> bool:
        return item in self._held


def _hold_values(module: nn.Module) -> None:
    """Memories that a forward wrote become the tensors that were meant: modules run on values."""
    for inner in module.modules():
        memories = inner.__dict__.get("_memories") or {}
        memories.update({name: held._held for name, held in memories.items() if isinstance(held, _ValueProxy)})


class _ValueTracer(_LeafTracer):
    """Runs the model on ``example`` while it records; whatever is not a tensor (shapes, flags) is a plain value.

    The graph is good for looking at which modules feed which. It is not run again: shapes are frozen into it.
    """

    looks_inside = True

    def __init__(self, example: dict[str, Any]) -> None:
        super().__init__()
        self._inputs = example
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
        if not holds_tensor(value):
            return value

        def make(node: fx.Node) -> fx.Proxy:
            if isinstance(value, Tensor):
                node.meta["shape"], node.meta["dtype"] = tuple(value.shape), value.dtype
            return _ValueProxy(node, self, value)

        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, make)
        return self._spread(proxy, value) if kind == "placeholder" or isinstance(value, dict) else proxy

    def is_instance(self, proxy: Any, classes: Any) -> bool:
        return isinstance(proxy._held, classes)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, target, *args, **kwargs)
        if kind == "get_attr" and "shape" not in node.meta:
            # Of a buffer, or of what was computed of such, the graph asks by itself.
            held = self._value(kind, target, (), {})
            if isinstance(held, Tensor):
                node.meta["shape"], node.meta["dtype"] = tuple(held.shape), held.dtype
                node.meta["parameter"] = isinstance(held, nn.Parameter)
        return node

    def write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any) -> Any:
        self._value("call_function", function, args, kwargs)
        return super().write(function, args, kwargs, into)

    def _spread(self, proxy: Any, value: Any) -> Any:
        """A container of proxies for a proxy of a container: forward may ask its keys, its length, its class."""
        if host.is_record(value):
            fields = {n: self.create_proxy("call_function", getattr, (proxy, n), {}) for n in vars(value)}
            return host.record_like(value, {n: self._spread(p, getattr(value, n)) for n, p in fields.items()})
        if type(value) is dict:
            keys: list[Any] = list(value)
        elif type(value) in (list, tuple):
            keys = list(range(len(value)))
        else:
            return proxy
        parts = [self.create_proxy("call_function", operator.getitem, (proxy, key), {}) for key in keys]
        parts = [self._spread(p, value[key]) if isinstance(p, fx.Proxy) else p for key, p in zip(keys, parts, strict=True)]
        return dict(zip(keys, parts, strict=True)) if type(value) is dict else type(value)(parts)

    def _value(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def held(item: Any) -> Any:
            return item._held if isinstance(item, _ValueProxy) else item

        values = torch.utils._pytree.tree_map(held, args)
        named = torch.utils._pytree.tree_map(held, kwargs)
        if kind == "placeholder":
            return self._inputs.get(str(target).lstrip("*"), values[0] if values else None)
        self._running = self.buffers.paused = True
        try:
            if kind == "get_attr":
                return operator.attrgetter(str(target))(self.root)
            if kind == "call_module":
                module = self.root.get_submodule(target)
                _hold_values(module)
                return module(*values, **named)
            if kind == "call_method":
                return getattr(values[0], target)(*values[1:], **named)
            return target(*values, **named)
        finally:
            self._running = self.buffers.paused = False


# A trace patches the class of all modules and puts back what it found, which must not be another trace's patch.
_ONE_TRACE = threading.RLock()


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
    if example_input is None:
        return _on_symbols(model)
    arguments = copied(as_arguments(example_input))
    given = by_name(model, arguments)
    forward = root_forward(model, given)
    given = given if forward is None else forward.given
    # Each in a look of its own: what symbols leave in attributes is not for the sample to meet.
    with contextlib.suppress(Exception), host.looked_at(model):
        # Opaque nodes are the last resort: the sample may get through.
        tracer = _LeafTracer(opaque=False)
        tracer.looks_inside = True
        traced = _traced(tracer, model, given, forward, sampled=False)
        _note_shapes(model, traced.graph, given)
        return traced
    try:
        with host.looked_at(model):
            host.reset_memories(model)  # voltages may be those of another batch
            return _traced(_ValueTracer(given), model, given, forward, sampled=True)
    except TraceError as error:
        # Only now that the model is as it was: it may run.
        raise TraceError(why_not(model, arguments, error.__cause__ or error)) from error.__cause__


def _on_symbols(model: nn.Module) -> Traced:
    first, *others = guesses(model)
    try:
        with host.looked_at(model):
            return _traced(_LeafTracer(), model, {}, first, sampled=False)
    except TraceError:
        for forward in others:
            with contextlib.suppress(TraceError), host.looked_at(model):
                return _traced(_LeafTracer(), model, {}, forward, sampled=False)
        raise


def _traced(
    tracer: _LeafTracer, model: nn.Module, given: dict[str, Any], forward: RootForward | None, *, sampled: bool
) -> Traced:
    names = {module: name for name, module in model.named_modules()}
    if forward is None:
        fixed = concrete(model, given, sampled)
    else:
        fixed = {}
        tracer.read(forward)
    try:
        with _ONE_TRACE, tracer.buffers, as_tensors(model, tracer.is_instance), as_one_value(tracer):
            graph = tracer.trace(model, concrete_args=fixed or None)
    except Exception as error:
        raise TraceError(
            f"torch.fx cannot follow {tracer.where(error)} on symbols alone, in eval mode ({first_line(error)}); it "
            "probably asks for the shape or content of its input: pass example_input=, a real batch [T, N, C, H, W]"
        ) from error
    return Traced(by_first_names(graph), {names[m]: why for m, why in tracer.closed.items()}, sampled)


class _Shapes(fx.Interpreter):
    """Runs a graph and notes the shape of every value."""

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, Tensor):
            n.meta["shape"], n.meta["dtype"] = tuple(found.shape), found.dtype
        return found


def _note_shapes(model: nn.Module, graph: fx.Graph, given: dict[str, Any]) -> None:
    """Give the nodes of a symbolic graph the shapes that a sample has there; none where it does not run on it."""
    names = [str(n.target).lstrip("*") for n in graph.nodes if n.op == "placeholder"]
    arguments = [given[name] for name in names if name in given]
    with contextlib.suppress(Exception):
        host.reset_memories(model)
        _Shapes(model, graph=graph).run(*arguments)
