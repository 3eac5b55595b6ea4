"""Do the frames of a sample carry order? A permutation test of neighbouring frames, in memory that does not grow.

The statistic is the mean squared distance between neighbouring frames over that between any two frames of the sample: the
ratio of von Neumann ("Distribution of the ratio of the mean square successive difference to the variance", Annals of
Mathematical Statistics 12, 1941), for vectors. Frames that may be exchanged give 1 on average, whatever their distribution.
"""

from __future__ import annotations

import copy
import math
from statistics import NormalDist
from typing import Any

import numpy as np
from torch import Tensor

# Bytes of frames, and of re-ordered distances, that are worked on at a time.
CHUNK = 1 << 25
# Sums of the same distances in another order differ in their last bits.
TIE = 1e-9


class Ordering:
    """Ratios of all samples seen so far, beside the ratios of the same samples with their frames re-ordered.

    One re-ordering of everything gives one mean ratio, so the means of ``permutations`` of them are all that is kept. The
    re-orderings follow from the seed and the samples' order alone, not from how samples are divided into batches.

    Attributes:
        samples, constant: how many were seen; of those, how many whose frames are all alike (their ratio counts as 1).
        ordered: samples whose own two-sided p-value is below ``level``.
    """

    def __init__(self, permutations: int, level: float, seed: int) -> None:
        self.permutations, self.level = permutations, level
        self.rng = np.random.default_rng(seed)
        self.samples = self.constant = self.ordered = 0
        self.mean = self.squares = 0.0
        self.shuffled = np.zeros(permutations)
        self.lags: Any = 0.0  # after the first samples an array [T - 1]

    def copy(self) -> Ordering:
        """The same, which goes on by itself."""
        return copy.deepcopy(self)

    def add(self, frames: Tensor) -> None:
        """Samples [T, N, ...]."""
        steps, samples = frames.shape[:2]
        flat = frames.detach().reshape(steps, samples, -1)
        each = max(1, min(CHUNK // (8 * steps * max(1, flat.shape[2])), CHUNK // (16 * steps * self.permutations)))
        for start in range(0, samples, each):
            self._add(_distances(flat[:, start : start + each]))

    def _add(self, distances: np.ndarray) -> None:
        """Squared distances [n, T, T] between the frames of n samples."""
        count, steps, _ = distances.shape
        everyone = distances.sum((1, 2)) / (steps * (steps - 1))
        constant = everyone <= 0
        scaled = distances / np.where(constant, 1, everyone)[:, None, None]
        scaled[constant] = 1.0
        ratio = np.diagonal(scaled, 1, 1, 2).mean(1)
        order = self.rng.random((count, self.permutations, steps)).argsort(-1)
        rows = np.arange(count)[:, None, None]
        shuffled = scaled[rows, order[..., :-1], order[..., 1:]].mean(-1)
        beyond = np.abs(shuffled - 1) >= np.abs(ratio - 1)[:, None] - TIE
        self.ordered += int(((1 + beyond.sum(1)) / (1 + self.permutations) < self.level).sum())
        self.constant += int(constant.sum())
        self.shuffled += shuffled.sum(0)
        lags = np.array([np.diagonal(scaled, lag, 1, 2).mean(1).sum() for lag in range(1, steps)])
        self.lags = self.lags + lags
        for value in ratio:  # Welford
            self.samples += 1
            step = value - self.mean
            self.mean += step / self.samples
            self.squares += step * (value - self.mean)

    @property
    def p_value(self) -> float:
        """Two-sided: how often re-ordered frames give a mean ratio as far from 1. Exact at any number of samples."""
        beyond = np.abs(self.shuffled / self.samples - 1) >= abs(self.mean - 1) - TIE
        return float((1 + beyond.sum()) / (1 + self.permutations))

    @property
    def resolution(self) -> float:
        """Half the confidence interval of the effect at ``level``, by chance or, if that is more, by how samples differ."""
        chance = float(np.quantile(np.abs(self.shuffled / self.samples - 1), 1 - self.level))
        if self.samples < 2:
            return chance
        spread = math.sqrt(self.squares / (self.samples - 1) / self.samples)
        return max(chance, NormalDist().inv_cdf(1 - self.level / 2) * spread)

    def ratios(self) -> list[float]:
        """Mean squared distance at each lag 1 .. T-1, over that of any two frames."""
        return [float(value) for value in self.lags / max(1, self.samples)]

    def kept(self, k: int) -> float:
        """How much of what changes in order is left when groups of ``k`` frames are averaged: 1 at k = 1.

        What two frames at a lag have in common is 1 minus their ratio; noise that is each frame's own has no part in it. The
        mean over all pairs of a group, against what neighbours share. 0 where neighbours share nothing.
        """
        common = [max(0.0, 1 - ratio) for ratio in self.ratios()]
        if not common or common[0] <= 0:
            return 0.0
        pairs = [(k - lag) * common[lag - 1] for lag in range(1, min(k, len(common) + 1))]
        return min(1.0, (k * common[0] + 2 * sum(pairs)) / (k * k * common[0]))


def _distances(frames: Tensor) -> np.ndarray:
    """Squared distances [n, T, T] between frames [T, n, D], in float64."""
    x = frames.double().transpose(0, 1)
    # About the mean, so that differences of large products do not lose digits.
    x = x - x.mean(1, keepdim=True)
    products = x @ x.transpose(1, 2)
    norms = products.diagonal(dim1=1, dim2=2)
    found: np.ndarray = (norms[:, :, None] + norms[:, None, :] - 2 * products).clamp(min=0).cpu().numpy()
    # Rounding leaves equal frames a little apart.
    scale = norms.amax(1).cpu().numpy()
    found[found <= 1e-12 * scale[:, None, None]] = 0
    found[:, np.arange(found.shape[1]), np.arange(found.shape[1])] = 0
    return found
