"""``fire`` forward by tiles, compiled by Numba: no pool, or MaxPool of 2x2 windows; both layouts.

The voltages of a tile stay in the first-level cache while all of its steps run. Drives that lie well are read where they
are, by the registers that step (stepping.py); others come into the buffer first. What is written to memory is the output and
the last voltages alone.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.geometry import PITCH, TILE, begins_at, counts, in_windows, is_odd, room
from sj_tac.kernels.cpu.halves import narrowed
from sj_tac.kernels.cpu.in_place import is_direct, step_there
from sj_tac.kernels.cpu.linked import lean
from sj_tac.kernels.cpu.registers import LANES, settle
from sj_tac.kernels.cpu.stepping import SUM, V, stepped
from sj_tac.kernels.cpu.steps import FIRST, resting
from sj_tac.kernels.cpu.tiles import ask_for, for_registers, load, put_out, repeated, store

# Where a tile's drives of a step (four corners) and, with a residual, drives of a group lie in the buffer; voltages and sums
# lie between them. Constants, so that the compiler knows that they do not overlap.
X, DRIVE = np.intp(0), np.intp(3 * PITCH)
# Bytes of the last voltages from which on they are streamed: the caches keep what the convolution behind reads.
LARGE = 1 << 20


@lean()
def _streams(v0, v_out, layout):
    """Whether the last voltages are streamed past the caches: not where this call reads some, as the next one will, too.

    They must fill whole registers: of a line that is streamed in part, the rest would have to be read.
    """
    whole = not in_windows(layout) or (layout.last and layout.channels % LANES == 0 and not is_odd(layout))
    return whole and v0.size == 0 and v_out.size * v_out.itemsize >= LARGE


@lean()
def _add_residual(inputs, t, start, stop, b, none, layout):
    """The drives of step ``t``: those of its group, and its own residual."""
    load(inputs.residual, t, start, stop, b, X, none, layout)
    for i in range(4 * TILE):
        b[i] += b[DRIVE + i]


@lean()
def _scatter(b, slots, whole, out, first):
    """The sums of the windows of an odd map that put something out."""
    for j in range(whole):
        out[np.uintp(first + j)] = narrowed(b[np.uintp(SUM + slots[j])], out)


@lean()
def _tiles(part, inputs, neuron, layout, outputs, buffers, affine, by_register):
    """``forward``, in memory that is there: without reference counts, which would take a tenth of the time."""
    (begin, end), (b, slots), (out, v_out) = part, buffers, outputs
    residual, v0, lengths, linear = inputs.residual, inputs.v0, inputs.lengths, inputs.linear
    weights, group, none = inputs.weights, inputs.group, (inputs.scale[:0], inputs.scale[:0])
    direct, capacity, size = is_direct(residual, layout), TILE if in_windows(layout) else 4 * TILE, v_out.size
    _, emitted = counts(size, layout)
    streams = _streams(v0, v_out, layout)
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    for start in range(begin, end, capacity):
        stop = min(start + capacity, end)
        n = stop - start
        where, at = begins_at(start, layout)
        _, next_at = begins_at(min(stop, end - 1), layout)
        whole, first = put_out(start, stop, slots, layout) if is_odd(layout) else (n, start)
        if v0.size:
            load(v0, FIRST, start, stop, b, V, none, layout)
        else:
            b[V : V + 4 * TILE] = resting(neuron.rest, neuron.zero)
        if not streams:
            ask_for(v_out, FIRST, start, stop, layout, True)
        t = 0
        for g in range(lengths.size):
            # A drive that is read more than once is faster in the buffer.
            there, is_last = direct and lengths[g] <= group, g + 1 == lengths.size
            if not there:
                load(inputs.y, g * size, start, stop, b, DRIVE if residual.size else X, affine, layout)
                if not is_last:
                    ask_for(inputs.y, (g + 1) * size, start, stop, layout, False)
                elif stop < end:
                    ask_for(inputs.y, FIRST, stop, min(stop + capacity, end), layout, False)
            until = t + lengths[g]
            while t < until:
                if residual.size:
                    _add_residual(inputs, t * size, start, stop, b, none, layout)
                count = 1 if residual.size else min(until - t, group - t % group)
                begins, put = t % group == 0, t // group * emitted + first
                behind = t + count
                ends = behind % group == 0 or behind == steps
                span = weights, t, count, begins, ends and not is_odd(layout), linear[g, 0], linear[g, 1]
                next_put = emitted if behind < steps else 0
                if there:
                    drive = g * size, next_at - at - g * size if is_last else size
                    tile, to = (start, stop, where), (out, put, next_put)
                    step_there(inputs.y, drive, tile, b, by_register, to, span, (neuron, layout))
                else:
                    read = b, X, TILE, 2 * TILE, n, 1, 0, 0
                    stepped(b, (0, put, next_put), read, (*none, 0, 0), out, span, (neuron, layout))
                if is_odd(layout) and ends:
                    _scatter(b, slots, whole, out, put)
                t = behind
        store(b, V, v_out, FIRST, start, stop, layout, streams)
    if streams:
        settle()


@kernel
def forward(begin, end, inputs, neuron, layout, outputs):
    """All steps of the slots ``begin`` to ``end``, as frames or as weighted sums of ``group`` steps.

    Args:
        begin, end: slots; threads share them (see threads.py), since each is computed alone.
        inputs, outputs: Inputs and Outputs; neuron: one of ``NEURONS_OF_TILES``; layout: Neurons, Windows or OddWindows
            (see arguments.py).
    """
    scale, shift = inputs.scale, inputs.shift
    affine = repeated(scale, layout), repeated(shift, layout)
    by_register = for_registers(scale, affine[0], layout), for_registers(shift, affine[1], layout)
    buffers = room(4, outputs.v), np.empty(TILE, np.intp)
    _tiles((begin, end), inputs, neuron, layout, outputs, buffers, affine, by_register)
