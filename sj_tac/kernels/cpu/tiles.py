"""Tiles of a frame for Numba: where their neurons lie in memory, contiguous or channels_last, with or without 2x2 pooling.

A *slot* is what a tile counts: one neuron, or, under a 2x2 MaxPool that tiles the map, the four of one window. Slots are
numbered as the output is laid out, so that a tile of the output is one piece of memory in both layouts. A tile is copied
into a buffer once a drive, the windows' four corners apart, and everything then runs on the buffer: small enough for the
first-level cache, and with all distances known, which is what lets the compiler vectorise.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.arguments import Neurons
from sj_tac.kernels.cpu.halves import narrowed, widened
from sj_tac.kernels.cpu.steps import lean

# Slots of a tile of windows, whose four corners have a piece of the buffer each; a tile of neurons has four times as many.
TILE = 256
_PLAIN = len(Neurons._fields)


@lean()
def in_windows(layout):
    """Whether slots are windows: known from the type, so that a kernel is compiled for the one that is used."""
    return len(layout) > _PLAIN


@lean()
def geometry(layout):
    """How slots lie in memory: in runs of even spacing, runs in lines, lines behind one another.

    Args:
        layout: Neurons or Windows.

    Returns:
        Slots of a run, runs of a line, and in neurons: from line to line, run to run, slot to slot, and from a window's
        first corner to its right and its lower one. Contiguous, a line is a plane; in channels_last, a run is a
        pixel's channels.
    """
    width, channels, pixels, last = layout.width, layout.channels, layout.pixels, layout.last
    if not in_windows(layout):
        run = channels if last else pixels
        return run, 1, run, 0, 1, 0, 0
    if last:
        return channels, width // 2, 2 * width * channels, 2 * channels, 1, channels, width * channels
    return width // 2, pixels // width // 2, pixels, 2 * width, 2, 1, width


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
