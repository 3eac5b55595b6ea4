"""Neurons of a converted net: SpikingJelly's own, whose T steps are one operator (``ops.neuron``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition import ops


class OperatorNeuron(nn.Module):
    """Mixin for a neuron class of SpikingJelly: a multi-step call runs ``ops.neuron``.

    The call runs SpikingJelly's own steps instead if the operator does not take the neuron as it is now (``problem``).
    """

    def step_decay(self, dtype: torch.dtype) -> float | Tensor:
        """Return ``host.decay``. The classes below know theirs: no look into the registry."""
        return host.decay(self, dtype)

    def multi_step_forward(self, x_seq: Tensor) -> Tensor:
        """Return the spikes [T, N, ...] of the drives [T, N, ...], and store the last voltage as SpikingJelly does."""
        surrogate = host.fused_surrogate(self)
        if surrogate is None or problem(self, x_seq):
            spikes: Tensor = super().multi_step_forward(x_seq)  # type: ignore[misc]
            return spikes
        v = None if host.is_at_rest(self) else _voltage(self, x_seq)
        *numbers, threshold, reset, detach, _ = host.numbers_of(self)
        spikes, last = ops.neuron(x_seq, v, getattr(self, "w", None), *numbers, float(threshold), reset, detach, *surrogate)
        host.put_state(self, last, [])
        return spikes


def _voltage(node: Any, x_seq: Tensor) -> Tensor:
    """Return the stored voltage in the dtype of steps: SpikingJelly would round it to a half input's dtype."""
    v: Tensor = host.take_state(node, x_seq[:1].to(host.wide_dtype(x_seq.dtype)))
    # Dynamo cannot ask; what stands in front of a captured call does (rewrites/gate.py).
    return v if torch.compiler.is_compiling() else outside_inference(v)


def outside_inference(v: Tensor) -> Tensor:
    """Return a voltage that autograd may record, in a call outside of inference mode."""
    return v.clone() if v.is_inference() and not torch.is_inference_mode_enabled() else v


def problem(node: Any, x: Tensor) -> str:
    """Return why ``ops.neuron`` cannot run this call of a neuron with a surrogate that it knows; an empty string if it can.

    Dynamo traces this for each neuron of each capture: few branches and no loops over classes.
    """
    if not x.is_floating_point():
        return f"its drives are {x.dtype}"
    if not isinstance(node.v_threshold, (int, float)):
        return "its v_threshold is a tensor"
    for name in ("tau", "w"):
        value = getattr(node, name, None)
        if isinstance(value, Tensor) and value.numel() != 1:
            return f"its {name} is a tensor of {list(value.shape)} numbers"
    return host.neuron_problem(node)


class TACLIFNode(OperatorNeuron, host.neuron.LIFNode):
    """LIFNode of a converted net."""

    def step_decay(self, dtype: torch.dtype) -> float | Tensor:
        """Return ``1 - 1 / tau``."""
        return 1.0 - 1.0 / float(self.tau) if isinstance(self.tau, (int, float)) else host.decay(self, dtype)


class TACIFNode(OperatorNeuron, host.neuron.IFNode):
    """IFNode of a converted net."""

    def step_decay(self, dtype: torch.dtype) -> float | Tensor:
        """Return 1."""
        return 1.0


class TACParametricLIFNode(OperatorNeuron, host.neuron.ParametricLIFNode):
    """ParametricLIFNode of a converted net."""


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    host.neuron.LIFNode: TACLIFNode,
    host.neuron.IFNode: TACIFNode,
    host.neuron.ParametricLIFNode: TACParametricLIFNode,
}


def swap(net: nn.Module) -> list[str]:
    """Change the class of each neuron of ``SWAPS`` in ``net``, in place, and return their names.

    Parameters, memories and keys stay as they are. A neuron of a subclass is left alone: its steps are its own.
    """
    found = []
    for name, module in net.named_modules():
        kind = SWAPS.get(type(module))
        if kind is not None:
            module.__class__ = kind
            found.append(name)
    return found


def undo(net: nn.Module) -> None:
    """Give each neuron that ``swap`` changed its own class again."""
    own = {made: kind for kind, made in SWAPS.items()}
    for module in net.modules():
        if type(module) in own:
            module.__class__ = own[type(module)]
