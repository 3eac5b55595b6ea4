"""Where the slots of a tile lie in memory, for Numba: contiguous or channels_last, neurons or windows of 2x2 of them.

A *slot* is what a tile counts: one neuron, or, under a 2x2 MaxPool, the four of one window. Slots are numbered as the output
is laid out, so that a tile of the output is one piece of memory in both layouts. A map of odd size counts as one that is
larger: corners that it does not have are zeros in the buffer, and windows that it does not fill have no place in the output.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.arguments import Neurons, Windows
from sj_tac.kernels.cpu.linked import by_type, lean, making
from sj_tac.kernels.cpu.prefetch import LINE

# Slots of a tile of windows, whose four corners have a piece of the buffer each; a tile of neurons has four times as many.
TILE = 256
# From one region of a buffer to the next: four corners each, and a gap, without which regions of float32 would lie 4,096
# bytes apart. A processor looks at the last 12 bits of an address, and some of its page's, to see whether a number that it
# reads was written a moment ago: where they are the same, reading one region waits for writing another. For about one
# buffer in twenty the steps took up to four times as long.
PITCH = 4 * TILE + 352
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

    @by_type(function)
    def _(*arguments):
        if len(arguments[-1]) > _EVEN:
            return lambda *arguments: compiled(*arguments)
        return lambda *arguments: (0, 0)

    return function


@making()
def room(regions, like):
    """A buffer of so many regions, zeros. It begins with a cache line, so that no register is read from two of them."""
    numbers = np.zeros(regions * PITCH + LINE // like.itemsize, like.dtype)
    first = -numbers.ctypes.data % LINE // like.itemsize
    return numbers[first : first + regions * PITCH]


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
        pixel's channels, and the lines of an odd map are nearer where one sample follows another (see ``edge``).
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
def begins_at(slot, layout):
    """``locate`` of one slot, and in neurons where it lies in an even map."""
    run, runs, to_line, to_run, to_slot, _, _ = geometry(layout)
    place, i, line, channel = locate(slot, run, runs, layout.channels)
    return (place, i, line, channel), line * to_line + i * to_run + place * to_slot


@lean()
def following(i, runs, line, channel, channels):
    """Run, line and channel of the next run: counted, because divisions would cost more than what is done with a run."""
    if i + 1 < runs:
        return i + 1, line, channel
    return 0, line + 1, (channel + 1 if channel + 1 < channels else 0)


@lean()
def edge(place, n, i, line, layout):
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


@lean()
def together(place, i, n, left, layout):
    """How many runs, from one of ``n`` slots on, lie alike: whole ones of a line, in channels_last on an even map."""
    run, runs, _, _, _, _, _ = geometry(layout)
    if not layout.last or is_odd(layout) or place or n < run:
        return 1
    return min(runs - i, left // run)
