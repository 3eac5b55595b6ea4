"""Tiles of a frame for Numba: what lies in memory as geometry.py says, and comes into a buffer and back.

A tile is copied into a buffer once a drive, the windows' four corners apart, and everything then runs on the buffer: small
enough for the first-level cache, and with all distances known, which is what lets the compiler vectorise.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.geometry import TILE, edge, following, geometry, in_windows, is_odd, locate, of_odd_maps, together
from sj_tac.kernels.cpu.halves import narrowed, widened
from sj_tac.kernels.cpu.linked import lean, making
from sj_tac.kernels.cpu.prefetch import LINE, prefetch, prefetch_to_write
from sj_tac.kernels.cpu.registers import LANES, move, move_mapped, stream
from sj_tac.kernels.cpu.steps import FIRST


# Unsigned positions need no check for negative ones, which would keep the loops from being vectorised.
@lean()
def copy(source, start, out, at, n):
    """``n`` numbers that lie side by side, from or to bfloat16 where an array is of that."""
    move(source, start, out, at, (source, source), FIRST, (n, 1, 0, 0))


@lean()
def _read_runs(source, start, out, at, affine, channel, runs):
    """Runs of neurons in channels_last, as ``registers.move`` takes them, through the map where there is one."""
    if affine[0].size == 0:
        move(source, start, out, at, affine, channel, runs)
    else:
        move_mapped(source, start, out, at, affine, channel, runs)


@lean()
def _read(source, start, out, at, n, affine, channel, last):
    """Neurons side by side, through the BatchNorm's affine map where there is one."""
    scale, shift = affine
    if scale.size == 0 or last:
        _read_runs(source, start, out, at, affine, channel, (n, 1, 0, 0))
    else:
        factor, offset = scale[channel], shift[channel]
        for j in range(n):
            out[at + j] = widened(source[start + j]) * factor + offset


@lean()
def _read_pairs(source, start, out, at, right, n, affine, channel):
    """A row of windows, contiguous: left and right corners alternate."""
    scale, shift = affine
    if scale.size == 0:
        for j in range(n):
            out[at + j] = widened(source[start + j + j])
            out[right + j] = widened(source[start + j + j + np.uintp(1)])
    else:
        factor, offset = scale[channel], shift[channel]
        for j in range(n):
            out[at + j] = widened(source[start + j + j]) * factor + offset
            out[right + j] = widened(source[start + j + j + np.uintp(1)]) * factor + offset


@lean()
def _write_pairs(source, at, right, out, start, n):
    for j in range(n):
        out[start + j + j] = narrowed(source[at + j], out)
        out[start + j + j + np.uintp(1)] = narrowed(source[right + j], out)


@lean()
def _clear(out, at, n):
    for j in range(n):
        out[at + j] = 0


@of_odd_maps
def _read_odd(source, start, out, at, run, affine, layout):
    """Part of a run of an odd map, given as place, number, run, line and channel; corners that are not there are zeros."""
    place, n, i, line, channel = run
    last = layout.last
    _, _, _, _, _, right, below = geometry(layout)
    before, no_lower, no_right = edge(place, n, i, line, layout)
    start, m, c = start - before, np.uintp(n), np.uintp(place if last else channel)
    for row in range(2):
        p, q = np.uintp(start + row * below), np.uintp(at + 2 * row * TILE)
        beside = q + np.uintp(TILE)
        if row and no_lower:
            _clear(out, q, m)
            _clear(out, beside, m)
        elif last:
            _read(source, p, out, q, m, affine, c, last)
            if no_right:
                _clear(out, beside, m)
            else:
                _read(source, p + np.uintp(right), out, beside, m, affine, c, last)
        elif no_right:
            whole = np.uintp(n - 1)
            _read_pairs(source, p, out, q, beside, whole, affine, c)
            scale, shift = affine
            x = widened(source[p + whole + whole])
            out[q + whole] = x * scale[c] + shift[c] if scale.size else x
            out[beside + whole] = 0
        else:
            _read_pairs(source, p, out, q, beside, m, affine, c)


@of_odd_maps
def _write_odd(source, at, out, start, run, layout):
    """The way back of ``_read_odd``."""
    place, n, i, line, _ = run
    _, _, _, _, _, right, below = geometry(layout)
    before, no_lower, no_right = edge(place, n, i, line, layout)
    m = np.uintp(n)
    for row in range(1 if no_lower else 2):
        p, q = np.uintp(start - before + row * below), np.uintp(at + 2 * row * TILE)
        beside = q + np.uintp(TILE)
        if layout.last:
            copy(source, q, out, p, m)
            if not no_right:
                copy(source, beside, out, p + np.uintp(right), m)
        elif no_right:
            whole = np.uintp(n - 1)
            _write_pairs(source, q, beside, out, p, whole)
            out[p + whole + whole] = narrowed(source[q + whole], out)
        else:
            _write_pairs(source, q, beside, out, p, m)


@making()
def repeated(numbers, layout):
    """Scale or shift of a BatchNorm as ``load`` takes it: in channels_last once more for all neurons of a tile."""
    if in_windows(layout) or not layout.last or numbers.size == 0:
        return numbers
    made, channel = np.empty(layout.channels + 4 * TILE, numbers.dtype), 0
    for i in range(made.size):
        made[i] = numbers[channel]
        channel = channel + 1 if channel + 1 < layout.channels else 0
    return made


@making()
def for_registers(numbers, repeats, layout):
    """Scale or shift as ``stepping.stepped`` takes them: ``repeated``, or each channel's once for every lane."""
    if in_windows(layout) or layout.last:
        return repeats
    made = np.empty(LANES * numbers.size, numbers.dtype)
    for i in range(made.size):
        made[i] = numbers[i // LANES]
    return made


@lean()
def _load_neurons(source, offset, begin, end, out, at, affine, layout):
    """``load`` of slots that are neurons, which lie side by side."""
    scale, _ = affine
    last, channels = layout.last, layout.channels
    run = layout.height * layout.width
    if last or scale.size == 0:
        whole, first = np.uintp(end - begin), np.uintp(begin % channels)
        _read(source, np.uintp(offset + begin), out, np.uintp(at), whole, affine, first, True)
        return
    place, channel, slot = begin % run, begin // run % channels, begin
    while slot < end:
        n = min(run - place, end - slot)
        to, m = np.uintp(at + slot - begin), np.uintp(n)
        _read(source, np.uintp(offset + slot), out, to, m, affine, np.uintp(channel), False)
        slot, place = slot + n, 0
        channel = channel + 1 if channel + 1 < channels else 0


@lean()
def load(source, offset, begin, end, out, at, affine, layout):
    """Slots ``begin`` to ``end`` of the frame at ``offset``, into ``out`` from ``at`` on, the corners TILE apart.

    Args:
        affine: scale and shift of a BatchNorm, [C] each and ``repeated``, or empty for none.
    """
    if not in_windows(layout):
        _load_neurons(source, offset, begin, end, out, at, affine, layout)
        return
    last, channels = layout.last, layout.channels
    run, runs, to_line, to_run, to_slot, right, below = geometry(layout)
    place, i, line, channel = locate(begin, run, runs, channels)
    slot = begin
    while slot < end:
        n = min(run - place, end - slot)
        start, z = offset + line * to_line + i * to_run + place * to_slot, at + slot - begin
        m, c = np.uintp(n), np.uintp(place if last else channel)
        if is_odd(layout):
            _read_odd(source, start, out, z, (place, n, i, line, channel), affine, layout)
        elif last:
            many = together(place, i, n, end - slot, layout)
            for corner in range(4):
                p, q = start + corner % 2 * right + corner // 2 * below, z + corner * TILE
                _read_runs(source, p, out, q, affine, c, (n, many, to_run, n))
            i += many - 1
            slot += (many - 1) * n
        else:
            for row in range(2):
                p, q = start + row * below, z + 2 * row * TILE
                _read_pairs(source, np.uintp(p), out, np.uintp(q), np.uintp(q + TILE), m, affine, c)
        slot, place = slot + n, 0
        i, line, channel = following(i, runs, line, channel, channels)


@lean()
def ask_for(source, offset, begin, end, layout, writes):
    """Have memory bring what ``load`` of the same will read, or ``store`` write, where processors do not see it coming.

    They do along the rows of a map: windows, contiguous.
    """
    last, channels = layout.last, layout.channels
    if not in_windows(layout):
        ask_for_output(source, offset + begin, end - begin, writes)
        return
    if not last:
        return
    run, runs, to_line, to_run, to_slot, right, below = geometry(layout)
    place, i, line, channel = locate(begin, run, runs, channels)
    step = LINE // source.itemsize
    slot = begin
    while slot < end:
        n = min(run - place, end - slot)
        start = offset + line * to_line + i * to_run + place * to_slot
        if is_odd(layout):
            start -= edge(place, n, i, line, layout)[0]
        many = together(place, i, n, end - slot, layout)
        # A run's right corners lie between its left ones and those of the next.
        for corner in range(4 if many == 1 else 2):
            first = start + (corner % 2 * right + corner // 2 * below if many == 1 else corner * below)
            for j in range(0, n if many == 1 else many * to_run, step):
                if writes:
                    prefetch_to_write(source, first + j)
                else:
                    prefetch(source, first + j)
        i += many - 1
        slot, place = slot + many * n, 0
        i, line, channel = following(i, runs, line, channel, channels)


@lean()
def ask_for_output(out, start, n, writes):
    """Have memory bring ``n`` numbers of the output, or of its gradient, which lie side by side."""
    for j in range(0, n, LINE // out.itemsize):
        if writes:
            prefetch_to_write(out, start + j)
        else:
            prefetch(out, start + j)


@lean()
def _put(source, at, out, start, runs, streams):
    """Runs of numbers, as ``registers.move`` takes them, streamed past the caches or not."""
    if streams:
        stream(source, at, out, start, (source, source), FIRST, runs)
    else:
        move(source, at, out, start, (source, source), FIRST, runs)


@lean()
def store(source, at, out, offset, begin, end, layout, streams):
    """The way back of ``load``, without affine map.

    ``streams``: past the caches, but for windows of odd maps and contiguous ones; ``registers.settle`` must follow.
    """
    if not in_windows(layout):
        _put(source, np.uintp(at), out, np.uintp(offset + begin), (np.uintp(end - begin), 1, 0, 0), streams)
        return
    last, channels = layout.last, layout.channels
    run, runs, to_line, to_run, to_slot, right, below = geometry(layout)
    place, i, line, channel = locate(begin, run, runs, channels)
    slot = begin
    while slot < end:
        n = min(run - place, end - slot)
        start, z, m = offset + line * to_line + i * to_run + place * to_slot, at + slot - begin, np.uintp(n)
        if is_odd(layout):
            _write_odd(source, z, out, start, (place, n, i, line, channel), layout)
        elif last:
            many = together(place, i, n, end - slot, layout)
            for corner in range(4):
                p, q = start + corner % 2 * right + corner // 2 * below, z + corner * TILE
                _put(source, q, out, p, (n, many, n, to_run), streams)
            i += many - 1
            slot += (many - 1) * n
        else:
            for row in range(2):
                p, q = start + row * below, z + 2 * row * TILE
                _write_pairs(source, np.uintp(q), np.uintp(q + TILE), out, np.uintp(p), m)
        slot, place = slot + n, 0
        i, line, channel = following(i, runs, line, channel, channels)


@of_odd_maps
def put_out(begin, end, slots, layout):
    """Which of the slots ``begin`` to ``end`` of an odd map put something out, numbered from ``begin``, into ``slots``.

    Returns:
        How many they are, and where the first one's number lies in a frame of the output, the others' behind it.
    """
    run, runs, _, _, _, _, _ = geometry(layout)
    rows, height, width = (layout.height + 1) // 2, layout.height // 2, layout.width // 2
    place, i, line, channel = locate(begin, run, runs, layout.channels)
    slot, count, first = begin, 0, 0
    while slot < end:
        n = min(run - place, end - slot)
        _, no_lower, no_right = edge(place, n, i, line, layout)
        if layout.last:
            whole = 0 if no_lower or no_right else n
            start = ((line // rows * height + line % rows) * width + i) * run + place
        else:
            whole = 0 if no_lower else n - (1 if no_right else 0)
            start = (line * height + i) * width + place
        if whole and not count:
            first = start
        for j in range(whole):
            slots[count + j] = slot - begin + j
        slot, place, count = slot + n, 0, count + whole
        i, line, channel = following(i, runs, line, channel, layout.channels)
    return count, first
