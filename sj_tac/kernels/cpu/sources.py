"""Where a tile's drives come from: memory, or frames that are convolved on the way, channels_last or contiguous."""

from __future__ import annotations

from typing import Any

import numpy as np

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.convolving import convolve
from sj_tac.kernels.cpu.geometry import TILE, following, geometry, in_windows, is_odd, together
from sj_tac.kernels.cpu.linked import by_type, lean
from sj_tac.kernels.cpu.registers import LANES
from sj_tac.kernels.cpu.sliding import slide
from sj_tac.kernels.cpu.stepping import stepped
from sj_tac.kernels.cpu.tiles import ask_for, load


def bring(source: Any, offset: Any, begin: Any, end: Any, b: Any, at: Any, affine: Any, layout: Any) -> None:
    """The drives of a tile, whether they lie in memory or are to be convolved; uncompiled code only has the former."""
    load(source.y, offset, begin, end, b, at, affine, layout)


@by_type(bring)
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


@by_type(ahead)
def _ahead(source, offset, begin, end, layout):
    if "y" in source.fields:
        return lambda source, offset, begin, end, layout: ask_for(source.y, offset, begin, end, layout, False)
    return lambda source, offset, begin, end, layout: None


def is_direct(source: Any, layout: Any) -> bool:
    """Whether steps read drives where these lie, not in the buffer; uncompiled code has all of them in the buffer."""
    return False


@by_type(is_direct)
def _is_direct(source, layout):
    if "y" not in source.fields:
        return lambda source, layout: False
    return lambda source, layout: _lies_well(source.residual, layout)


@lean()
def _lies_well(residual, layout):
    """Not with something to add to each step, on odd maps, nor where one register would be filled from several places."""
    if residual.size or is_odd(layout):
        return False
    return not in_windows(layout) or (layout.last and layout.channels >= LANES)


def step_there(source: Any, drive: Any, tile: Any, b: Any, affine: Any, to: Any, span: Any, of: Any) -> None:
    """The steps of a tile on a drive, from where it lies in memory, where ``is_direct``.

    Args:
        drive: where it begins, and in numbers how far behind it that is which will be read next.
        tile: its first slot and the one behind its last, and where the first lies, as ``locate`` has it.
        affine: as ``for_registers`` gives it. to: the output, where the first slot's number goes in it, and how far behind
            that is which will be written next, or 0.
        span: as for ``stepped``; of: neuron and layout.
    """


@by_type(step_there)
def _step_there(source, drive, tile, b, affine, to, span, of):
    if "y" not in source.fields:
        return lambda source, drive, tile, b, affine, to, span, of: None
    return lambda source, drive, tile, b, affine, to, span, of: _steps_there(source.y, drive, tile, b, affine, to, span, of)


@lean(forceinline=True)
def _steps_there(y, drive, tile, b, affine, to, span, of):
    (offset, next_one), (out, put, next_put), (_, layout) = drive, to, of
    (scale, shift), channels = affine, layout.channels
    begin, end, (place, i, line, channel) = tile
    run, runs, to_line, to_run, to_slot, right, below = geometry(layout)
    # Neurons lie side by side throughout a tile, but a map's have a scale of their own in contiguous memory.
    side_by_side = not in_windows(layout) and (layout.last or scale.size == 0)
    slot = begin
    while slot < end:
        n, many, at, start = min(run - place, end - slot), 1, slot - begin, offset + slot
        by = scale, shift, channel * LANES, 0
        if side_by_side:
            n, by = end - begin, (scale, shift, begin % channels, 1)
        elif in_windows(layout):
            many, start = together(place, i, n, end - slot, layout), offset + line * to_line + i * to_run + place * to_slot
            by = scale, shift, place, 1
        read = y, start, right, below, n, many, to_run, next_one
        stepped(b, (at, put + at, next_put), read, by, out, span, of)
        i += many - 1
        slot, place = slot + many * n, 0
        i, line, channel = following(i, runs, line, channel, channels)


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
