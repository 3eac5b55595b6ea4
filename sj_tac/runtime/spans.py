"""How many steps a frame stands for, at each place in a net whose time was collapsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sj_tac.kernels.weights import group_lengths


@dataclass(frozen=True)
class Span:
    """What one frame stands for, as against a frame of the model's input.

    A count collapse by K makes a frame that neurons behind it must run K inner steps on (``stretch``); a binary collapse
    makes a frame that is one step from there on (``merged`` source frames each). Both nest, and since
    ``ceil(ceil(T/a)/b) == ceil(T/ab)`` the frames of any T follow from the two numbers alone.
    """

    merged: int = 1
    stretch: int = 1

    @property
    def factor(self) -> int:
        """Source frames per frame."""
        return self.merged * self.stretch

    @property
    def is_plain(self) -> bool:
        """True where a frame is a frame of the input."""
        return self.factor == 1

    def lengths(self, steps: int) -> list[int]:
        """Source frames that each frame stands for, for ``steps`` source frames in all."""
        return group_lengths(steps, self.factor)

    def inner_steps(self, steps: int) -> list[int]:
        """Steps that a neuron takes on each frame, for ``steps`` source frames in all."""
        return group_lengths(-(-steps // self.merged), self.stretch)

    def unstretched(self) -> Span:
        """The span of this span's inner steps."""
        return Span(self.merged, 1)

    def collapsed(self, k: int, spikes: str) -> Span:
        """The span behind a collapse that makes one frame of ``k`` steps of this span (``k`` >= ``stretch``)."""
        return Span(self.merged, k) if spikes == "count" else Span(self.merged * k, 1)


PLAIN = Span()


class Timeline:
    """What the swapped modules of one net share during a call.

    Frames may stand for several steps only inside the call of the module that was converted (``grouped``), because only
    there does somebody turn them back; ``steps`` is T of the running call. A module called from outside hands out frames
    at the rate it was given.
    """

    def __init__(self) -> None:
        self.grouped = False
        self.steps: int | None = None
        # Where values may travel as sums: decided anew in each call.
        self.junctions: list[Any] = []

    def start(self) -> None:
        self.grouped, self.steps = True, None
        for junction in self.junctions:
            junction.start()

    def stop(self) -> None:
        self.grouped, self.steps = False, None
