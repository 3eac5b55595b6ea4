"""What the kernels of ``fire`` call their pools, and how large a map is behind one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from sj_tac.kernels.layout import is_channels_last

# What the operator's argument ``pool`` says.
NO_POOL, MAX_POOL, AVG_POOL = range(3)
# For those who read messages.


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


def overlap(pool: int, window: Sequence[int]) -> bool:
    """Whether this is MaxPool of 3x3 windows at stride 2, padded by 1, for which there are kernels of their own."""
    return pool == MAX_POOL and tuple(window) == (3, 3, 2, 2, 1, 1)


def in_tiles(pool: int, window: Sequence[int]) -> bool:
    """Whether kernels of both memory formats run this: no pool, MaxPool of 2x2 windows side by side, or ``overlap``."""
    return not pool or (pool == MAX_POOL and tuple(window) == (2, 2, 2, 2, 0, 0)) or overlap(pool, window)


def in_registers(y: Tensor, pool: int, window: Sequence[int], residual: Tensor | None) -> bool:
    """Whether the CPU's forward steps in registers: as ``in_tiles``, but ``overlap`` without residual, in channels_last."""
    return in_tiles(pool, window) and (not overlap(pool, window) or (residual is None and is_channels_last(y)))
