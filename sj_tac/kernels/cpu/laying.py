"""Frames laid out for a first layer's convolution, compiled by Numba: zeros around them, in the order that its kernel reads.

In one pass, where torch takes a dozen of small operations. Each of these takes longer than its numbers where its code has
left the processor's caches, as it has behind the large maps of a net. Frames are float32, or the bits of bfloat16; they are
laid out as float32, or rounded to bfloat16, whose channels come in pairs (halves.py): the last one may be of zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.halves import narrowed, widened
from sj_tac.kernels.cpu.linked import lean


class Border(NamedTuple):
    """How frames lie, and what is put around them.

    Attributes:
        last: frames are channels_last, or contiguous. inputs, height, width: channels and size of a frame.
        above, before: rows and columns of zeros in front of it; high, wide: its size with zeros on all sides.
        together: 2 where channels come in pairs, else 1; channels: of what is laid out: ``inputs``, or one more for pairs.
    """

    last: bool
    inputs: int
    height: int
    width: int
    above: int
    before: int
    high: int
    wide: int
    together: int
    channels: int


@lean(forceinline=True)
def _weave(read, put, count, inputs, zero):
    """``count`` pixels, ``channels`` numbers of each side by side, of which frames have ``inputs``.

    Args:
        read: frames, where the first pixel lies in them, from a channel to the next, and from a pixel to the next; put: the
            same of what is written, where channels lie side by side: the array, the first pixel, ``channels``.
    """
    (frames, start, plane, step), (out, at, channels) = read, put
    for j in range(np.uintp(count)):
        here, there = np.uintp(start) + j * np.uintp(step), np.uintp(at) + j * np.uintp(channels)
        for c in range(channels):
            x = zero
            if c < inputs:
                x = narrowed(widened(frames[here + np.uintp(c) * np.uintp(plane)]), out)
            out[there + np.uintp(c)] = x


@kernel
def pixels(begin, end, frames, of, zero, out):
    """Rows ``begin`` to ``end``, [F * high], of frames in channels_last.

    Args:
        frames: [F * C * H * W] as they lie; of: a Border; zero: of the dtype of ``out``, [F * high * wide * channels].
    """
    size, numbers = of.height * of.width, of.wide * of.channels
    for unit in range(begin, end):
        frame, row, at = unit // of.high, unit % of.high - of.above, unit * numbers
        if row < 0 or row >= of.height:
            out[at : at + numbers] = zero
            continue
        first = at + of.before * of.channels
        out[at:first] = zero
        out[first + of.width * of.channels : at + numbers] = zero
        start, plane, step = frame * of.inputs * size + row * of.width, size, 1
        if of.last:
            start, plane, step = (frame * size + row * of.width) * of.inputs, 1, of.inputs
        # Numbers that the compiler knows make a loop of registers.
        if of.channels == 1:
            _weave((frames, start, 0, 1), (out, first, 1), of.width, 1, zero)
        elif of.inputs == 2 and of.last:
            _weave((frames, start, 1, 2), (out, first, 2), of.width, 2, zero)
        elif of.inputs == 2:
            _weave((frames, start, plane, 1), (out, first, 2), of.width, 2, zero)
        else:
            _weave((frames, start, plane, step), (out, first, of.channels), of.width, of.inputs, zero)


@kernel
def columns(begin, end, frames, of, zero, out):
    """Rows ``begin`` to ``end``, [F * planes * high], of contiguous frames: first the even columns, then the odd ones.

    Args:
        frames, of, zero: as for ``pixels``; ``of.wide`` is even; a plane is a channel, or a pair. out: [F * planes * high *
            wide * together].
    """
    size, half, width = of.height * of.width, of.wide // 2, of.together
    planes, numbers = of.channels // width, of.wide * width
    for unit in range(begin, end):
        frame, channel = unit // of.high // planes, unit // of.high % planes * width
        row, at = unit % of.high - of.above, unit * numbers
        out[at : at + numbers] = zero
        if row < 0 or row >= of.height:
            continue
        start, inputs = (frame * of.inputs + channel) * size + row * of.width, of.inputs - channel
        for odd in range(2):
            first = (odd + of.before) % 2
            there, count = at + (odd * half + (first + of.before) // 2) * width, (of.width - first + 1) // 2
            if width == 1:
                _weave((frames, start + first, 0, 2), (out, there, 1), count, 1, zero)
            elif inputs >= 2:
                _weave((frames, start + first, size, 2), (out, there, 2), count, 2, zero)
            else:
                _weave((frames, start + first, size, 2), (out, there, 2), count, 1, zero)
