"""What Python answers about proxies while a model is traced: they are asked as the tensors that they stand for."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

# What proxies are to these is torch.fx's affair: PyTorch reads a tensor's memory where it is told that something is one.
NOT_ASKING = sys.stdlib_module_names | {"functorch", "numba", "numpy", "sj_tac", "torch", "torchgen", "triton"}


@contextlib.contextmanager
def as_tensors(model: nn.Module, is_instance: Callable[[fx.Proxy, Any], bool]) -> Iterator[None]:
    """Let ``isinstance`` in the model's Python, ``torch.is_tensor`` and scripted functions take proxies for tensors.

    Each module's own name ``isinstance`` is set, as torch.fx does for functions that it wraps: the built-in one stays.

    Args:
        is_instance: what ``isinstance`` says of a proxy.
    """

    def asked(x: Any, classes: Any, /) -> bool:
        if builtins.isinstance(x, classes):
            return True
        return builtins.isinstance(x, fx.Proxy) and is_instance(x, classes)

    def is_tensor(obj: Any, /) -> bool:
        return asked(obj, Tensor)

    library: Any = torch
    scripted: Any = torch.jit.ScriptFunction
    run = scripted.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = next((x for x in tree_leaves((args, kwargs)) if builtins.isinstance(x, fx.Proxy)), None)
        if proxy is None:
            return run(function, *args, **kwargs)
        return proxy.tracer.create_proxy("call_function", function, args, kwargs, name=function.name)

    is_tensor_before = library.is_tensor
    unnamed = [names for names in _namespaces(model) if "isinstance" not in names]
    try:
        # Of some thousand modules: a plain loop, as a callback for each takes longer than the trace.
        for names in unnamed:
            names["isinstance"] = asked
        library.is_tensor = is_tensor
        scripted.__call__ = call
        yield
    finally:
        scripted.__call__ = run
        library.is_tensor = is_tensor_before
        for names in unnamed:
            names.pop("isinstance", None)


def _namespaces(model: nn.Module) -> list[dict[str, Any]]:
    """The global names of all Python that a forward may run, of code that no module holds among it."""
    found: dict[int, dict[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in NOT_ASKING and builtins.isinstance(module, ModuleType):
            found[id(vars(module))] = vars(module)
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        names = getattr(vars(cls).get("forward"), "__globals__", None)
        if names is not None and cls.__module__.partition(".")[0] not in NOT_ASKING:
            found[id(names)] = names
    return list(found.values())
