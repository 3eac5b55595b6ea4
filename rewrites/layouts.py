"""Where time stands in a value: frames [T, N, ...], or folded ones [T * N, ...], told by the shapes of a sample.

A reshape keeps the order of elements, so shapes decide, not symbols. (T, N) is the shape that the neurons are handed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx, nn

from sj_tac import host

Shape = tuple[int, ...]


class Layout(StrEnum):
    TIME = "time"  # [T, N, ...]
    FOLDED = "folded"  # [T * N, ...]
    OTHER = "other"


@dataclass(frozen=True)
class Sample:
    """T and N of the sample. Where it has one sample, or as many as steps, shapes cannot tell a fold."""

    steps: int
    batch: int

    @property
    def tells_folds(self) -> bool:
        return self.batch > 1 and self.batch != self.steps

    def layout(self, shape: Shape | None) -> Layout:
        if shape is None or len(shape) < 2:
            return Layout.OTHER
        if shape[:2] == (self.steps, self.batch):
            return Layout.TIME
        return Layout.FOLDED if self.tells_folds and shape[0] == self.steps * self.batch else Layout.OTHER

    def might_be_folded(self, shape: Shape | None) -> bool:
        """True for what would be folded frames, if the sample could tell."""
        return shape is not None and len(shape) >= 2 and shape[0] == self.steps * self.batch


def sample_of(model: nn.Module, nodes: list[fx.Node]) -> Sample | None:
    """T and N as most neurons see them, and as the model's inputs have them; None where no shape is known."""
    seen: Counter[Shape] = Counter()
    given = [shape[:2] for node in nodes if node.op == "placeholder" and (shape := node.meta.get("shape")) is not None]
    for node in nodes:
        if node.op == "call_module" and host.steps_by_itself(model.get_submodule(str(node.target))) and node.all_input_nodes:
            shape = node.all_input_nodes[0].meta.get("shape")
            if shape is not None and len(shape) >= 2:
                seen[shape[:2]] += 1

    def rank(found: Shape) -> tuple[bool, bool, int]:
        """A neuron that is handed folded frames sees something else; T may also be made in the forward."""
        both = any(found in (first, first[::-1]) for first in given)
        return both, any(first[:1] == found[1:] for first in given), seen[found]

    return Sample(*max(seen, key=rank)) if seen else None


_REPEATS: set[Any] = {
    *("repeat", "expand", "repeat_interleave", "tile", "expand_as", "broadcast_to"),
    *(torch.repeat_interleave, torch.broadcast_to, torch.tile),
}
_JOINS: set[Any] = {torch.stack, torch.cat, torch.concat, torch.concatenate}


def repeats(node: fx.Node, sample: Sample | None) -> bool:
    """True for one frame T times over: ``x.unsqueeze(0).repeat(T, 1, ...)``, ``expand``, ``stack([x] * T)``."""
    shape: Any = node.meta.get("shape")
    if sample is None or sample.steps == 1 or sample.layout(shape) is not Layout.TIME:
        return False
    if node.target in _REPEATS:
        before = node.all_input_nodes[0].meta.get("shape")
        if before is None:
            return False
        return (before[0] == 1 and len(before) == len(shape)) or (len(before) == len(shape) - 1 and before == shape[1:])
    if node.target in _JOINS:
        parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
        dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        return bool(dim == 0 and isinstance(parts, (list, tuple)) and len(set(parts)) == 1 and len(parts) == shape[0])
    return False
