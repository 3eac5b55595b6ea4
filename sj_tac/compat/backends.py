"""Lets ``activation_based`` code of SpikingJelly 0.0.0.0.13 and 0.0.0.0.14 build its models on 2.0, or without CUDA.

Import it before models are built. On 2.0, where the host chooses its kernels itself:

- the neurons take ``backend=``, by keyword or where 0.0.0.0.14 had it (before ``store_v_seq``); it is checked and dropped.
  ``node.backend`` reads "torch", so code with a branch for each backend takes the one that runs everywhere;
- ``functional.set_backend(net, backend, instance)`` checks the name and does nothing else;
- ``neuron.surrogate``, ``neuron.base`` and the like are there again, for ``from ....neuron import surrogate, base``;
- ``surrogate.SurrogateFunctionBase(alpha, spiking)`` and ``layer.StepModeContainer(stateful, *modules)`` take the old order;
- the modules ``auto_cuda``, ``cuda_utils``, ``neuron_kernel``, ``spike_op`` and ``tensor_cache`` can be imported, and
  classes derived from theirs; what is in them is gone, and raises HostError when it is used;
- a neuron of the user's own whose ``neuronal_charge`` the host would ignore raises HostError when it is made.

On 0.0.0.0.14 ``backend="cupy"`` becomes "torch" where CuPy or a CUDA device is missing; the host alone raises there. The
classes stay the host's own, and code that uses none of this runs as before.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from spikingjelly.activation_based import base, functional, layer, neuron, surrogate
from torch import nn

from sj_tac.compat import cuda_code, surrogates
from sj_tac.compat.hooks import BACKENDS, CALLS_HOOKS, check_backend, install_hooks, refuse_hooks

# What took backend= in 0.0.0.0.14.
NEURONS = (
    "BaseNode",
    "AdaptBaseNode",
    "IFNode",
    "LIFNode",
    "ParametricLIFNode",
    "QIFNode",
    "EIFNode",
    "IzhikevichNode",
    "KLIFNode",
)
_DONE = "_sj_tac_backends"


def _accept_backend(cls: Any) -> None:
    """``cls(..., step_mode, backend, store_v_seq)`` beside the host's own ``cls(..., step_mode, store_v_seq)``."""
    init: Callable[..., None] = cls.__init__
    place = list(inspect.signature(init).parameters).index("store_v_seq") - 1
    is_base = cls is neuron.BaseNode

    @functools.wraps(init)
    def accept(self: Any, *args: Any, **given: Any) -> None:
        if len(args) > place and isinstance(args[place], str):
            check_backend(self, args[place])
            args = (*args[:place], *args[place + 1 :])
        if "backend" in given:
            check_backend(self, given.pop("backend"))
        if is_base:
            refuse_hooks(self)
        init(self, *args, **given)

    cls.__init__ = accept


def _accept_modules(cls: Any) -> None:
    """``cls(stateful, *modules)`` beside the host's own ``cls(stateful, step_mode, *modules)``."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def accept(self: Any, stateful: bool, *args: Any, **given: Any) -> None:
        if args and isinstance(args[0], nn.Module):
            args = (given.pop("step_mode", "s"), *args)
        init(self, stateful, *args, **given)

    cls.__init__ = accept


def set_backend(net: nn.Module, backend: str, instance: object | tuple[type, ...] = (nn.Module,)) -> None:
    """Checks ``backend`` and does nothing else: SpikingJelly 2.0 chooses its kernels itself.

    Raises BackendError for a backend that it has no equivalent of.
    """
    check_backend(net, backend)


def _install_on_2() -> None:
    for name in NEURONS:
        _accept_backend(getattr(neuron, name))
    _accept_modules(layer.StepModeContainer)
    surrogates.accept_old_signature()
    cuda_code.install()
    install_hooks()
    # Plain attributes: what a subclass sets for itself hides them.
    base.MemoryModule.backend = "torch"
    base.MemoryModule.supported_backends = BACKENDS
    names: dict[Any, dict[str, Any]] = {
        functional: {"set_backend": set_backend, "base": base, "torch": torch, "nn": nn, "F": nn.functional},
        neuron: {"surrogate": surrogate, "base": base, "torch": torch, "nn": nn},
        layer: {"base": base, "functional": functional, "torch": torch, "nn": nn, "F": nn.functional},
        base: {"SingleModule": base.SingleStepModule},
        surrogate: {"MultiArgsSurrogateFunctionBase": surrogates.MultiArgsSurrogateFunctionBase},
    }
    for module, gone in names.items():
        for name, value in gone.items():
            if not hasattr(module, name):
                setattr(module, name, value)


def _is_there(package: str) -> bool:
    """Whether a package can be imported, or was: one that somebody put there may say nothing of where it comes from."""
    return package in sys.modules or find_spec(package) is not None


def _install_on_14() -> None:
    host: Any = base.MemoryModule.backend
    told: set[str] = set()

    def choose(self: Any, value: str) -> None:
        if value == "cupy" and (not _is_there("cupy") or not torch.cuda.is_available()):
            if value not in told:
                told.add(value)
                logging.getLogger(__name__).info("backend='cupy' needs CuPy and a CUDA device: neurons run on 'torch'")
            value = "torch"
        host.fset(self, value)

    base.MemoryModule.backend = property(host.fget, choose, host.fdel, host.__doc__)


if not hasattr(base, _DONE):
    setattr(base, _DONE, True)
    if CALLS_HOOKS:
        _install_on_14()
    else:
        _install_on_2()
