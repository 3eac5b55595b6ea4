"""Where time stands in a value: frames [T, N, ...] or [N, T, ...], or folded ones, told by the shapes of a sample.

A reshape keeps the order of elements, so shapes decide, not symbols; of folded frames, what was folded. (T, N) is the shape
that the neurons are handed.
"""

from __future__ import annotations

from collections.abc import Callable
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
    BATCH = "batch"  # [N, T, ...]
    BATCH_FOLDED = "batch folded"  # [N * T, ...]
    OTHER = "other"

    @property
    def folded(self) -> bool:
        return self in (Layout.FOLDED, Layout.BATCH_FOLDED)

    @property
    def batch_first(self) -> bool:
        return self in (Layout.BATCH, Layout.BATCH_FOLDED)

    @property
    def kept(self) -> int:
        """Dimensions in front of a frame's own."""
        return 1 if self.folded else 2


@dataclass(frozen=True)
class Sample:
    """T and N of the sample. Where it has one sample, or as many as steps, shapes cannot tell a fold."""

    steps: int
    batch: int

    @property
    def tells_folds(self) -> bool:
        return self.batch > 1 and self.batch != self.steps

    def layout(self, shape: Shape | None, made_of: Layout = Layout.OTHER) -> Layout:
        """Of a shape; ``made_of``: the layout of what the value was made of, which tells how it was folded."""
        if shape is None or len(shape) < 2:
            return Layout.OTHER
        if shape[:2] == (self.steps, self.batch):
            return Layout.TIME
        if not self.tells_folds:
            return Layout.OTHER
        if shape[:2] == (self.batch, self.steps):
            return Layout.BATCH
        if shape[0] != self.steps * self.batch:
            return Layout.OTHER
        return Layout.BATCH_FOLDED if made_of.batch_first else Layout.FOLDED

    def might_be_folded(self, shape: Shape | None) -> bool:
        """True for what would be folded frames, if the sample could tell."""
        return shape is not None and len(shape) >= 2 and shape[0] == self.steps * self.batch


def layout_of(node: fx.Node) -> Layout:
    """What ``note_layouts`` noted."""
    found: Layout = node.meta.get("layout", Layout.OTHER)
    return found


def note_layouts(nodes: list[fx.Node], sample: Sample | None) -> None:
    """Note of every value where time stands in it."""
    if sample is None:
        return
    for node in nodes:
        before = (layout_of(n) for n in node.all_input_nodes)
        known = next((found for found in before if found is not Layout.OTHER), Layout.OTHER)
        node.meta["layout"] = sample.layout(node.meta.get("shape"), known)


def handed(module: nn.Module, args: Any, kwargs: Any) -> tuple[torch.Tensor, Shape] | None:
    """What a neuron is handed in a call, and T and N of it; None of what can be no frames."""
    x = next(iter((*args, *kwargs.values())), None)
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        return None
    return x, host.steps_and_batch(module, x.shape)


def sample_of(model: nn.Module, nodes: list[fx.Node]) -> Sample | None:
    """T and N as most neurons see them, and as the model's inputs have them; None where no shape is known.

    Where all neurons are in containers that loop, as these see them: nothing converts there, but layouts tell the reasons.
    """
    given = [shape[:2] for node in nodes if node.op == "placeholder" and (shape := node.meta.get("shape")) is not None]
    seen = _seen(model, nodes, host.steps_by_itself) or _seen(model, nodes, lambda m: bool(host.looped(m)))

    def rank(found: Shape) -> tuple[bool, bool, int, bool]:
        """A neuron that is handed folded frames sees something else; T may also be made in the forward."""
        both = any(found in (first, first[::-1]) for first in given)
        return both, any(first[:1] == found[1:] for first in given), len(seen[found]), found[0] > 1

    return Sample(*max(seen, key=rank)) if seen else None


def _seen(model: nn.Module, nodes: list[fx.Node], shows: Callable[[nn.Module], bool]) -> dict[Shape, set[str]]:
    """What T and N are handed to some modules, and to which: each once, as one that steps by itself is called T times."""
    seen: dict[Shape, set[str]] = {}
    for node in nodes:
        if node.op == "call_module" and shows(model.get_submodule(str(node.target))) and node.all_input_nodes:
            shape = node.all_input_nodes[0].meta.get("shape")
            if shape is not None and len(shape) >= 2:
                found = host.steps_and_batch(model.get_submodule(str(node.target)), shape)
                seen.setdefault(found, set()).add(str(node.target))
    return seen


_REPEATS: set[Any] = {
    *("repeat", "expand", "repeat_interleave", "tile", "expand_as", "broadcast_to"),
    *(torch.repeat_interleave, torch.broadcast_to, torch.tile),
}
_JOINS: set[Any] = {torch.stack, torch.cat, torch.concat, torch.concatenate}


def repeats(node: fx.Node, sample: Sample | None) -> bool:
    """True for one frame T times over: ``x.unsqueeze(0).repeat(T, 1, ...)``, ``expand``, ``stack([x] * T)``."""
    shape: Any = node.meta.get("shape")
    if sample is None or sample.steps == 1 or layout_of(node) is not Layout.TIME:
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
