"""Convolutions of a converted net: ``expand(conv(aggregate(x)))``, one convolution for k frames."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition import ops
from sj_tac.definition.neurons import OperatorNeuron
from sj_tac.errors import CaptureWarning

LOGITS = "tac_logits"


@dataclass
class Sharing:
    """How a converted convolution aggregates the frames of a group.

    Attributes:
        k: frames per convolution; 1 is the source's layer.
        layer: the convolution's qualified name.
        neuron: the neuron that the convolution drives, whose decay weighs the frames.
        weights: "decay": ``w_j = beta^(k-1-j) / S_k``; "uniform": ``1 / k``; "learned": the softmax of ``tac_logits`` [k].
        normalize: weights sum to 1. False is the paper's form, without ``/ S_k``.
        gate: of the net whose calls are captured (rewrites/gate.py); None if none are.
    """

    k: int
    neuron: nn.Module
    weights: Literal["decay", "uniform", "learned"] = "decay"
    normalize: bool = True
    layer: str = ""
    gate: Any = field(default=None, repr=False, compare=False)

    def decay(self, dtype: torch.dtype) -> float | Tensor:
        """Return the neuron's decay: a number, or a tensor if it has a gradient."""
        node, wide = self.neuron, host.wide_dtype(dtype)
        return node.step_decay(wide) if isinstance(node, OperatorNeuron) else host.decay(node, wide)

    def marked(self, dtype: torch.dtype, logits: Tensor | None) -> tuple[Tensor | None, Tensor | None, float | None]:
        """Return what ``ops.mark`` must hold, whatever k will be: logits, the decay as a tensor, or as a number."""
        if self.weights != "decay":
            return (logits if self.weights == "learned" else None), None, None
        beta = self.decay(dtype)
        return (None, beta, None) if isinstance(beta, Tensor) else (None, None, beta)

    def operands(self, dtype: torch.dtype, logits: Tensor | None) -> tuple[list[float], Tensor | None, str]:
        """Return the weights for ``ops.aggregate``: numbers, or a tensor if they have a gradient; and their form."""
        form = "normalized" if self.normalize else "plain"
        if self.weights == "learned":
            if logits is None:
                raise ValueError(f"weights='learned', and the convolution has no {LOGITS} [k={self.k}]")
            return [], logits, "logits"
        if self.weights == "uniform":
            return [1.0] * self.k, None, form
        beta = self.decay(dtype)
        if isinstance(beta, Tensor):
            return [], beta ** torch.arange(self.k - 1, -1, -1, device=beta.device), form
        return [beta ** (self.k - 1 - j) for j in range(self.k)], None, form


class SharedConv(nn.Module):
    """Mixin for a convolution class: it runs once for ``sharing.k`` frames.

    Its input is [T, N, C, ...] in SpikingJelly's step mode "m". Any other layer takes folded frames [T * N, C, ...], and
    shares if the caller passes T. The convolution itself is the class's own forward, on the G aggregated frames.
    """

    sharing: Sharing

    def forward(self, x: Tensor, *, steps: int | None = None) -> Tensor:
        """Return frames in x's layout, equal within each group of k. ``steps``: T, of folded frames."""
        if _takes_frames(self):
            steps = x.shape[0]
        logits = getattr(self, LOGITS, None)
        if not torch.compiler.is_dynamo_compiling():
            if self.sharing.gate is not None and not ops.is_inside():
                _say_part(type(self.sharing.gate.net).__name__)
        elif steps is not None:
            marked = self.sharing.marked(x.dtype, logits)
            # Nothing stands between the question and the mark: a mark that is not captured cannot run.
            if ops.is_captured():
                x, steps = ops.mark(x, *marked, steps, self.sharing.layer), None
        if steps is None or self.sharing.k == 1:
            made: Tensor = super().forward(x)
            return made
        weights, by, form = self.sharing.operands(x.dtype, logits)
        sums = ops.aggregate(x, weights, by, steps, form)
        frames: Tensor = ops.expand(super().forward(sums), self.sharing.k, steps)
        return frames


def _say_part(root: str) -> None:
    """Warn that a captured net's own call was gone around; Python shows the same warning once."""
    warnings.warn(
        f"a part of this converted {root} was called, or its forward: it runs as it is defined, right and slower. Only a "
        f"call of the {root} itself runs sj_tac's kernels; call that, or convert the part that you call",
        CaptureWarning,
        stacklevel=3,
    )


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
    """SeqToANNContainer of a converted net: passes T to its convolutions."""

    def forward(self, x_seq: Tensor) -> Tensor:
        """Return frames [T, N, ...] of frames [T, N, ...]."""
        x = x_seq.flatten(0, 1)
        for module in self:
            # By keyword, so that hooks without with_kwargs see the frames alone.
            x = module(x, steps=x_seq.shape[0]) if isinstance(module, SharedConv) else module(x)
        return x.reshape(*x_seq.shape[:2], *x.shape[1:])


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

    Raises:
        ValueError: no such convolution, one of another class, a neuron with several decays, or a convolution that takes
            folded frames from a module that does not know T. The net is left as it was.
    """
    modules = dict(net.named_modules(remove_duplicate=False))
    for name, sharing in plan.items():
        _check(modules, name, sharing)
    for name, sharing in plan.items():
        conv: Any = modules[name]
        if not isinstance(conv, SharedConv):
            conv.__class__ = SWAPS[type(conv)]
        conv.sharing = replace(sharing, layer=name)
    for module in modules.values():
        if type(module) is host.layer.SeqToANNContainer and any(isinstance(m, SharedConv) for m in module):
            module.__class__ = TACContainer


def _check(modules: Mapping[str, nn.Module], name: str, sharing: Sharing) -> None:
    """Raise ValueError where ``share`` cannot take this part of its plan."""
    conv, containers = modules.get(name), (host.layer.SeqToANNContainer, TACContainer)
    if conv is None or not (isinstance(conv, SharedConv) or type(conv) in SWAPS):
        known = ", ".join(kind.__name__ for kind in SWAPS)
        raise ValueError(f"{name!r} is a {type(conv).__name__}; frames are shared in {known}")
    if problem := host.many_numbers(sharing.neuron):
        raise ValueError(f"{name!r} drives a neuron with several decays: its {problem}")
    if _takes_frames(conv):
        return
    parts = name.split(".")[:-1]
    above = [modules[".".join(parts[:i])] for i in range(len(parts), -1, -1)]
    if type(above[0]) not in containers or any(isinstance(module, containers) for module in above[1:]):
        raise ValueError(
            f"convolution {name!r} ({type(conv).__name__}) takes folded frames [T * N, C, ...] from a "
            f"{type(above[0]).__name__}, which does not know T; use SpikingJelly's layer in step mode 'm', or put it into a "
            "SeqToANNContainer of its own"
        )


def undo(net: nn.Module) -> None:
    """Give each module that ``share`` changed its own class again."""
    own = {made: kind for kind, made in SWAPS.items()}
    for module in net.modules():
        if type(module) in own:
            del module.sharing
            module.__class__ = own[type(module)]
        elif type(module) is TACContainer:
            module.__class__ = host.layer.SeqToANNContainer
