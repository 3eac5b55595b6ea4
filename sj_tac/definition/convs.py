"""Convolutions of a converted net: ``expand(conv(aggregate(x)))``, one convolution for k frames."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition import ops
from sj_tac.kernels.weights import decay_weights

LOGITS = "tac_logits"


@dataclass
class Sharing:
    """How a converted convolution aggregates the frames of a group.

    Attributes:
        k: frames per convolution; 1 is the source's layer.
        neuron: the neuron that the convolution drives, whose decay weighs the frames.
        weights: "decay": ``w_j = beta^(k-1-j) / S_k``; "uniform": ``1 / k``; "learned": the softmax of ``tac_logits`` [k].
        normalize: weights sum to 1. False is the paper's form, without ``/ S_k``.
    """

    k: int
    neuron: nn.Module
    weights: Literal["decay", "uniform", "learned"] = "decay"
    normalize: bool = True

    def operands(self, dtype: torch.dtype, logits: Tensor | None) -> tuple[list[float], Tensor | None]:
        """Return the k weights as numbers, or as a tensor [k] if their gradient is wanted (a PLIF's w, learned weights)."""
        if self.weights == "learned" and logits is not None:
            return [], torch.softmax(logits.to(host.wide_dtype(dtype)), 0)
        if self.weights == "uniform":
            return [1 / self.k if self.normalize else 1.0] * self.k, None
        found = decay_weights(host.decay(self.neuron, host.wide_dtype(dtype)), [1] * self.k, self.normalize)
        if isinstance(found[0], Tensor):
            return [], torch.stack([torch.as_tensor(w) for w in found])
        return [float(w) for w in found], None


# T of the folded frames [T * N, ...] that layers are called with: it belongs to the call, not to the net.
STEPS: ContextVar[int | None] = ContextVar("steps", default=None)


class SharedConv(nn.Module):
    """Mixin for a convolution class: it runs once for ``sharing.k`` frames.

    Its input is [T, N, C, ...] in SpikingJelly's step mode "m". Any other layer takes folded frames [T * N, C, ...], and
    shares where ``STEPS`` says what T is. The convolution itself is the class's own forward, on the G aggregated frames.
    """

    sharing: Sharing

    def forward(self, x: Tensor) -> Tensor:
        """Return frames in x's layout, equal within each group of k."""
        k, steps = self.sharing.k, x.shape[0] if _takes_frames(self) else STEPS.get()
        if k == 1 or steps is None:
            made: Tensor = super().forward(x)
            return made
        weights, by = self.sharing.operands(x.dtype, self._parameters.get(LOGITS))
        sums = ops.aggregate(x, weights, by, steps, self.sharing.normalize)
        frames: Tensor = ops.expand(super().forward(sums), k, steps)
        return frames


def _takes_frames(module: nn.Module) -> bool:
    return getattr(module, "step_mode", "s") == "m"


class TACConv1d(SharedConv, host.layer.Conv1d):
    """Conv1d of a converted net."""


class TACConv2d(SharedConv, host.layer.Conv2d):
    """Conv2d of a converted net."""


class TACConv3d(SharedConv, host.layer.Conv3d):
    """Conv3d of a converted net."""


class TACLinear(SharedConv, host.layer.Linear):
    """Linear of a converted net."""


class TACTorchConv1d(SharedConv, nn.Conv1d):
    """torch's Conv1d in a converted net."""


class TACTorchConv2d(SharedConv, nn.Conv2d):
    """torch's Conv2d in a converted net."""


class TACTorchConv3d(SharedConv, nn.Conv3d):
    """torch's Conv3d in a converted net."""


class TACTorchLinear(SharedConv, nn.Linear):
    """torch's Linear in a converted net."""


class TACContainer(host.layer.SeqToANNContainer):
    """SeqToANNContainer of a converted net: tells its layers what T is."""

    def forward(self, x_seq: Tensor) -> Tensor:
        """Return frames [T, N, ...] of frames [T, N, ...]."""
        token = STEPS.set(x_seq.shape[0])
        try:
            frames: Tensor = super().forward(x_seq)
        finally:
            STEPS.reset(token)
        return frames


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    host.layer.Conv1d: TACConv1d,
    host.layer.Conv2d: TACConv2d,
    host.layer.Conv3d: TACConv3d,
    host.layer.Linear: TACLinear,
    nn.Conv1d: TACTorchConv1d,
    nn.Conv2d: TACTorchConv2d,
    nn.Conv3d: TACTorchConv3d,
    nn.Linear: TACTorchLinear,
}


def share(net: nn.Module, plan: Mapping[str, Sharing]) -> None:
    """Change the class of each convolution in ``plan`` and of the containers around it, in place.

    Args:
        plan: name of the convolution -> how it aggregates. A convolution that is swapped already gets the new one.
    """
    modules = dict(net.named_modules())
    for name, sharing in plan.items():
        conv: Any = modules[name]
        if not isinstance(conv, SharedConv):
            conv.__class__ = SWAPS[type(conv)]
        conv.sharing = sharing
    for module in modules.values():
        if type(module) is host.layer.SeqToANNContainer and any(isinstance(m, SharedConv) for m in module):
            module.__class__ = TACContainer


def undo(net: nn.Module) -> None:
    """Give each module that ``share`` changed its own class again."""
    own = {made: kind for kind, made in SWAPS.items()}
    for module in net.modules():
        if type(module) in own:
            del module.sharing
            module.__class__ = own[type(module)]
        elif type(module) is TACContainer:
            module.__class__ = host.layer.SeqToANNContainer
