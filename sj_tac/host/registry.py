"""Classes that sj_tac may convert around because somebody vouches for them: the user, or this file for the host's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac.host import kinds
from sj_tac.host.types import neuron

Decay = float | Callable[[Any], Any]

_NEURONS: dict[type[nn.Module], Decay] = {}
_BATCH_FIRST: set[type[nn.Module]] = set()
# Empty where nobody vouches for any: every layer of every call asks.
SURROGATES: set[Any] = set()
# Where a step, or what is none, would show itself.
_PROBE = [
    sign * x for x in (0.0, 1e-30, 1e-7, 1e-4, 0.01, 0.1, 0.3, 0.49, 0.51, 0.9, 1.1, 2.0, 30.0, 1e6) for sign in (1.0, -1.0)
]


def _check_class(kind: Any, name: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(
            f"{name} takes a subclass of torch.nn.Module, got {kind!r}; register the class, not an instance of it"
        )


def register_neuron(kind: Any = None, *, decay: Decay = 1.0, batch_first: bool = False) -> Any:
    """Tell the decay of a neuron class of one's own, which ``convert`` otherwise measures. Its own forward runs its steps.

    ``sj_tac.register_neuron(MyNeuron, decay=0.5)``, or ``@sj_tac.register_neuron(decay=0.5)`` in front of the class.
    Subclasses that add a constructor alone are meant, too. The class promises: handed frames [T, N, ...] it gives as many;
    step t reads no later frame; samples do not look at each other; what a step adds to the membrane is linear in its frame.
    Where its steps cannot be measured, ``convert`` believes it.

    Args:
        kind: the class; None: a decorator is returned.
        decay: beta, what is left of the membrane after a step, in (0, 1]: a number, or a function of the module that gives
            one. It makes the weights ``beta^(k-1-j) / S_k`` of a group (docs/equations.md).
        batch_first: it is handed, and gives, frames [N, T, ...], as torch's recurrent layers with this argument: its steps
            are along dimension 1. Asked only where its steps cannot be measured.

    Raises:
        TypeError: no class of modules.
        ValueError: a decay out of (0, 1].
    """
    if kind is None:
        return lambda decorated: register_neuron(decorated, decay=decay, batch_first=batch_first)
    _check_class(kind, "register_neuron")
    if not callable(decay) and not (isinstance(decay, (int, float)) and 0 < decay <= 1):
        raise ValueError(
            f"register_neuron({kind.__name__}): decay={decay!r} must be a number in (0, 1] or a function that gives one"
        )
    _NEURONS[kind] = decay
    (_BATCH_FIRST.add if batch_first else _BATCH_FIRST.discard)(kind)
    kinds.know(kind)
    return kind


def register_affine(kind: Any = None) -> Any:
    """Do nothing, and warn: ``convert`` measures whether the path to a neuron is affine, for modules of any class.

    Args:
        kind: the class, which is returned; None: a decorator is returned. No value raises an error.

    Warns:
        FutureWarning: in every call.
    """
    warnings.warn(
        "sj_tac.register_affine has no effect any more: convert measures what is affine. Remove the call",
        FutureWarning,
        stacklevel=2,
    )
    return kind if kind is not None else lambda decorated: decorated


def register_surrogate(kind: Any = None) -> Any:
    """Let neurons with a surrogate function of one's own run in the compiled kernels where nobody differentiates.

    ``sj_tac.register_surrogate(MySurrogate)``, or ``@sj_tac.register_surrogate`` in front of the class; for
    ``surrogate_function=MyFunction.apply``, and functions in general, what the neurons are given. It promises: its value is
    1 where its input is at least 0 and else 0, in the input's dtype, and to be called is all that it is there for. The value
    is tried on a few numbers in every call. In training the reference kernel runs it, with its own derivative.

    Args:
        kind: a class of modules, as those of SpikingJelly's ``surrogate``, or a function; None: a decorator is returned.

    Raises:
        TypeError: neither of these, an instance among them.
    """
    if kind is None:
        return register_surrogate
    if isinstance(kind, nn.Module) or not callable(kind):
        raise TypeError(
            f"register_surrogate takes a class of modules, or a function, got {kind!r}; register the class, not an instance"
        )
    SURROGATES.add(kind)
    return kind


def is_registered_surrogate(function: Any) -> bool:
    """Whether somebody vouches for a neuron's surrogate function, and it keeps the promise."""
    if not SURROGATES or (type(function) not in SURROGATES and not _is_one(function)):
        return False
    if torch.compiler.is_compiling():  # a graph of it would hang on numbers
        return True
    with torch.no_grad():
        x = torch.tensor(_PROBE, dtype=torch.float32, device="cpu")
        found = function(x)
    return isinstance(found, Tensor) and found.dtype is x.dtype and torch.equal(found, (x >= 0).to(x))


def _is_one(function: Any) -> bool:
    try:
        return function in SURROGATES
    except TypeError:  # it has no hash
        return False


def is_registered_neuron(module: nn.Module) -> bool:
    return bool(_NEURONS) and kinds.kind(module) in _NEURONS


def is_batch_first(module: nn.Module) -> bool:
    """True for a registered neuron that is handed frames [N, T, ...]."""
    return bool(_BATCH_FIRST) and kinds.kind(module) in _BATCH_FIRST


def decay_of_class(own: type[nn.Module]) -> Decay | None:
    """The decay that was registered for a class or one of its bases; None where none was."""
    for cls in own.__mro__:
        if cls in _NEURONS:
            return _NEURONS[cls]
    return None


def registered_decay(node: nn.Module) -> float | None:
    """beta of a registered neuron; None of any other. Raises ValueError where its function gives none."""
    # By the bases alone: calls ask, too, compiled ones among them, which could not follow more.
    # Written out, as ``decay_of_class`` has it: every layer of every call asks.
    for cls in type(node).__mro__:
        if cls in _NEURONS:
            decay = _NEURONS[cls]
            break
    else:
        return None
    with torch.no_grad():
        found = decay(node) if callable(decay) else decay
    value = float(found)
    if not 0 < value <= 1 or math.isnan(value):
        raise ValueError(f"the decay registered for {type(node).__name__} gives {value}; it must be in (0, 1]")
    return value


def of_tau(node: Any) -> float:
    """beta of a neuron that leaks by its tau."""
    return 1.0 - 1.0 / float(node.tau.detach() if isinstance(node.tau, Tensor) else node.tau)


def _of_gates(node: Any) -> float:
    """GatedLIFNode decays each channel by ``1 - alpha (1 - tau)``; the weights are those of the channels' mean."""
    alpha, tau = node.alpha.sigmoid(), node.tau.sigmoid()
    return float((1 - alpha * (1 - tau)).mean())


# Of the host's own, those whose membrane leaks by a factor and is charged linearly. One of the two hosts has few of them.
_OWN: dict[str, Decay] = {
    "ILIFNode": of_tau,
    "LIAFNode": of_tau,
    "ComplementaryLIFNode": of_tau,
    "TernaryLIFNode": of_tau,
    "TernaryIFNode": 1.0,
    "HalfThresholdIFNode": 1.0,
    "GatedLIFNode": _of_gates,
}
for _name, _decay in _OWN.items():
    if hasattr(neuron, _name):
        register_neuron(getattr(neuron, _name), decay=_decay)
