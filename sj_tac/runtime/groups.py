"""Which frames of a value are one: what a compact frame stands for, and what a convolution wants summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sj_tac.kernels import reference
from sj_tac.kernels.weights import group_lengths


class Groups(NamedTuple):
    """What each compact frame of a value stands for: ``steps[g]`` steps of a neuron, ``frames[g]`` frames of the value.

    The two differ behind a binary collapse alone, where one step stands for ``per_step`` frames, the last for what is left.
    ``whole`` is the steps that a collapse makes one of, 0 where none did: a short call's only group may have fewer.
    """

    steps: tuple[int, ...]
    frames: tuple[int, ...]
    per_step: int = 1
    whole: int = 0

    @property
    def first(self) -> int:
        """Steps of a group that is no tail."""
        return self.whole or self.steps[0]

    @property
    def total(self) -> int:
        """T: frames of the value."""
        return sum(self.frames)

    def joined(self, size: int) -> Groups:
        """Every ``size`` compact frames as one."""
        cuts = range(0, len(self.steps), size)
        steps = tuple(sum(self.steps[i : i + size]) for i in cuts)
        frames = steps if self.frames is self.steps else tuple(sum(self.frames[i : i + size]) for i in cuts)
        return Groups(steps, frames, self.per_step, self.whole * size)

    def merged(self) -> Groups:
        """One step on every compact frame, whatever it stood for."""
        return Groups((1,) * len(self.frames), self.frames, self.first * self.per_step)

    def split(self, finer: Groups) -> tuple[int, ...] | None:
        """How many frames of ``finer`` each compact frame stands for; None where one of those would be cut."""
        counts, at = [], 0
        for length in self.steps:
            begin = at
            while length > 0 and at < len(finer.steps):
                length -= finer.steps[at]
                at += 1
            if length != 0:
                return None
            counts.append(at - begin)
        alike = at == len(finer.steps) and (self.total, self.per_step) == (finer.total, finer.per_step)
        return tuple(counts) if alike else None

    def stepwise(self) -> Groups:
        """A compact frame for every step."""
        if self.frames is self.steps:
            return single(sum(self.steps))
        return Groups((1,) * sum(self.steps), tuple(group_lengths(self.total, self.per_step)), self.per_step)


@lru_cache(maxsize=256)
def single(steps: int) -> Groups:
    """Ordinary frames: each stands for itself."""
    ones = (1,) * steps
    return Groups(ones, ones)


def even(steps: int, size: int) -> Groups:
    """``steps`` frames in groups of ``size``, the last one of what is left."""
    lengths = tuple(group_lengths(steps, size))
    return Groups(lengths, lengths)


@dataclass(eq=False, slots=True)
class Sums:
    """What a convolution wants of the frames in front of it: one weighted sum for every ``size`` of them.

    Two convolutions that want the same of the same frames have equal ones, whichever objects they are.

    Attributes:
        of: the groups of the frames that are summed; groups: those of the sums.
        rows: the weights of each group's frames; key: what they are equal by, where they hang on a parameter.
        flat: one weight for each frame, a tensor.
    """

    of: Groups
    groups: Groups
    size: int
    rows: list[Sequence[float | Tensor]]
    flat: Tensor
    key: tuple[object, ...]
    _hash: int = field(default=0, init=False)

    def __hash__(self) -> int:
        # Kept, as every call asks for it; not before it is asked for: a compiled call never does, and torch.compile of
        # torch 2.11 cannot trace the hash of a tuple.
        if self._hash == 0:
            self._hash = hash(self.key)
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Sums) and self.key == other.key)

    @property
    def sums_nothing(self) -> bool:
        """True where every group is one frame, as it is."""
        return len(self.groups.steps) == len(self.of.steps)

    def weights(self) -> tuple[Sequence[float | Tensor], Sequence[float | Tensor]]:
        """The weights of a whole group, and of the last one where it is another."""
        first, last = self.rows[0], self.rows[-1]
        return first, () if len(self.rows) == 1 or self._is_whole(last) else last

    def _is_whole(self, last: Sequence[float | Tensor]) -> bool:
        return len(last) == len(self.rows[0]) and self.groups.steps[-1] == self.groups.steps[0]


def sums(
    of: Groups, size: int, rows: list[Sequence[float | Tensor]], like: tuple[torch.dtype, torch.device], tag: object
) -> Sums:
    """``Sums`` of ``size`` frames each with the weights ``rows``.

    Args:
        like: the accumulation dtype and the device of the weights' tensor.
        tag: what tells weights apart that are no numbers.
    """
    dtype, device = like
    flat = [w for row in rows for w in row]
    if any(isinstance(w, Tensor) for w in flat):
        made = torch.stack([reference.tensor_of(w, dtype, device) for w in flat])
        key: tuple[object, ...] = (of, size, tag)
    else:
        made = reference.constant([float(w) for w in flat], dtype, device)
        key = (of, size, tuple(flat))
    return Sums(of, of.joined(size), size, rows, made, key)
