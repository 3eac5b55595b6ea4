"""Collapse: from a point on, equal frames stand for several steps.

The definition keeps T frames everywhere. A collapse by D only makes frames equal in groups of D. T = 5 and D = 2:

    counted    the neuron takes its 5 steps; it, or the MaxPool that alone reads its spikes s, emits the mean of each group
               (``Mean``): m0 m0 m1 m1 s4. A convolution behind (``Sharing.stretch`` = 2) computes m0, m1 and s4, and its
               output has 5 frames again. Its neuron takes 5 steps and emits means, too.
    binary     the neuron takes one step for each group of equal drives (``neurons.Merging``) and emits one spike for it:
               s0 s0 s1 s1 s2. Behind it, two equal frames are one step (``rate`` = 2) for convolutions and neurons.

With ``emit: groups`` the net returns one frame of each group (``Groups``): 3 of these 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sj_tac.definition import ops
from sj_tac.definition.classes import drop_hooks
from sj_tac.definition.frames import Frames


@dataclass
class Mean:
    """Forward hook: each frame of the output becomes the mean of its group, ``expand(aggregate(x))`` with equal weights.

    Attributes:
        steps: D, frames in a group. rate: R, how many equal frames count as one. frames: where frames are.
        layer: the hooked module's qualified name.
    """

    of_sj_tac: ClassVar[bool] = True

    steps: int
    rate: int = 1
    frames: Frames = field(default_factory=Frames)
    layer: str = ""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if getattr(module, "step_mode", "m") == "s":
            return None
        made = next((x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor)), None)
        return None if made is None else tree_map(lambda x: self.means(made) if x is made else x, output)

    def means(self, x: Tensor) -> Tensor:
        """Return frames of x's layout, equal within each group."""
        T = self.frames.steps(x)
        if T is None:
            return x
        rows, steps = self.frames.time_first(x, T), ops.groups(T, self.rate)
        if self.rate > 1:
            rows = ops.last_of_each(rows, self.rate, T)
        # Both questions: Dynamo may give this function up, and still compile ``is_captured`` by itself, to True.
        if torch.compiler.is_dynamo_compiling() and ops.is_captured():
            rows = ops.mark(rows, None, None, 1.0, steps, self.layer)
        else:
            rows = ops.expand(ops.aggregate(rows, [1.0] * self.steps, None, steps, "normalized"), self.steps, steps)
        if self.rate > 1:
            rows = ops.expand(rows, self.rate, T)
        return self.frames.back(rows, T)


@dataclass
class Groups:
    """Forward hook of a net: of each group of ``size`` equal frames of its output, one is kept."""

    of_sj_tac: ClassVar[bool] = True

    size: int

    def __call__(self, net: nn.Module, args: Any, output: Tensor) -> Tensor:
        kept: Tensor = ops.last_of_each(output, self.size, output.shape[0])
        return kept


def put_means(net: nn.Module, means: Mapping[str, Mean], groups: int) -> None:
    """Let these modules emit means, and no others; and of each ``groups`` equal frames of the net's output, keep one.

    A Mean stands in front of the user's hooks, which see what readers see. One that stands there already takes new numbers:
    a captured call knows it.
    """
    for name, module in net.named_modules():
        wanted = means.get(name)
        before = next((hook for hook in module._forward_hooks.values() if isinstance(hook, Mean)), None)
        drop_hooks(module, Groups)
        if wanted is not None and before is not None:
            vars(before).update(vars(wanted))
            continue
        drop_hooks(module, Mean)
        if wanted is not None:
            module.register_forward_hook(wanted, prepend=True)
    if groups > 1:
        net.register_forward_hook(Groups(groups))
