"""Tiles of a frame for Numba: where their neurons lie in memory, contiguous or channels_last, with or without 2x2 pooling.

A *slot* is what a tile counts: one neuron, or, under a 2x2 MaxPool, the four of one window. Slots are numbered as the output
is laid out, so that a tile of the output is one piece of memory in both layouts. A tile is copied into a buffer once a
drive, the windows' four corners apart, and everything then runs on the buffer: small enough for the first-level cache, and
with all distances known, which is what lets the compiler vectorise. A map of odd size counts as one that is larger: corners
that it does not have are zeros in the buffer, and windows that it does not fill have no place in the output.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from sj_tac.kernels.cpu.arguments import Neurons, Windows
from sj_tac.kernels.cpu.halves import narrowed, widened
from sj_tac.kernels.cpu.prefetch import LINE, prefetch, prefetch_to_write
from sj_tac.kernels.cpu.steps import lean

# Slots of a tile of windows, whose four corners have a piece of the buffer each; a tile of neurons has four times as many.
TILE = 256
_PLAIN, _EVEN = len(Neurons._fields), len(Windows._fields)


@lean()
def in_windows(layout):
    """Whether slots are windows: known from the type, so that a kernel is compiled for the one that is used."""
    return len(layout) > _PLAIN


@lean()
def is_odd(layout):
    """Whether the map has windows at its edge that it does not fill: known from the type, too."""
    return len(layout) > _EVEN


def of_odd_maps(function):
    """Compile a function whose last argument is a layout, but to nothing for those of even maps, which never call it.

    Numba compiles both sides of a condition even where types decide it: without this, a fourth more for every kernel.
    """
    compiled = lean()(function)

    @overload(function, strict=False)
    def _(*arguments):
        if len(arguments[-1]) > _EVEN:
            return lambda *arguments: compiled(*arguments)
        return lambda *arguments: (0, 0)

    return function


@lean()
def counts(size, layout):
    """Slots of a frame of ``size`` neurons, and how many numbers it puts out."""
    if not in_windows(layout):
        return size, size
    height, width = layout.height, layout.width
    maps = size // (height * width)
    return maps * ((height + 1) // 2) * ((width + 1) // 2), maps * (height // 2) * (width // 2)


@lean()
def geometry(layout):
    """How slots lie in memory: in runs of even spacing, runs in lines, lines behind one another.

    Args:
        layout: Neurons, Windows or OddWindows.

    Returns:
        Slots of a run, runs of a line, and in neurons: from line to line, run to run, slot to slot, and from a window's
        first corner to its right and its lower one. Contiguous, a line is a plane; in channels_last, a run is a
        pixel's channels, and the lines of an odd map are nearer where one sample follows another (see ``_edge``).
    """
    height, width, channels, last = layout.height, layout.width, layout.channels, layout.last
    if not in_windows(layout):
        run = channels if last else height * width
        return run, 1, run, 0, 1, 0, 0
    rows, columns = (height + 1) // 2, (width + 1) // 2
    if last:
        return channels, columns, 2 * width * channels, 2 * channels, 1, channels, width * channels
    return columns, rows, height * width, 2 * width, 2, 1, width


@lean()
def locate(slot, run, runs, channels):
    """Place within its run, run within its line, line, and the line's channel (contiguous), of one slot."""
    unit, at = slot // run, slot % run
    line, i = unit // runs, unit % runs
    return at, i, line, line % channels


@lean()
def following(i, runs, line, channel, channels):
    """Run, line and channel of the next run: counted, because divisions would cost more than what is done with a run."""
    if i + 1 < runs:
        return i + 1, line, channel
    return 0, line + 1, (channel + 1 if channel + 1 < channels else 0)


@lean()
def _edge(place, n, i, line, layout):
    """What is less in ``n`` windows of a run on an odd map than ``geometry`` says.

    Returns:
        Neurons in all samples before (channels_last: a line is a row of windows, and all samples have lines of their own);
        whether there are no lower corners; and whether the last window, in channels_last every one, has no right ones.
    """
    height, width, last = layout.height, layout.width, layout.last
    rows = (height + 1) // 2
    row, column = (line % rows, i) if last else (i, place + n - 1)
    before = line // rows * (2 * rows - height) * width * layout.channels if last else 0
    return before, 2 * row + 1 == height, 2 * column + 1 == width


# Unsigned positions need no check for negative ones, which would keep the loops from being vectorised.
@lean()
def copy(source, start, out, at, n):
    """``n`` numbers that lie side by side, from or to bfloat16 where an array is of that."""
    for j in range(n):
        out[at + j] = narrowed(widened(source[start + j]), out)


@lean()
def _read(source, start, out, at, n, affine, channel, last):
    """Neurons side by side, through the BatchNorm's affine map where there is one."""
    scale, shift = affine
    if scale.size == 0:
        copy(source, start, out, at, n)
    elif last:
        for j in range(n):
            out[at + j] = widened(source[start + j]) * scale[channel + j] + shift[channel + j]
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
    before, no_lower, no_right = _edge(place, n, i, line, layout)
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
    before, no_lower, no_right = _edge(place, n, i, line, layout)
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


@lean()
def load(source, offset, begin, end, out, at, affine, layout):
    """Slots ``begin`` to ``end`` of the frame at ``offset``, into ``out`` from ``at`` on, the corners TILE apart.

    Args:
        affine: scale and shift of a BatchNorm, [C] each, or empty for none.
    """
    last, channels = layout.last, layout.channels
    run, runs, to_line, to_run, to_slot, right, below = geometry(layout)
    place, i, line, channel = locate(begin, run, runs, channels)
    slot = begin
    while slot < end:
        n = min(run - place, end - slot)
        start, z = offset + line * to_line + i * to_run + place * to_slot, at + slot - begin
        m, c = np.uintp(n), np.uintp(place if last else channel)
        if not in_windows(layout):
            _read(source, np.uintp(start), out, np.uintp(z), m, affine, c, last)
        elif is_odd(layout):
            _read_odd(source, start, out, z, (place, n, i, line, channel), affine, layout)
        elif last:
            for corner in range(4):
                p, q = start + corner % 2 * right + corner // 2 * below, z + corner * TILE
                _read(source, np.uintp(p), out, np.uintp(q), m, affine, c, last)
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
    if in_windows(layout) and not last:
        return
    run, runs, to_line, to_run, to_slot, right, below = geometry(layout)
    place, i, line, channel = locate(begin, run, runs, channels)
    step = LINE // source.itemsize
    slot = begin
    while slot < end:
        n = min(run - place, end - slot)
        start = offset + line * to_line + i * to_run + place * to_slot
        if is_odd(layout):
            start -= _edge(place, n, i, line, layout)[0]
        for corner in range(4 if in_windows(layout) else 1):
            first = start + corner % 2 * right + corner // 2 * below
            for j in range(0, n, step):
                if writes:
                    prefetch_to_write(source, first + j)
                else:
                    prefetch(source, first + j)
        slot, place = slot + n, 0
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
def store(source, at, out, offset, begin, end, layout):
    """The way back of ``load``, without affine map."""
    last, channels = layout.last, layout.channels
    run, runs, to_line, to_run, to_slot, right, below = geometry(layout)
    place, i, line, channel = locate(begin, run, runs, channels)
    slot = begin
    while slot < end:
        n = min(run - place, end - slot)
        start, z, m = offset + line * to_line + i * to_run + place * to_slot, at + slot - begin, np.uintp(n)
        if not in_windows(layout):
            copy(source, np.uintp(z), out, np.uintp(start), m)
        elif is_odd(layout):
            _write_odd(source, z, out, start, (place, n, i, line, channel), layout)
        elif last:
            for corner in range(4):
                p, q = start + corner % 2 * right + corner // 2 * below, z + corner * TILE
                copy(source, np.uintp(q), out, np.uintp(p), m)
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
        _, no_lower, no_right = _edge(place, n, i, line, layout)
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
