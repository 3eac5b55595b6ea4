"""Sheets of a frame for Numba: where neurons lie in memory, cut into cells of 2x2, for MaxPool of 3x3 windows at stride 2.

A *sheet* is a plane of a sample (contiguous), or some channels of a sample (channels_last). It is copied into a buffer
once a drive, with the four corners of its cells apart: even rows' even columns, even rows' odd columns, then the odd rows.
Window (o, q), padded by 1, then is cell (o, q) and what lies at its upper left: a column, a row and a corner of three
other cells. With one cell of padding behind each row, and a margin before and behind all, every neighbour is at the same
distance from its window, whatever the map's size, so that a whole sheet is one loop, which vectorises.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.linked import lean

# Corners of a cell, as bits of what has fired.
HERE, RIGHT, BELOW, ACROSS = 1, 2, 4, 8


@lean()
def cells(layout):
    """Rows of cells, cells of a row without its padding: also height and width behind the pool."""
    return (layout.height + 1) // 2, (layout.width + 1) // 2


@lean()
def sheets_of(layout):
    """How many sheets a sample has."""
    return -(-layout.channels // layout.block)


@lean()
def locate(sheet, layout):
    """Sample, first channel and number of channels of a sheet."""
    per = sheets_of(layout)
    first = sheet % per * layout.block
    return sheet // per, first, min(layout.block, layout.channels - first)


@lean()
def _copy(source, start, out, at, n, affine, channel):
    scale, shift = affine
    if scale.size == 0:
        for j in range(n):
            out[at + j] = source[start + j]
    else:
        for j in range(n):
            out[at + j] = source[start + j] * scale[channel + j] + shift[channel + j]


@lean()
def _copy_pairs(source, start, out, at, right, n, affine, channel):
    """A row of a plane: even columns to ``at``, odd ones to ``right``."""
    scale, shift = affine
    if scale.size == 0:
        for j in range(n):
            out[at + j] = source[start + j + j]
            out[right + j] = source[start + j + j + np.uintp(1)]
    else:
        factor, offset = scale[channel], shift[channel]
        for j in range(n):
            out[at + j] = source[start + j + j] * factor + offset
            out[right + j] = source[start + j + j + np.uintp(1)] * factor + offset


@lean()
def load(source, offset, sheet, rows, out, affine, layout):
    """Rows of cells of a sheet of the frame at ``offset`` into ``out``, the four corners one behind the other.

    Args:
        rows: the first row of cells, and the one behind the last; behind the map's edges nothing is written.
        affine: scale and shift of a BatchNorm, [C] each, or empty for none.
    """
    first, stop = rows
    height, width, channels = layout.height, layout.width, layout.channels
    n, channel, block = locate(sheet, layout)
    across = (width + 1) // 2 + 1
    corner = (stop - first) * across * block
    for r in range(2 * first, min(2 * stop, height)):
        at = r % 2 * 2 * corner + (r // 2 - first) * across * block
        if layout.last:
            start = offset + (n * height + r) * width * channels + channel
            for q in range(width):
                to = at + q % 2 * corner + q // 2 * block
                _copy(source, np.uintp(start), out, np.uintp(to), np.uintp(block), affine, np.uintp(channel))
                start += channels
        else:
            start, pairs = offset + ((n * channels + channel) * height + r) * width, width // 2
            c, one = np.uintp(channel), np.uintp(1)
            _copy_pairs(source, np.uintp(start), out, np.uintp(at), np.uintp(at + corner), np.uintp(pairs), affine, c)
            if width % 2:
                _copy(source, np.uintp(start + 2 * pairs), out, np.uintp(at + pairs), one, affine, c)


@lean()
def store(source, sheet, rows, out, offset, layout):
    """The way back of ``load``, without affine map."""
    first, stop = rows
    height, width, channels = layout.height, layout.width, layout.channels
    n, channel, block = locate(sheet, layout)
    across = (width + 1) // 2 + 1
    corner = (stop - first) * across * block
    for r in range(2 * first, min(2 * stop, height)):
        at = r % 2 * 2 * corner + (r // 2 - first) * across * block
        if layout.last:
            start = offset + (n * height + r) * width * channels + channel
            for q in range(width):
                p, z = np.uintp(start), np.uintp(at + q % 2 * corner + q // 2 * block)
                for j in range(np.uintp(block)):
                    out[p + j] = source[z + j]
                start += channels
        else:
            start, pairs = offset + ((n * channels + channel) * height + r) * width, width // 2
            p, z, right = np.uintp(start), np.uintp(at), np.uintp(at + corner)
            for j in range(np.uintp(pairs)):
                out[p + j + j] = source[z + j]
                out[p + j + j + np.uintp(1)] = source[right + j]
            if width % 2:
                out[start + 2 * pairs] = source[at + pairs]


@lean()
def load_windows(source, offset, sheet, out, layout):
    """Numbers of a sheet's windows, of the frame at ``offset`` behind the pool."""
    n, channel, block = locate(sheet, layout)
    height, width = cells(layout)
    for o in range(height):
        z = np.uintp(o * (width + 1) * block)
        if layout.last:
            start = offset + (n * height + o) * width * layout.channels + channel
            for _ in range(width):
                p = np.uintp(start)
                for j in range(np.uintp(block)):
                    out[z + j] = source[p + j]
                z += np.uintp(block)
                start += layout.channels
        else:
            p = np.uintp(offset + ((n * layout.channels + channel) * height + o) * width)
            for j in range(np.uintp(width)):
                out[z + j] = source[p + j]


@lean()
def store_windows(source, sheet, rows, out, offset, layout):
    """Numbers of the windows of some rows of cells, to the frame at ``offset`` behind the pool."""
    first, stop = rows
    n, channel, block = locate(sheet, layout)
    height, width = cells(layout)
    for o in range(first, stop):
        z = np.uintp((o - first) * (width + 1) * block)
        if layout.last:
            start = offset + (n * height + o) * width * layout.channels + channel
            for _ in range(width):
                p = np.uintp(start)
                for j in range(np.uintp(block)):
                    out[p + j] = source[z + j]
                z += np.uintp(block)
                start += layout.channels
        else:
            p = np.uintp(offset + ((n * layout.channels + channel) * height + o) * width)
            for j in range(np.uintp(width)):
                out[p + j] = source[z + j]


@lean()
def fill_inside(inside, rows, block, layout):
    """Which corners of each cell lie on the map, as bits."""
    first, stop = rows
    _, width = cells(layout)
    at = 0
    for o in range(first, stop):
        down = HERE | RIGHT | BELOW | ACROSS if 2 * o + 1 < layout.height else HERE | RIGHT
        for q in range(width + 1):
            bits = 0 if q == width else down if 2 * q + 1 < layout.width else down & (HERE | BELOW)
            for _ in range(block):
                inside[at] = bits
                at += 1


@lean()
def fill_begins(begins, block, layout):
    """The first pixel of each window that lies on the map, as a bit: nine of them, row by row; 0 for padding."""
    height, width = cells(layout)
    at = 0
    for o in range(height):
        for q in range(width + 1):
            pixel = (4 if q == 0 else 3) if o == 0 else (1 if q == 0 else 0)
            for _ in range(block):
                begins[at] = 0 if q == width else 1 << pixel
                at += 1


@lean()
def find_fired(h, t, corner, inside, fired, margin, threshold):
    """Bits of the corners of each cell that fire at step ``t``, into fired[t], behind a margin of a row and a cell."""
    second, third, fourth = corner, corner + corner, corner + corner + corner
    for i in range(corner):
        bits = (HERE if h[t, i] >= threshold else 0) | (RIGHT if h[t, second + i] >= threshold else 0)
        bits |= (BELOW if h[t, third + i] >= threshold else 0) | (ACROSS if h[t, fourth + i] >= threshold else 0)
        fired[t, margin + i] = bits & inside[i]


@lean()
def any_fired(fired, t, i, block, row):
    """Whether a neuron of window ``i`` fires at step ``t``: of its own cell, and of those to its left and above."""
    above_left, above = fired[t, i], fired[t, block + i]
    left, own = fired[t, row + i], fired[t, row + block + i]
    return (own | (left & (RIGHT | ACROSS)) | (above & (BELOW | ACROSS)) | (above_left & ACROSS)) != 0
