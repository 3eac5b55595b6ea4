"""What the torch operators ``sj_tac::fire`` and ``sj_tac::fire_backward`` are called with, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """The arguments of ``sj_tac::fire``, in the order of its schema; ``fire_op.fire_now`` says what they mean."""

    y: Tensor
    residual: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    v0: Tensor | None
    linear: Tensor | None
    q: Tensor | None
    weights: Tensor | None
    lengths: Sequence[int]
    mode: int
    tau: float
    decay: float
    gain: float
    rest: float
    threshold: float
    hard: bool
    detach: bool
    surrogate: int
    alpha: float
    pool: int
    window: Sequence[int]
    group: int
    launcher: str = ""

    @property
    def steps(self) -> int:
        """T: steps in all."""
        return sum(self.lengths) if len(self.lengths) else self.y.shape[0]

    def counted(self) -> Operands:
        """The same with the steps on each drive written out."""
        return self if len(self.lengths) else self._replace(lengths=[1] * self.y.shape[0])
