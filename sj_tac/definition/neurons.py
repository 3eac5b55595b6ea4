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

    def multi_step_forward(self, x_seq: Tensor) -> Tensor:
        """Return the spikes [T, N, ...] of the drives [T, N, ...], and store the last voltage as SpikingJelly does."""
        if problem(self, x_seq):
            spikes: Tensor = super().multi_step_forward(x_seq)  # type: ignore[misc]
            return spikes
        v = None if host.is_at_rest(self) else _voltage(self, x_seq)
        *numbers, threshold, reset, detach, _ = host.numbers_of(self)
        surrogate = host.fused_surrogate(self)
        assert surrogate is not None  # problem() has looked
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
    """Return why ``ops.neuron`` cannot run this call of a neuron; an empty string if it can."""
    if not x.is_floating_point():
        return f"its drives are {x.dtype}"
    if host.fused_surrogate(node) is None:
        return f"ops.neuron does not know the surrogate {type(node.surrogate_function).__name__}"
    if not isinstance(node.v_threshold, (int, float)):
        return "its v_threshold is a tensor"
    return host.many_numbers(node) or host.neuron_problem(node)


class TACLIFNode(OperatorNeuron, host.neuron.LIFNode):
    """LIFNode of a converted net."""


class TACIFNode(OperatorNeuron, host.neuron.IFNode):
    """IFNode of a converted net."""


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
