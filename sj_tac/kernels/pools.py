"""What the kernels of ``fire`` call their pools, and how large a map is behind one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

# What the operator's argument ``pool`` says.
NO_POOL, MAX_POOL, AVG_POOL = range(3)


def number(pool: nn.Module | None) -> int:
    """A pool's number; of a MaxPool2d, an AvgPool2d or None."""
    if pool is None:
        return NO_POOL
    return MAX_POOL if isinstance(pool, nn.MaxPool2d) else AVG_POOL


def pooled_size(height: int, width: int, pool: int, window: Sequence[int]) -> tuple[int, int]:
    """Height and width behind the pool; window is (kh, kw, sh, sw, ph, pw)."""
    if not pool:
        return height, width
    kh, kw, sh, sw, ph, pw = window
    return (height + 2 * ph - kh) // sh + 1, (width + 2 * pw - kw) // sw + 1
