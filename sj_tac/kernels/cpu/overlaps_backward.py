"""``fire`` backward for MaxPool of 3x3 windows, stride 2, padding 1, compiled by Numba: a sheet's steps are run again.

Kept of a sheet are the charged voltages of all steps, and which corners of its cells fired.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sj_tac.kernels.cpu.arguments import Array
from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.linked import lean, making
from sj_tac.kernels.cpu.overlaps import advance
from sj_tac.kernels.cpu.planes import dot, total
from sj_tac.kernels.cpu.sheets import (
    ACROSS,
    BELOW,
    HERE,
    RIGHT,
    any_fired,
    cells,
    fill_begins,
    fill_inside,
    find_fired,
    load,
    load_windows,
    locate,
    store,
)
from sj_tac.kernels.cpu.steps import FIRST, after
from sj_tac.kernels.cpu.surrogate import derivative


@lean()
def _find_winners(fired, t, begins, winners, n, block, row):
    """The pixel of each window that gets its gradient, as a bit: as torch's, the first that fired, or the first of all."""
    for i in range(n):
        above_left, above = fired[t, i], fired[t, block + i]
        left, own = fired[t, row + i], fired[t, row + block + i]
        pixels = ((above_left & ACROSS) >> 3) | ((above & (BELOW | ACROSS)) >> 1) | ((left & RIGHT) << 2)
        pixels |= ((left & ACROSS) << 3) | ((own & (HERE | RIGHT)) << 4) | ((own & (BELOW | ACROSS)) << 5)
        pixels = pixels if pixels != 0 else begins[i]
        winners[i] = pixels & -pixels


# Sums may be taken in the order that vectorises; it is the same order every time.
@lean(fastmath={"reassoc", "nsz"})
def _total_fired(go, fired, t, n, block, row, zero):
    """Sum of the gradients of windows in which a neuron fired."""
    result = zero
    for i in range(n):
        result += go[i] if any_fired(fired, t, i, block, row) else zero
    return result


@lean()
def _to_spikes(g, winners, gs, n, block, row, zero):
    """Gradients of the spikes, corner by corner; of several windows in the order of windows, as torch's."""
    second, third, fourth, across = n, n + n, n + n + n, row + block
    for i in range(n):
        gs[i] = g[i] if winners[i] == 16 else zero
    for i in range(n):
        own = g[i] if winners[i] == 32 else zero
        gs[second + i] = own + (g[block + i] if winners[block + i] == 8 else zero)
    for i in range(n):
        own = g[i] if winners[i] == 128 else zero
        gs[third + i] = own + (g[row + i] if winners[row + i] == 2 else zero)
    for i in range(n):
        own = g[i] if winners[i] == 256 else zero
        own += g[block + i] if winners[block + i] == 64 else zero
        own += g[row + i] if winners[row + i] == 4 else zero
        gs[fourth + i] = own + (g[across + i] if winners[across + i] == 1 else zero)


@lean()
def _through_reset(gs, sg, h, t, carry, n, slopes):
    """Gradient to h into ``carry``: of its spike, and of the voltage behind the reset, which ``carry`` brings."""
    threshold, one = slopes.threshold, slopes.one
    keep, rest_gain, h_gain = slopes.keep, slopes.rest_gain, slopes.h_gain
    for i in range(n):
        voltage, slope = h[t, i], sg[i]
        kept = (keep if voltage >= threshold else one) + (rest_gain + h_gain * voltage) * slope
        carry[i] = gs[i] * slope + carry[i] * kept


@lean()
def _before(h, t, begin, before, n, neuron):
    """v - r of the neurons before step ``t``; begin: before all steps."""
    threshold, low, high, rest = neuron.threshold, neuron.low, neuron.high, neuron.rest
    if t:
        for i in range(n):
            before[i] = after(h[t - 1, i], threshold, low, high) - rest
    else:
        for i in range(n):
            before[i] = begin[i] - rest


@lean()
def _share(carry, gx, n, linear):
    """What a step hands to its drive, and back to the step before; linear: beta and gamma."""
    beta, gamma = linear
    for i in range(n):
        gx[i] += carry[i] * gamma
        carry[i] *= beta


@lean()
def _through_affine_of_channels(gx, y, scale, channel, sums, n, block):
    """``gx`` becomes the gradient to y, and those to scale and shift are summed by channel: channels_last."""
    g_scale, g_shift = sums
    for start in range(0, n, block):
        at = np.uintp(start)
        for j in range(np.uintp(block)):
            g_shift[j] += gx[at + j]
            g_scale[j] += gx[at + j] * y[at + j]
            gx[at + j] *= scale[np.uintp(channel) + j]


class _Buffers(NamedTuple):
    """What a sheet needs. Padding is zero and stays so: voltages [4 * cells], by step [T, 4 * cells], by window [cells]."""

    x: Array
    y: Array
    v: Array
    start: Array
    gx: Array
    gs: Array
    slope: Array
    carry: Array
    h: Array
    fired: Array
    inside: Array
    begins: Array
    winners: Array
    arrived: Array
    weighted: Array


@making()
def _buffers(steps, block, layout, rest):
    height, width = cells(layout)
    corner, margin, kind = height * (width + 1) * block, (width + 2) * block, type(rest)
    zeros, n, tail = np.zeros((8, 4 * corner), kind), 4 * corner, corner + margin
    inside, begins = np.empty(corner, np.int32), np.empty(corner, np.int32)
    fill_inside(inside, (0, height), block, layout)
    fill_begins(begins, block, layout)
    zeros[3] = rest
    return _Buffers(
        zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], zeros[5], zeros[6], zeros[7],
        np.empty((steps, n), kind), np.zeros((steps, tail), np.int32), inside, begins, np.zeros(tail, np.int32),
        np.zeros(tail, kind), np.zeros(tail, kind),
    )  # fmt: skip


@kernel
def backward(begin, end, arriving, slopes, layout, gradients):
    """Gradients of ``overlaps.forward`` for the sheets ``begin`` to ``end``, from y and v0 alone.

    Args:
        arriving, slopes, layout, gradients: Arriving, Slopes, Sheets and Gradients (see arguments.py); a sheet is a chunk,
            and sums for scale and shift are [N * C].
    """
    go, gv, y, scale, shift, v0, lengths, linear, weights, group = arriving
    gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear, _ = gradients
    rest, threshold, one, zero = slopes.rest, slopes.threshold, slopes.one, slopes.zero
    size = gv.size
    height, width = cells(layout)
    rows = (0, height)
    affine, none = (scale, shift), (scale[:0], shift[:0])
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    emitted = go.size // (-(-steps // group))
    held, buffers = layout.block, _buffers(steps, layout.block, layout, rest)
    for p in range(begin, end):
        sample, channel, block = locate(p, layout)
        if block != held:
            held, buffers = block, _buffers(steps, block, layout, rest)
        x, raw, v, start, gx, gs, sg, carry, h, fired, inside, begins, winners, arrived, weighted = buffers
        row = (width + 1) * block
        corner, margin = np.uintp(height * row), np.uintp(row + block)
        n = np.uintp(4) * corner
        if v0.size:
            load(v0, FIRST, p, rows, start, none, layout)
        v[:] = start
        load(gv, FIRST, p, rows, carry, none, layout)
        t = 0
        for g in range(lengths.size):
            load(y, g * size, p, rows, x, affine, layout)
            for _ in range(lengths[g]):
                advance(x, v, h, t, n, slopes, (linear[g, 0], linear[g, 1]))
                find_fired(h, t, corner, inside, fired, margin, threshold)
                t += 1
        for g in range(lengths.size - 1, -1, -1):
            gx[:] = zero
            beta_sum, gamma_sum = zero, zero
            if need_linear:
                load(y, g * size, p, rows, x, affine, layout)
            for _ in range(lengths[g]):
                t -= 1
                if t == steps - 1 or t % group == group - 1:
                    load_windows(go, t // group * emitted, p, arrived, layout)
                w = weights[t] if weights.size else one
                for i in range(corner):
                    weighted[i] = arrived[i] * w
                if weights.size:
                    g_weights[p, t] = _total_fired(arrived, fired, t, corner, np.uintp(block), np.uintp(row), zero)
                _find_winners(fired, t, begins, winners, corner, np.uintp(block), np.uintp(row))
                _to_spikes(weighted, winners, gs, corner, np.uintp(block), np.uintp(row), zero)
                derivative(h, t, sg, np.uintp(0), n, slopes)
                _through_reset(gs, sg, h, t, carry, n, slopes)
                if need_linear:
                    _before(h, t, start, v, n, slopes)
                    beta_sum += dot(carry, v, zero)
                    gamma_sum += dot(carry, x, zero)
                _share(carry, gx, n, (linear[g, 0], linear[g, 1]))
            g_linear[p, g, 0], g_linear[p, g, 1] = beta_sum, gamma_sum
            if scale.size:
                load(y, g * size, p, rows, raw, none, layout)
                at = sample * layout.channels + channel
                if layout.last:
                    sums = (g_scale[at : at + block], g_shift[at : at + block])
                    _through_affine_of_channels(gx, raw, scale, channel, sums, n, block)
                else:
                    g_scale[at] += dot(gx, raw, zero)
                    g_shift[at] += total(gx, zero)
                    factor = scale[channel]
                    for i in range(n):
                        gx[i] *= factor
            store(gx, p, rows, gy, g * size, layout)
        if gv0.size:
            store(carry, p, rows, gv0, FIRST, layout)
