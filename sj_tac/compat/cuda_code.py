"""Names of the CUDA code of SpikingJelly 0.0.0.0.13 and 0.0.0.0.14, which 2.0 has no counterpart of: for importing alone.

Published models import them beside their classes, for neurons with kernels of their own that nothing on a CPU ever calls.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from sj_tac.errors import HostError

PACKAGE = "spikingjelly.activation_based"
# A package stands before what is in it.
MODULES = (
    "auto_cuda",
    "auto_cuda.base",
    "auto_cuda.cfunction",
    "auto_cuda.generator",
    "auto_cuda.neuron_kernel",
    "cuda_utils",
    "neuron_kernel",
    "spike_op",
    "tensor_cache",
)


def _refuse(name: str) -> NoReturn:
    raise HostError(
        f"{name} is CUDA code of SpikingJelly 0.0.0.0.14, which 2.0 has no counterpart of: build the model with "
        "backend='torch', whose steps are plain PyTorch, or run it under SpikingJelly 0.0.0.0.14"
    )


class _Gone(type):
    """Classes that can be imported and derived from. What is done with them raises HostError."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"{cls.__module__}.{cls.__qualname__}")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # who asks for these asks whether they are there
            raise AttributeError(name)
        _refuse(f"{cls.__module__}.{cls.__qualname__}.{name}")


class _Module(ModuleType):
    """A module in which every name stands for a class, or a function, that is gone."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        made = _Gone(name, (), {"__module__": self.__name__, "__doc__": "CUDA code that is gone; see sj_tac.compat."})
        setattr(self, name, made)
        return made


def install() -> None:
    """Register the modules that the host has not."""
    for short in MODULES:
        name = f"{PACKAGE}.{short}"
        if name in sys.modules or find_spec(name) is not None:
            continue
        made = _Module(name, "Names of CUDA code that is gone; see sj_tac.compat.backends.")
        is_package = any(other.startswith(f"{short}.") for other in MODULES)
        made.__spec__ = ModuleSpec(name, None, is_package=is_package)
        if is_package:
            made.__path__ = []
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, made)
