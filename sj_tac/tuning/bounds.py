"""What a number of samples can say of a share: exact bounds of binomial shares, and of the difference of paired ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def by_chance(right: int, count: int, share: float) -> float:
    """The chance that guessing, right in this ``share`` of cases, is right as often or more often."""
    from scipy import stats  # it takes a second to import

    return float(stats.binomtest(right, count, share, alternative="greater").pvalue)


class Drop(NamedTuple):
    """How much fewer samples are right after than before, as a share of all.

    ``least`` and ``most`` hold at 1 - level each.
    """

    seen: float
    least: float
    most: float


def drop(before: Tensor, after: Tensor, level: float = 0.05) -> Drop:
    """The drop from ``before`` to ``after``, booleans [N] of the same samples. Exact, and rather too wide than too narrow.

    It is the share of samples that are right before alone, less that of those that are right after alone; each has its own
    bound at ``level / 2``.
    """
    from scipy import stats

    count = len(before)
    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    # Clopper and Pearson, 1934: each side is missed with level / 2.
    gone, come = (stats.binomtest(n, count).proportion_ci(1 - level, "exact") for n in (lost, won))
    return Drop((lost - won) / count, float(gone.low - come.high), float(gone.high - come.low))


def needed(budget: float, level: float = 0.05) -> int:
    """Samples that it takes at least to show that a drop is within the budget: as many as would do if none were lost."""
    return math.ceil(math.log(level / 2) / math.log1p(-budget)) if 0 < budget < 1 else 0


def chance(labels: Tensor) -> float:
    """How often the best guess is right that does not look: always the commonest label."""
    return float(torch.bincount(labels).max()) / len(labels)
