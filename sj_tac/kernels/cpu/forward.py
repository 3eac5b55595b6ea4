"""``fire`` forward by tiles, compiled by Numba: no pool, or MaxPool of 2x2 windows that tile the map; both layouts.

The voltages of a tile stay in the first-level cache while all of its steps run, and a step is one pass over it: charge,
fire, reset, pool and weighted sum. What is written to memory is the output alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sj_tac.kernels.cpu.steps import M0, M1, M2, M3, M4, M5, after, charged, lean
from sj_tac.kernels.cpu.tiles import copy, load, store

# Slots of a tile, and where a tile's drives of a step (four corners), voltages, sums and, with a residual, drives of a group
# lie in the buffer. Constants, so that the compiler knows that they do not overlap.
TILE = 256
V, SUM, DRIVE = 4 * TILE, 8 * TILE, 12 * TILE


@lean()
def _step(b, n, mode, slots, tau, rest, threshold, low, high, decay, gain, w, zero):
    """One step of ``n`` slots, whose sums grow by ``w`` where a neuron fires: a MaxPool of spikes is whether any does."""
    if len(slots) == 1:
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
def _steps(b, n, mode, slots, tau, rest, threshold, low, high, decay, gain, w, zero):
    """``_step`` of the mode that is wanted."""
    if mode == 0:
        _step(b, n, M0, slots, tau, rest, threshold, low, high, decay, gain, w, zero)
    elif mode == 1:
        _step(b, n, M1, slots, tau, rest, threshold, low, high, decay, gain, w, zero)
    elif mode == 2:
        _step(b, n, M2, slots, tau, rest, threshold, low, high, decay, gain, w, zero)
    elif mode == 3:
        _step(b, n, M3, slots, tau, rest, threshold, low, high, decay, gain, w, zero)
    elif mode == 4:
        _step(b, n, M4, slots, tau, rest, threshold, low, high, decay, gain, w, zero)
    else:
        _step(b, n, M5, slots, tau, rest, threshold, low, high, decay, gain, w, zero)


@njit(cache=True, nogil=True, error_model="numpy")
def forward(
    begin, end, y, residual, scale, shift, v0, lengths, linear, constants, mode, slots, last, shape, weights, group, out,
    v_out,
):  # fmt: skip
    """All steps of the slots ``begin`` to ``end``, as frames or as weighted sums of ``group`` steps.

    Args:
        begin, end: slots; threads share them (see threads.py), since each is computed alone.
        y: [G, M] drives, a frame of N*C*H*W in its own layout; residual: [T, M], or empty for none; scale, shift: [C], or
            empty for none.
        v0: [M], or empty for voltages at rest; v_out: [M].
        lengths: [G] steps on each drive; linear: [G, 2] beta and gamma of ``h = r + beta (v - r) + gamma x``.
        constants: tau (or sigmoid(w)), rest, threshold, 1, 0, all of y's dtype.
        slots, last, shape: see numba_tiles.
        weights: [T], or empty for frames; out: [T or ceil(T / group), slots].
    """
    tau, rest, threshold, low, high, one, zero = constants
    b = np.empty(4 * 4 * TILE, y.dtype)
    capacity = TILE if len(slots) > 1 else 4 * TILE
    size = v_out.size
    emitted = size if len(slots) == 1 else size // 4
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    for start in range(begin, end, capacity):
        stop = min(start + capacity, end)
        n = stop - start
        if v0.size:
            load(v0, 0, start, stop, b, V, TILE, None, None, shape, slots, last)
        else:
            b[V : 2 * V] = rest
        t = 0
        for g in range(lengths.size):
            load(y, g * size, start, stop, b, DRIVE if residual.size else 0, TILE, scale, shift, shape, slots, last)
            for _ in range(lengths[g]):
                if residual.size:
                    load(residual, t * size, start, stop, b, 0, TILE, None, None, shape, slots, last)
                    for i in range(4 * TILE):
                        b[i] += b[DRIVE + i]
                if t % group == 0:
                    for i in range(n):
                        b[SUM + i] = zero
                w = weights[t] if weights.size else one
                _steps(b, n, mode, slots, tau, rest, threshold, low, high, linear[g, 0], linear[g, 1], w, zero)
                t += 1
                if t % group == 0 or t == steps:
                    copy(b, np.uintp(SUM), out, np.uintp((t - 1) // group * emitted + start), np.uintp(n))
        store(b, V, TILE, v_out, 0, start, stop, shape, slots, last)


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def forward_parallel(
    threads, units, y, residual, scale, shift, v0, lengths, linear, constants, mode, slots, last, shape, weights, group, out,
    v_out,
):  # fmt: skip
    """``forward`` over all slots on Numba's threads."""
    for i in prange(threads):
        forward(
            units * i // threads, units * (i + 1) // threads, y, residual, scale, shift, v0, lengths, linear, constants,
            mode, slots, last, shape, weights, group, out, v_out,
        )  # fmt: skip
