"""The gate of a converted net decides, before each call, whether captured graphs may run it: Dynamo's guards do not see all.

``Gate`` is a converted net's ``_compiled_call_impl``, so ``net(x)`` comes here first. One thread's call runs at
a time. The gate looks, in this order:

1. torch compiles or exports the caller, or traces it, or a dispatch mode or a transform of torch.func's is active, or an
   argument is a tensor of a class of its own, or a hook is on gradients of modules, or on all modules: the definition runs.
   So it does on a device without kernels; kernels that were named raise BackendError there.
2. A hook, a module, a method of a class or an environment variable is not what it was when the net was captured: the net is
   captured again. (Dynamo does not guard a variable that a forward asked for and that was not set.)
3. k or the weights of a layer changed: the graphs that are there are rewritten; nothing is captured.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from operator import itemgetter
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as every_module

from sj_tac import host
from sj_tac.definition import ops
from sj_tac.definition.classes import drop_hooks
from sj_tac.definition.neurons import OperatorNeuron, outside_inference
from sj_tac.definition.noted import NotedNorm
from sj_tac.errors import BackendError, CaptureWarning, ConversionError
from sj_tac.host import dispatch
from sj_tac.kernels import backends
from sj_tac.rewrites.capture import Capture

_GLOBAL_HOOKS = [
    getattr(every_module, name)
    for name in (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
    )
]  # fmt: skip


# The dictionary behind os.environ: comparing it costs a microsecond, and os.environ itself forty.
_VARIABLES = os.environ._data  # type: ignore[attr-defined]
_CALLS = "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__setattr__", "forward"
# Dynamo puts its own in the place of these when it first sees a class.
_DYNAMOS = "__init__", "__setstate__"


class Gate:
    """A net's call.

    Attributes:
        backend: the kernels that were asked for. capture: its captured graphs.
    """

    def __init__(self, net: nn.Module, backend: str) -> None:
        self.net, self.backend, self.capture = net, backend, Capture(net, backend)
        self._problems: dict[str, str] = {}
        self._was_inference, self._variables = False, dict(_VARIABLES)
        self._lock, self._is_announced = threading.RLock(), False
        self._watch()

    def _watch(self) -> None:
        """Note what captured calls rest on."""
        # What is scripted cannot change so, and has no dictionaries.
        modules = [m for m in self.net.modules() if not isinstance(m, torch.jit.ScriptModule)]
        # The dictionaries themselves: each call looks into them, and a look-up by nn.Module's name costs more.
        self._children = [m._modules for m in modules]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._gradient_hooks = [hooks for m in modules for hooks in (m._backward_hooks, m._backward_pre_hooks)]
        classes = dict.fromkeys(chain.from_iterable(type(m).__mro__ for m in modules))
        self._methods = [
            (kind.__dict__, itemgetter("__module__", *_methods(kind))) for kind in classes if kind is not object
        ]
        self._nodes = [m for m in modules if hasattr(m, "v_threshold")]
        known = [m for m in modules if isinstance(m, OperatorNeuron)]
        self._own_surrogates = [m for m in known if host.fused_surrogate(m) is None]
        self._norms = [m for m in modules if isinstance(m, NotedNorm)]
        self._seen = self._now()

    def _now(self) -> tuple[list[Any], list[Any], list[Any], list[int]]:
        """Return hooks and children of all modules, the methods of their classes, and how many names each class has."""
        hooks = chain.from_iterable(map(dict.items, self._hooks))
        children = chain.from_iterable(map(dict.values, self._children))
        methods, sizes = [], []
        for names, get in self._methods:
            methods.append(get(names))
            sizes.append(len(names))
        return list(hooks), list(children), methods, sizes

    def _is_as_captured(self) -> bool:
        """Return whether the captured calls still hold."""
        if self._variables != _VARIABLES:
            self._variables = dict(_VARIABLES)
            return False
        try:
            now = self._now()
            if now == self._seen:  # by identity first, as lists compare
                return True
            seen, watched = self._seen, self._methods
            self._watch()
            host.forget_reset_cache(self.net)  # it looks again only where a module is freed
            # Dynamo itself adds names to classes when it first sees them; a method among them would be new.
            return now[:3] == seen[:3] and [len(get(n)) for n, get in watched] == [len(get(n)) for n, get in self._methods]
        except Exception:  # a method is gone, or values that cannot be compared stand in its place
            self._watch()
            return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or getattr(ops.CAPTURE, "defined", False):
            return self.net._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        # torch says so in every thread while one compiles; one that exports has modes of its own.
        if torch.compiler.is_compiling() and dispatch.is_transformed():
            return self.net._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        before, ops.CAPTURE.inside = getattr(ops.CAPTURE, "inside", False), True
        try:
            # A net has one set of voltages, and Dynamo must not look at it while another thread's call writes it.
            with self._lock:
                return self._run(args, kwargs)
        finally:
            ops.CAPTURE.inside = before

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_announced:
            self.announce(self)
        inference = torch.is_inference_mode_enabled()
        if self._was_inference and not inference:
            self._leave_inference()
        self._was_inference = inference
        blocked = self._blocked(args, kwargs)
        if blocked:
            self.capture.tell(blocked)
        if blocked or self._no_kernels(args, kwargs):
            return self.net._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self._is_as_captured():
            self.capture.forget()
        self.capture.look()
        for norm in self._norms:
            norm.note_training()
        for node in self._own_surrogates:
            node.fires_by_threshold = host.fires_by_threshold(node)
        at_rest = not self._nodes or host.is_at_rest(self._nodes[0])
        variant = torch.is_grad_enabled(), inference, self.net.training, at_rest
        return self.capture.run(variant, args, kwargs)

    def announce(self, gate: Gate | None) -> None:
        """Let the net's convolutions know that its calls are captured, so that they say if a call goes around them."""
        self._is_announced = gate is not None
        for sharing in self.capture.shared.values():
            sharing.gate = gate

    def _blocked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why this call runs the definition; an empty string if it need not."""
        ops.refuse_trace()
        if dispatch.is_transformed() or torch._C._len_torch_function_stack() or forward_ad._current_level >= 0:
            return "torch traces or transforms the call, or a mode of torch's watches it"
        if any(_GLOBAL_HOOKS):
            return "a hook is registered for all modules of the process"
        if any(self._gradient_hooks):
            return "a hook on gradients is registered on one of its modules"
        if not all(type(x) in dispatch.PLAIN for x in _tensors((args, kwargs))):
            return "an argument is a tensor of a class of its own"
        return ""

    def _no_kernels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why there are no kernels where the arguments are, or nothing. Raises BackendError if they were named."""
        given = next(_tensors((args, kwargs)), None)
        if given is None:
            return ""
        device = given.device
        if device.type not in self._problems:
            self._problems[device.type] = backends.fastest(self.backend, device, torch.float32)[1]
        problem = self._problems[device.type]
        if problem and self.backend != "auto":
            raise BackendError(f"backend={self.backend!r} cannot run: {problem}; backend='auto' takes what can")
        return problem

    def _leave_inference(self) -> None:
        """Replace voltages that were stored in inference mode, which autograd cannot record."""
        for node in self._nodes:
            if isinstance(node.v, Tensor):
                node.v = outside_inference(node.v)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


@contextlib.contextmanager
def as_defined() -> Iterator[None]:
    """Let this thread's calls of converted nets run as they are defined: hooks of a measurement are not worth a capture."""
    before, ops.CAPTURE.defined = getattr(ops.CAPTURE, "defined", False), True
    inside, ops.CAPTURE.inside = getattr(ops.CAPTURE, "inside", False), True
    try:
        yield
    finally:
        ops.CAPTURE.defined, ops.CAPTURE.inside = before, inside


def _nothing() -> None:
    """Return None, for a gate that is copied or pickled: the copy's first call makes a gate of its own (``Attach``)."""


def _methods(kind: type) -> list[str]:
    """Return the names of a class's own functions and properties that a call may run."""
    if kind is nn.Module:
        return [name for name in _CALLS if name in kind.__dict__]
    kinds = FunctionType, staticmethod, classmethod, property
    return [name for name, value in kind.__dict__.items() if isinstance(value, kinds) and name not in _DYNAMOS]


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        yield from chain.from_iterable(map(_tensors, x.values()))
    elif isinstance(x, (tuple, list)):
        yield from chain.from_iterable(map(_tensors, x))


class Attach:
    """Forward pre-hook of a converted net: copies and unpickled nets, which have lost their gate, get one of their own."""

    of_sj_tac: ClassVar[bool] = True

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __call__(self, net: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and net._compiled_call_impl is None:
            attach(net, self.backend).announce(
                None
            )  # this call runs as it is defined: none of its parts may say that it does


class Forget:
    """Forward pre-hook of a net that runs as it is defined: SpikingJelly's reset looks at its modules anew."""

    of_sj_tac: ClassVar[bool] = True

    def __call__(self, net: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            host.forget_reset_cache(net)


def attach(net: nn.Module, backend: str) -> Gate:
    """Let a net's calls go through a gate, and return it."""
    gate = Gate(net, backend)
    # Not by attribute: nn.Module would look for a parameter of that name first.
    net.__dict__["_compiled_call_impl"] = gate
    net.__dict__ |= _REPLACED
    gate.announce(gate)
    return gate


def capture_calls(net: nn.Module, backend: str) -> None:
    """Let calls of a net, and of its copies, go through a gate, and run these kernels."""
    if gate_of(net) is None:
        net.register_forward_pre_hook(Attach(backend))
        attach(net, backend)


def keep_capture(*args: Any, **kwargs: Any) -> None:
    """Warn that a converted net's own ``compile`` method changes nothing."""
    warnings.warn(
        "net.compile() changes nothing: sj_tac captures this net's calls itself, and its kernels run them. To compile the "
        "net as it is defined, call torch.compile(net)",
        CaptureWarning,
        stacklevel=2,
    )


def refuse_replicas() -> None:
    """Raise ConversionError: a replica of nn.DataParallel would call the original net, with the original's weights."""
    raise ConversionError(
        "a converted net cannot be replicated by nn.DataParallel, whose replicas share its captured call; use "
        "nn.parallel.DistributedDataParallel"
    )


_REPLACED: dict[str, Callable[..., None]] = {"compile": keep_capture, "_replicate_for_data_parallel": refuse_replicas}


def detach(net: nn.Module) -> None:
    """Let a net's calls run its own forward again."""
    gate = gate_of(net)
    for name in ("_compiled_call_impl", *_REPLACED):
        net.__dict__.pop(name, None)
    if gate is not None:
        gate.announce(None)
    drop_hooks(net, Attach, Forget)


def gate_of(net: nn.Module) -> Gate | None:
    """Return the gate of a net; None if it has none."""
    found: Callable[..., Any] | None = net.__dict__.get("_compiled_call_impl")
    return found if isinstance(found, Gate) else None
