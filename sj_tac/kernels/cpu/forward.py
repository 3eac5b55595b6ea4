"""``fire`` forward by tiles, compiled by Numba: no pool, or MaxPool of 2x2 windows; both layouts.

The voltages of a tile stay in the first-level cache while all of its steps run, and a step is one pass over it: charge,
fire, reset, pool and weighted sum. What is written to memory is the output alone.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.geometry import PITCH, TILE, counts, in_windows, is_odd, room
from sj_tac.kernels.cpu.halves import narrowed
from sj_tac.kernels.cpu.sources import ahead, bring
from sj_tac.kernels.cpu.steps import (
    AS_IF,
    AS_LIF,
    AS_LIF_DECAY,
    AS_MERGED,
    AS_PLIF,
    AS_PLIF_DECAY,
    FIRST,
    IF,
    LIF,
    LIF_DECAY,
    PLIF,
    PLIF_DECAY,
    after,
    charged,
    lean,
    resting,
)
from sj_tac.kernels.cpu.tiles import ask_for_output, copy, load, put_out, repeated, store

# Where a tile's drives of a step (four corners), voltages, sums and, with a residual, drives of a group lie in the buffer.
# Constants, so that the compiler knows that they do not overlap.
X, V, SUM, DRIVE = (np.intp(i * PITCH) for i in range(4))


@lean()
def _step(b, n, mode, layout, neuron, decay, gain, w):
    """One step of ``n`` slots, whose sums grow by ``w`` where a neuron fires: a MaxPool of spikes is whether any does."""
    tau, rest, threshold, low, high, zero = (
        neuron.tau, neuron.rest, neuron.threshold, neuron.low, neuron.high, neuron.zero
    )  # fmt: skip
    if not in_windows(layout):
        for i in range(n):
            h = charged(b[i], b[V + i], mode, tau, rest, decay, gain)
            b[V + i] = after(h, threshold, low, high)
            b[SUM + i] += w if h >= threshold else zero
    else:
        for i in range(n):
            h0 = charged(b[i], b[V + i], mode, tau, rest, decay, gain)
            h1 = charged(b[TILE + i], b[V + TILE + i], mode, tau, rest, decay, gain)
            h2 = charged(b[2 * TILE + i], b[V + 2 * TILE + i], mode, tau, rest, decay, gain)
            h3 = charged(b[3 * TILE + i], b[V + 3 * TILE + i], mode, tau, rest, decay, gain)
            b[V + i] = after(h0, threshold, low, high)
            b[V + TILE + i] = after(h1, threshold, low, high)
            b[V + 2 * TILE + i] = after(h2, threshold, low, high)
            b[V + 3 * TILE + i] = after(h3, threshold, low, high)
            fired = (h0 >= threshold) | (h1 >= threshold) | (h2 >= threshold) | (h3 >= threshold)
            b[SUM + i] += w if fired else zero


@lean()
def _steps(b, n, layout, neuron, decay, gain, w):
    """``_step`` of the mode that is wanted."""
    mode = neuron.mode
    if mode == LIF_DECAY:
        _step(b, n, AS_LIF_DECAY, layout, neuron, decay, gain, w)
    elif mode == LIF:
        _step(b, n, AS_LIF, layout, neuron, decay, gain, w)
    elif mode == PLIF_DECAY:
        _step(b, n, AS_PLIF_DECAY, layout, neuron, decay, gain, w)
    elif mode == PLIF:
        _step(b, n, AS_PLIF, layout, neuron, decay, gain, w)
    elif mode == IF:
        _step(b, n, AS_IF, layout, neuron, decay, gain, w)
    else:
        _step(b, n, AS_MERGED, layout, neuron, decay, gain, w)


@kernel
def forward(begin, end, inputs, neuron, layout, outputs):
    """All steps of the slots ``begin`` to ``end``, as frames or as weighted sums of ``group`` steps.

    Args:
        begin, end: slots; threads share them (see threads.py), since each is computed alone.
        inputs, neuron, outputs: Inputs, ConvolvedInputs or SlidInputs, Neuron and Outputs; layout: Neurons, Windows or
            OddWindows (see arguments.py).
    """
    residual, scale, shift, v0 = inputs.residual, inputs.scale, inputs.shift, inputs.v0
    lengths, linear, weights, group = inputs.lengths, inputs.linear, inputs.weights, inputs.group
    out, v_out = outputs
    rest, one, zero = neuron.rest, neuron.one, neuron.zero
    b, slots = room(4, v_out), np.empty(TILE, np.intp)
    capacity = TILE if in_windows(layout) else 4 * TILE
    size = v_out.size
    _, emitted = counts(size, layout)
    affine, none = (repeated(scale, layout), repeated(shift, layout)), (scale[:0], shift[:0])
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    for start in range(begin, end, capacity):
        stop = min(start + capacity, end)
        n = stop - start
        whole, first = put_out(start, stop, slots, layout) if is_odd(layout) else (n, start)
        if v0.size:
            load(v0, FIRST, start, stop, b, V, none, layout)
        else:
            b[V : V + 4 * TILE] = resting(rest, zero)
        t = 0
        for g in range(lengths.size):
            bring(inputs, g * size, start, stop, b, DRIVE if residual.size else X, affine, layout)
            if g + 1 < lengths.size:
                ahead(inputs, (g + 1) * size, start, stop, layout)
            elif stop < end:
                ahead(inputs, FIRST, stop, min(stop + capacity, end), layout)
            for _ in range(lengths[g]):
                if residual.size:
                    load(residual, t * size, start, stop, b, X, none, layout)
                    for i in range(4 * TILE):
                        b[i] += b[DRIVE + i]
                if t % group == 0:
                    for i in range(n):
                        b[SUM + i] = zero
                w = weights[t] if weights.size else one
                _steps(b, n, layout, neuron, linear[g, 0], linear[g, 1], w)
                t += 1
                if t % group == 0 or t == steps:
                    frame = (t - 1) // group * emitted
                    if t < steps:
                        ask_for_output(out, frame + emitted + first, whole, True)
                    if is_odd(layout):
                        for j in range(whole):
                            out[np.uintp(frame + first + j)] = narrowed(b[np.uintp(SUM + slots[j])], out)
                    else:
                        copy(b, np.uintp(SUM), out, np.uintp(frame + first), np.uintp(whole))
        store(b, V, v_out, FIRST, start, stop, layout)
