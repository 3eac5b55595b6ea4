"""Convolutions of a converted net: ``expand(conv(aggregate(x)))``, one convolution for k frames."""

from __future__ import annotations

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


class SharedConv(nn.Module):
    """Mixin for a convolution class: in step mode "m" it runs once for ``sharing.k`` frames.

    Its input is [T, N, C, ...]. The convolution itself is the class's own forward, on the G aggregated frames.
    """

    sharing: Sharing

    def forward(self, x: Tensor) -> Tensor:
        """Return frames [T, N, C, ...], alike within each group of k."""
        if self.sharing.k == 1 or not host.is_multi_step(self):
            made: Tensor = super().forward(x)
            return made
        steps = x.shape[0]
        weights, by = self.sharing.operands(x.dtype, self._parameters.get(LOGITS))
        sums = ops.aggregate(x, weights, by, steps, self.sharing.normalize)
        frames: Tensor = ops.expand(super().forward(sums), self.sharing.k, steps)
        return frames


class TACConv1d(SharedConv, host.layer.Conv1d):
    """Conv1d of a converted net."""


class TACConv2d(SharedConv, host.layer.Conv2d):
    """Conv2d of a converted net."""


class TACConv3d(SharedConv, host.layer.Conv3d):
    """Conv3d of a converted net."""


class TACLinear(SharedConv, host.layer.Linear):
    """Linear of a converted net."""


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    host.layer.Conv1d: TACConv1d,
    host.layer.Conv2d: TACConv2d,
    host.layer.Conv3d: TACConv3d,
    host.layer.Linear: TACLinear,
}


def share(conv: Any, sharing: Sharing) -> None:
    """Change the class of a convolution of ``SWAPS``, in place, or the sharing of one that is swapped already."""
    if not isinstance(conv, SharedConv):
        conv.__class__ = SWAPS[type(conv)]
    conv.sharing = sharing


def undo(net: nn.Module) -> None:
    """Give each convolution that ``share`` changed its own class again."""
    own = {made: kind for kind, made in SWAPS.items()}
    for module in net.modules():
        if type(module) in own:
            del module.sharing
            module.__class__ = own[type(module)]
