"""A neuron's constants and its steps, by the host's own functions where it has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from spikingjelly.activation_based import functional, surrogate as surrogate
from torch import Tensor, nn

from sj_tac.host.registry import decay_of_class, is_registered_surrogate, of_tau, registered_decay
from sj_tac.host.types import IS_V2, neuron


def number(value: Any) -> float:
    """A neuron's number, be it a trained tensor; its gradient is not to be had from here."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def decay(node: Any, dtype: torch.dtype) -> float | Tensor:
    """beta of ``h = r + beta (v - r) + gamma x``: a float; where it is trained, a differentiable 0-dim tensor."""
    registered = registered_decay(node)
    if registered is not None:
        return registered
    if isinstance(node, neuron.ParametricLIFNode):
        decayed: Tensor = 1.0 - _one(node.w, dtype).sigmoid()
        return decayed
    if isinstance(node, neuron.LIFNode):
        # ``number``, written out: every layer of every call asks.
        tau = node.tau
        if isinstance(tau, Tensor):
            return 1.0 - 1.0 / (_one(tau, dtype) if _is_trained(node, tau) else number(tau))
        return 1.0 - 1.0 / float(tau)
    return 1.0


def has_known_decay(node: nn.Module) -> bool:
    """False for a neuron of a class that was registered elsewhere, and is not in this process."""
    return (
        isinstance(node, (neuron.LIFNode, neuron.IFNode, neuron.ParametricLIFNode)) or decay_of_class(type(node)) is not None
    )


def _is_trained(node: Any, tau: Tensor) -> bool:
    # What torch.func puts in a parameter's place is none, and need not say that it wants a gradient.
    return "tau" in node._parameters or tau.requires_grad


def _one(tau: Tensor, dtype: torch.dtype) -> Tensor:
    return tau.to(dtype) if not tau.dim() else tau.to(dtype).reshape(())


def many_numbers(node: Any) -> str:
    """What of a neuron is a tensor of several numbers where one makes the weights of a group; empty where nothing is."""
    name = "w" if isinstance(node, neuron.ParametricLIFNode) else "tau" if isinstance(node, neuron.LIFNode) else ""
    registered = decay_of_class(type(node))
    if registered is not None:
        name = "tau" if registered is of_tau else ""
    value = getattr(node, name) if name else None
    if not isinstance(value, Tensor) or value.numel() == 1:
        return ""
    return f"{name} is a tensor of {list(value.shape)} numbers"


def input_gain(node: Any, dtype: torch.dtype) -> float | Tensor:
    """gamma of ``h = r + beta (v - r) + gamma x``; see ``decay``."""
    # An IFNode has no decay_input, and torch's look-up takes its time to say so.
    if not isinstance(node, (neuron.LIFNode, neuron.ParametricLIFNode)) or not node.decay_input:
        return 1.0
    if isinstance(node, neuron.ParametricLIFNode):
        gain: Tensor = _one(node.w, dtype).sigmoid()
        return gain
    tau = node.tau
    if isinstance(tau, Tensor) and _is_trained(node, tau):
        return 1.0 / _one(tau, dtype)
    return 1.0 / number(tau)


def fire_and_reset(node: Any, charged: Tensor) -> tuple[Tensor, Tensor]:
    """The second half of a neuron step: charged voltage h -> (spike, voltage after the reset)."""
    if _evaluates_by_threshold(node) and not _is_threshold(node.surrogate_function):
        spike = (charged >= node.v_threshold).to(charged)
    else:
        spike = node.surrogate_function(charged - node.v_threshold)
    fired = spike.detach() if node.detach_reset else spike
    if node.v_reset is None:
        return spike, charged - fired * node.v_threshold
    return spike, (1.0 - fired) * charged + fired * node.v_reset


def resting_voltage(node: Any) -> float:
    """r: where the voltage decays to, ``v_reset``, or 0 for a soft reset."""
    if isinstance(node.v_reset, Tensor) and node.v_reset.numel() != 1:
        raise ValueError(
            f"{type(node).__name__}.v_reset is a tensor {list(node.v_reset.shape)}; sj_tac knows neurons with one v_reset, "
            "a number or None"
        )
    return 0.0 if node.v_reset is None else number(node.v_reset)


def neuron_problem(node: Any) -> str:
    """Why a neuron's steps must be the host's own; empty where they need not."""
    if node.store_v_seq:
        return "store_v_seq wants every step's voltage"
    if getattr(node, "_neuron_precision", None) is not None:
        return "the neuron has a precision of its own"
    reset = node.v_reset
    if isinstance(reset, Tensor) and reset.numel() != 1:
        return f"its v_reset is a tensor {list(reset.shape)}, and kernels know one for all neurons"
    if torch.is_grad_enabled():
        for name in ("tau", "v_reset"):
            value = getattr(node, name, None)
            if isinstance(value, Tensor) and value.requires_grad:
                return f"its {name} is trained"
    return _soft_reset_problem(node.v_threshold) if reset is None else ""


def _soft_reset_problem(threshold: Any) -> str:
    """Why a soft reset must be the host's own, ``v - spike * v_threshold`` as it stands."""
    if isinstance(threshold, Tensor) and (threshold.dim() or threshold.requires_grad):
        if not IS_V2 and torch.is_grad_enabled() and threshold.requires_grad:
            return "its v_threshold is trained, and SpikingJelly before 2.0 passes it no gradient through a soft reset"
        return ""
    if math.isfinite(threshold):
        return ""
    return f"its v_threshold is {number(threshold)}, and SpikingJelly's soft reset by it makes voltages NaN"


def has_scripted_steps(node: Any) -> bool:
    """Return whether the host's own steps are TorchScript, which takes a trained v_threshold for a number without gradient.

    Dynamo would trace the Python behind them, where it has one.
    """
    return not IS_V2 and isinstance(node.v_threshold, Tensor) and node.v_threshold.requires_grad


class Numbers(NamedTuple):
    """What a neuron's steps go by: "lif", "plif" or "if"; tau (of LIF); v_threshold; v_reset, None for a soft reset."""

    kind: str
    tau: float
    decay_input: bool
    threshold: float
    reset: float | None
    detach: bool
    surrogate: Any


def numbers_of(node: Any) -> Numbers:
    """Return a neuron's numbers as they are now. tau and v_reset must be single numbers."""
    kind = "plif" if isinstance(node, neuron.ParametricLIFNode) else "lif" if isinstance(node, neuron.LIFNode) else "if"
    tau, decays = number(node.tau) if kind == "lif" else 1.0, kind != "if" and node.decay_input
    reset = None if node.v_reset is None else number(node.v_reset)
    return Numbers(kind, tau, decays, node.v_threshold, reset, node.detach_reset, node.surrogate_function)


def steps_on(node: Any, drives: Tensor, voltage: Tensor) -> tuple[Tensor, Tensor]:
    """Ordinary steps on the drives [T, ...] from ``voltage``, by the host's own functions: spikes [T, ...], last voltage."""
    numbers, w = numbers_of(node), getattr(node, "w", None)
    # The host's functions take v_threshold as a number: they would refuse one by channel, and lose a trained one's gradient.
    if IS_V2 and not isinstance(node.v_threshold, Tensor):
        return steps_of(numbers, drives, voltage, w)
    return _steps(drives, voltage, lambda x, v: fire_and_reset(node, _charged(numbers, x, v, w)))


def _charged(of: Numbers, x: Tensor, v: Tensor, w: Tensor | None) -> Tensor:
    """The first half of a neuron step, ``h = r + beta (v - r) + gamma x``, in SpikingJelly's order of operations."""
    if of.kind == "if":
        return v + x
    rest = 0.0 if of.reset is None else of.reset
    if w is None:
        return v + (x - (v - rest)) / of.tau if of.decay_input else v - (v - rest) / of.tau + x
    rate = w.sigmoid().to(v.dtype)
    return v + (x - (v - rest)) * rate if of.decay_input else v - (v - rest) * rate + x


def _steps(drives: Tensor, v: Tensor, step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    spikes = []
    for x in drives:
        spike, v = step(x, v)
        spikes.append(spike)
    return torch.stack(spikes), v


def steps_of(numbers: Numbers, drives: Tensor, voltage: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ordinary steps on drives [T, ...] from ``voltage``, by the host's functions: spikes [T, ...], last voltage.

    Args:
        w: of a ParametricLIFNode, whose decay is ``1 - sigmoid(w)``.
    """
    kind, tau, decays, threshold, reset, detach, surrogate_function = numbers
    if IS_V2:
        shared = threshold, reset, surrogate_function, detach
        if kind == "plif":
            spikes, last, _ = functional.plif_multi_step(drives, voltage, w, decays, *shared)
        elif kind == "lif":
            spikes, last, _ = functional.lif_multi_step(drives, voltage, tau, decays, *shared)
        else:
            spikes, last, _ = functional.if_multi_step(drives, voltage, *shared)
        return spikes, last

    def step(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = _charged(numbers, x, v, w)
        spike = surrogate_function(h - threshold)
        fired = spike.detach() if detach else spike
        return spike, (h - fired * threshold if reset is None else (1.0 - fired) * h + fired * reset)

    return _steps(drives, voltage, step)


class ChargeMode(IntEnum):
    """How a fused kernel orders the operations of the charge, so that its spikes are the host's.

    The LIF modes divide by tau, the PLIF modes multiply; IF adds; MERGED is ``r + beta (v - r) + gamma x``. The kernels
    (kernels/cpu/src/neuron.h, kernels/gpu/src/neuron.cuh) count on these numbers.
    """

    LIF_DECAY = 0
    LIF = 1
    PLIF_DECAY = 2
    PLIF = 3
    IF = 4
    MERGED = 5


# The surrogates whose derivative the fused kernels know, in the order that numbers them; the older host lacks one.
_SURROGATES = ("Sigmoid", "ATan", "PiecewiseQuadratic", "PiecewiseExp", "SoftSign", "SuperSpike", "Erf")
_NUMBERS = {getattr(surrogate, name): i for i, name in enumerate(_SURROGATES) if hasattr(surrogate, name)}
FUSED_SURROGATES: tuple[type[nn.Module], ...] = tuple(_NUMBERS)
SURROGATES_BY_NUMBER: dict[int, Any] = {number: cls for cls, number in _NUMBERS.items()}


def fused_surrogate(node: Any) -> tuple[int, float] | None:
    """Number and alpha of a neuron's surrogate, where the fused kernels know it."""
    function = node._modules.get("surrogate_function")
    number = _NUMBERS.get(type(function))
    if (
        number is None
        or not function.spiking
        or not isinstance(function.alpha, (int, float))
        or "forward" in function.__dict__
    ):
        return None
    return number, float(function.alpha)


# The host's other surrogates that fire where the voltage reaches the threshold, and so differ in their gradient alone.
_THRESHOLDS = (
    *("Rect", "S2NN", "QPseudoSpike", "LeakyKReLU", "FakeNumericalGradient", "LogTailedReLU", "DeterministicPass"),
    *("SquarewaveFourierSeries", "NonzeroSignLogAbs", "PiecewiseLeakyReLU"),
)
_FIRING = {getattr(surrogate, name) for name in (*_SURROGATES, *_THRESHOLDS) if hasattr(surrogate, name)}


def fires_by_threshold(node: Any) -> bool:
    """True where a neuron's spikes are ``h >= v_threshold``, whatever their surrogate gradient."""
    return _evaluates_by_threshold(node) or _is_threshold(node.surrogate_function)


def _evaluates_by_threshold(node: Any) -> bool:
    """True in eval mode under the host before 2.0, whose IF and LIF neurons do not call their surrogate there."""
    return not IS_V2 and not node.training and isinstance(node, (neuron.LIFNode, neuron.IFNode))


def _is_threshold(function: Any) -> bool:
    if "forward" in getattr(function, "__dict__", ()) or not getattr(function, "spiking", True):
        return False
    if getattr(function, "_forward_hooks", None) or getattr(function, "_forward_pre_hooks", None):
        return False
    return type(function) in _FIRING or is_registered_surrogate(function)


def may_be_vouched_for(function: Any) -> bool:
    """Whether a surrogate function is of somebody's own, so that ``register_surrogate`` is for it."""
    return not type(function).__module__.startswith("spikingjelly.")
