"""Steps on drives where they lie in memory, without a buffer, for Numba."""

from __future__ import annotations

from typing import Any

from sj_tac.kernels.cpu.geometry import following, geometry, in_windows, is_odd, together
from sj_tac.kernels.cpu.linked import by_type, lean
from sj_tac.kernels.cpu.registers import LANES
from sj_tac.kernels.cpu.stepping import stepped


def is_direct(residual: Any, layout: Any) -> bool:
    """Whether steps read drives where these lie, not in the buffer; uncompiled code has all of them in the buffer."""
    return False


@by_type(is_direct)
def _is_direct(residual, layout):
    return lambda residual, layout: _lies_well(residual, layout)


@lean()
def _lies_well(residual, layout):
    """Not with something to add to each step, on odd maps, nor where one register would be filled from several places."""
    if residual.size or is_odd(layout):
        return False
    return not in_windows(layout) or (layout.last and layout.channels >= LANES)


@lean(forceinline=True)
def step_there(y, drive, tile, b, affine, to, span, of):
    """The steps of a tile on a drive, from where it lies in memory, where ``is_direct``.

    Args:
        drive: where it begins, and in numbers how far behind it that is which will be read next.
        tile: its first slot and the one behind its last, and where the first lies, as ``locate`` has it.
        affine: as ``for_registers`` gives it. to: the output, where the first slot's number goes in it, and how far behind
            that is which will be written next, or 0.
        span: as for ``stepped``; of: neuron and layout.
    """
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
