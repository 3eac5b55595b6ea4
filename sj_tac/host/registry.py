"""Classes that sj_tac may convert around because somebody vouches for them: the user, or this file for the host's own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sj_tac.host import kinds
from sj_tac.host.types import is_multi_step, is_neuron, neuron

Kind = TypeVar("Kind", bound=type[nn.Module])
Decay = float | Callable[[Any], Any]

_NEURONS: dict[type[nn.Module], Decay] = {}
_BATCH_FIRST: set[type[nn.Module]] = set()
_AFFINE: set[type[nn.Module]] = set()
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
    """Let drives be shared for neurons of a class of one's own. Its own forward runs its steps; only ``preserve`` applies.

    ``sj_tac.register_neuron(MyNeuron, decay=0.5)``, or ``@sj_tac.register_neuron(decay=0.5)`` in front of the class.
    Subclasses that add a constructor alone are meant, too. The class promises: handed frames [T, N, ...] it gives as many;
    step t reads no later frame; samples do not look at each other; what a step adds to the membrane is linear in its frame.
    ``convert`` tries the first three on ``example_input``, which it then needs. The last cannot be seen in spikes: it is the
    caller's word.

    Args:
        kind: the class; None: a decorator is returned.
        decay: beta, what is left of the membrane after a step, in (0, 1]: a number, or a function of the module that gives
            one. It makes the weights ``beta^(k-1-j) / S_k`` of a group (docs/equations.md).
        batch_first: it is handed, and gives, frames [N, T, ...], as torch's recurrent layers with this argument: its steps
            are along dimension 1.

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
    """Let drives pass modules of a class of one's own, which in eval mode is the same affine map of every sample.

    ``sj_tac.register_affine(MyNorm)``, or ``@sj_tac.register_affine`` in front of the class: a norm, a padding. It may take
    frames [T, N, ...] or folded ones [T * N, ...], any number of them. ``convert`` tries both promises on ``example_input``,
    which it then needs.

    Args:
        kind: the class; None: a decorator is returned.

    Raises:
        TypeError: no class of modules.
    """
    if kind is None:
        return register_affine
    _check_class(kind, "register_affine")
    _AFFINE.add(kind)
    kinds.know(kind)
    return kind


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


def steps_and_batch(module: nn.Module, shape: Sequence[int]) -> tuple[int, int]:
    """T and N of the shape that a neuron is handed."""
    first, second = shape[:2]
    return (second, first) if is_batch_first(module) else (first, second)


def is_registered_affine(module: nn.Module) -> bool:
    return bool(_AFFINE) and kinds.kind(module) in _AFFINE


def steps_by_itself(module: nn.Module) -> bool:
    """True for a spiking neuron in step_mode "m", which is handed frames by definition; and for a registered one."""
    return (is_neuron(module) or is_registered_neuron(module)) and is_multi_step(module)


def is_the_hosts(module: nn.Module) -> bool:
    """True for a neuron or a norm that this file vouches for."""
    return kinds.kind(module) in _OF_THE_HOST


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
# In eval mode BatchNorm's map; in training it is handed all frames.
register_affine(nn.SyncBatchNorm)
_OF_THE_HOST = {*_NEURONS, *_AFFINE}
_CONVERTED = "spikingjelly.activation_based.ann2snn.modules"


def know_loaded() -> None:
    """Register what the host has in modules that few import: its converter of ANNs scales drives by one constant."""
    found = sys.modules.get(_CONVERTED)
    for name in ("VoltageScaler", "ChannelVoltageScaler") if found is not None else ():
        scaler = getattr(found, name, None)
        if scaler is not None and scaler not in _AFFINE:
            _OF_THE_HOST.add(register_affine(scaler))
