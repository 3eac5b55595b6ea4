"""Where a tile's drives come from: memory, or frames that are convolved on the way, channels_last or contiguous."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.convolving import convolve
from sj_tac.kernels.cpu.geometry import TILE, in_windows
from sj_tac.kernels.cpu.sliding import slide
from sj_tac.kernels.cpu.steps import lean
from sj_tac.kernels.cpu.tiles import ask_for, load


def bring(source: Any, offset: Any, begin: Any, end: Any, b: Any, at: Any, affine: Any, layout: Any) -> None:
    """The drives of a tile, whether they lie in memory or are to be convolved; uncompiled code only has the former."""
    load(source.y, offset, begin, end, b, at, affine, layout)


@overload(bring, strict=False)
def _bring(source, offset, begin, end, b, at, affine, layout):
    if "y" in source.fields:
        return lambda source, offset, begin, end, b, at, affine, layout: load(
            source.y, offset, begin, end, b, at, affine, layout
        )
    if "apart" in source.fields:
        return lambda source, offset, begin, end, b, at, affine, layout: slide(
            source, offset, begin, end, b, at, affine, layout
        )
    return lambda source, offset, begin, end, b, at, affine, layout: convolve(
        source, offset, begin, end, b, at, affine, layout
    )


def ahead(source: Any, offset: Any, begin: Any, end: Any, layout: Any) -> None:
    """``tiles.ask_for`` of drives that lie in memory."""


@overload(ahead, strict=False)
def _ahead(source, offset, begin, end, layout):
    if "y" in source.fields:
        return lambda source, offset, begin, end, layout: ask_for(source.y, offset, begin, end, layout, False)
    return lambda source, offset, begin, end, layout: None


@lean()
def _place(slot, corner, layout):
    """Where a corner of a window lies in contiguous frames, or a neuron in channels_last ones; -1 where there is none."""
    if not in_windows(layout):
        return slot
    rows, columns = (layout.height + 1) // 2, (layout.width + 1) // 2
    line, column = slot // columns, 2 * (slot % columns) + corner % 2
    row = 2 * (line % rows) + corner // 2
    if row >= layout.height or column >= layout.width:
        return -1
    return (line // rows * layout.height + row) * layout.width + column


@kernel
def differing(begin, end, source, made, layout, found):
    """How many drives of the slots ``begin`` to ``end`` are not those of ``made``, to the last bit: into ``found`` there.

    ``tiles.load`` would find them, too, and take most of the time that this takes to compile.

    Args:
        source: Convolved or Slid; made: [M] int32, the bits of float32, as these lie in memory; layout: Neurons of
            channels_last, or contiguous Windows or OddWindows; found: one int64 a slot.
    """
    b = np.zeros(5 * TILE, np.float32)
    bits, none = b.view(np.int32), (b[:0], b[:0])
    capacity, corners = (TILE, 4) if in_windows(layout) else (4 * TILE, 1)
    for start in range(begin, end, capacity):
        stop = min(start + capacity, end)
        bring(source, 0, start, stop, b, 0, none, layout)
        for corner in range(corners):
            for j in range(stop - start):
                at = _place(start + j, corner, layout)
                if at >= 0:
                    found[start + j] += bits[corner * TILE + j] != made[at]
