"""What a search is asked for, and which of two candidates is nearer to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sj_tac.tuning.evidence import Trial, simplicity


@dataclass(frozen=True)
class Goal:
    """What is asked for: the least metric, and, where a speed is wanted instead, that."""

    floor: float
    speedup: float | None
    words: str

    def fits(self, trial: Trial) -> bool:
        return trial.metric >= self.floor - 1e-9 if self.speedup is None else trial.speedup >= self.speedup

    def better(self, new: Trial, old: Trial) -> bool:
        if not self.fits(new):
            return False
        return new.work < old.work if self.speedup is None else new.metric > old.metric

    def rank(self, trial: Trial) -> tuple[Any, ...]:
        """Ascending, the best first; without measured times."""
        first = (trial.work, -trial.metric) if self.speedup is None else (-trial.metric, trial.work)
        return (*first, *simplicity(trial))
