"""Neurons of a converted net: SpikingJelly's own, whose T steps are one operator (``ops.neuron``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition import ops
from sj_tac.definition.classes import Swapped, mixed, own_class
from sj_tac.errors import InputError


@dataclass(frozen=True)
class Merging:
    """What a neuron does behind, or in, a binary collapse.

    Attributes:
        rate: R equal frames count as one. steps: K of these make one step, ``h = r + beta^K (v - r) + gamma S_K x``, with
            v_reset r, decay beta, input gain gamma and ``S_K = 1 + beta + .. + beta^(K-1)``. The drives of a group must be
            equal, which the convolution in front makes sure of: one of them is taken.
        normalize: False is the paper's form, ``gamma x``: its sums have the factor S_K already.
    """

    rate: int = 1
    steps: int = 1
    normalize: bool = True


# Of a surrogate whose gradient is not asked for.
_ANY = 0, 1.0


class OperatorNeuron(Swapped):
    """Mixin for a neuron class of SpikingJelly: a multi-step call runs ``ops.neuron``.

    The call runs SpikingJelly's own steps instead if the operator does not take the neuron as it is now (``problem``).
    """

    merging: Merging | None = None
    # Noted in front of each captured call (rewrites/gate.py): no value of the surrogate is needed, only its gradient.
    fires_by_threshold = False
    name_in_net = ""

    def multi_step_forward(self, x_seq: Tensor) -> Tensor:
        """Return the spikes [T, N, ...] of the drives [T, N, ...], and store the last voltage as SpikingJelly does."""
        check_voltage(self, x_seq.shape[1:])
        if self.merging is None:
            return self._steps(x_seq)
        steps, size = x_seq.shape[0], self.merging.rate * self.merging.steps
        rows = ops.last_of_each(x_seq, size, steps)
        spikes: Tensor = ops.expand(self._steps(rows) if self.merging.steps == 1 else self._merged(rows, steps), size, steps)
        return spikes

    def _merged(self, drives: Tensor, steps: int) -> Tensor:
        """Return one spike for each group of a binary collapse, whose drives [G, N, ...] these are."""
        merging, wide = self.merging or Merging(), host.wide_dtype(drives.dtype)
        beta, gain, rest = host.decay(self, wide), host.input_gain(self, wide), host.resting_voltage(self)
        spikes: list[Tensor] = []  # Dynamo cannot call list[Tensor]
        history: list[Tensor] = []
        count, v = ops.groups(steps, merging.rate), _voltage(self, drives)
        for place, drive in enumerate(drives.to(wide)):
            length = min(merging.steps, count - place * merging.steps)
            total = sum(beta**j for j in range(length)) if merging.normalize else 1.0
            spike, v = host.fire_and_reset(self, rest + beta**length * (v - rest) + gain * total * drive)
            spikes.append(spike)
            history.append(v)
        host.put_state(self, v, history)
        return torch.stack(spikes).to(drives.dtype)

    def _steps(self, x_seq: Tensor) -> Tensor:
        surrogate = host.fused_surrogate(self)
        if self.fires_by_threshold and torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled():
            surrogate = surrogate or _ANY
        if surrogate is None or problem(self, x_seq):
            if host.has_scripted_steps(self) and torch.compiler.is_dynamo_compiling():
                spikes: Tensor = _as_it_is(self, x_seq)
            else:
                spikes = super().multi_step_forward(x_seq)  # type: ignore[misc]
            return spikes
        v = None if host.is_at_rest(self) else _voltage(self, x_seq)
        *numbers, threshold, reset, detach, _ = host.numbers_of(self)
        spikes, last = ops.neuron(x_seq, v, getattr(self, "w", None), *numbers, float(threshold), reset, detach, *surrogate)
        host.put_state(self, last, [])
        return spikes


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _as_it_is(node: Any, x_seq: Tensor) -> Tensor:
    """Return the spikes of SpikingJelly's own steps, which Dynamo does not look into."""
    spikes: Tensor = super(OperatorNeuron, node).multi_step_forward(x_seq)
    return spikes


def check_voltage(node: Any, frame: torch.Size) -> None:
    """Raise InputError where the voltage that a call before left does not fit a call's frames, [N, ...].

    SpikingJelly 2.0 replaces such a voltage by itself. A voltage that was set for all samples or places fits.
    """
    held = None if host.IS_V2 else node._memories["v"]
    if not isinstance(held, Tensor) or held.shape == frame:
        return
    sizes = zip(reversed(held.shape), reversed(frame), strict=False)
    if held.dim() > len(frame) or any(size not in (1, wanted) for size, wanted in sizes):
        raise InputError(
            f"neuron {node.name_in_net!r} holds voltages {list(held.shape)} of an earlier call, and this call's frames are "
            f"{list(frame)}; call functional.reset_net(net) between calls of different shapes"
        )


def _voltage(node: Any, x_seq: Tensor) -> Tensor:
    """Return the stored voltage in the dtype of steps: SpikingJelly would round it to a half input's dtype."""
    wide = x_seq[:1].to(host.wide_dtype(x_seq.dtype))
    v: Tensor = host.take_state(node, wide)
    if not isinstance(v, torch.Tensor):  # a whole number, which SpikingJelly leaves as it is
        return torch.full_like(wide[0], v)
    # Dynamo cannot ask; what stands in front of a captured call does (rewrites/gate.py).
    return v if torch.compiler.is_dynamo_compiling() else outside_inference(v)


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


def is_known(module: nn.Module) -> bool:
    """Return whether a neuron's steps are one operator here, or become one: SpikingJelly's three, however constructed."""
    return isinstance(module, OperatorNeuron) or host.kind(module) in host.NEURONS


def swap(net: nn.Module) -> list[str]:
    """Change the class of each neuron that ``is_known`` in ``net``, in place, and return their names.

    Parameters, memories and keys stay as they are. Other neurons are left alone: their steps are their own.
    """
    found = []
    for name, module in net.named_modules():
        if is_known(module) and not isinstance(module, OperatorNeuron):
            module.__class__ = mixed(OperatorNeuron, type(module))
            module.name_in_net = name
            found.append(name)
    return found


def undo(net: nn.Module) -> None:
    """Give each neuron that ``swap`` changed its own class again."""
    for module in net.modules():
        if isinstance(module, OperatorNeuron):
            for name in ("merging", "fires_by_threshold", "name_in_net"):
                vars(module).pop(name, None)
            module.__class__ = own_class(type(module))  # type: ignore[assignment]
