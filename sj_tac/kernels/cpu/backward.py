"""``fire`` backward by tiles, compiled by Numba: the steps of a tile are run again from y and v0, and then walked back.

The charged voltages of a tile, [T, 4 * TILE], are all that is kept of the trajectory, and they stay in the cache.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sj_tac.kernels.cpu.steps import M0, M1, M2, M3, M4, M5, after, charged, lean
from sj_tac.kernels.cpu.surrogate import derivative
from sj_tac.kernels.cpu.tiles import following, geometry, load, locate, store

# As in numba_forward: slots of a tile, and where what lies in the buffer, four corners each.
TILE = 256
SPAN = 4 * TILE
X, V, CARRY, GX, GS, SG, Y, FIRED, BEGIN = (i * SPAN for i in range(9))
REGIONS = 9


@lean()
def _recompute(b, n, h, t, mode, tau, rest, threshold, low, high, decay, gain):
    """Charged voltages of step ``t`` into h[t], and the reset."""
    for i in range(n):
        voltage = charged(b[X + i], b[V + i], mode, tau, rest, decay, gain)
        h[t, i] = voltage
        b[V + i] = after(voltage, threshold, low, high)


@lean()
def _recompute_any(b, n, h, t, mode, tau, rest, threshold, low, high, decay, gain):
    if mode == 0:
        _recompute(b, n, h, t, M0, tau, rest, threshold, low, high, decay, gain)
    elif mode == 1:
        _recompute(b, n, h, t, M1, tau, rest, threshold, low, high, decay, gain)
    elif mode == 2:
        _recompute(b, n, h, t, M2, tau, rest, threshold, low, high, decay, gain)
    elif mode == 3:
        _recompute(b, n, h, t, M3, tau, rest, threshold, low, high, decay, gain)
    elif mode == 4:
        _recompute(b, n, h, t, M4, tau, rest, threshold, low, high, decay, gain)
    else:
        _recompute(b, n, h, t, M5, tau, rest, threshold, low, high, decay, gain)


@lean()
def _to_spikes(go, start, w, b, n, h, t, slots, threshold, one, zero):
    """Gradient of the spikes; a window's goes to the first of its largest, as torch's: the very first where none fires."""
    if len(slots) == 1:
        for i in range(n):
            b[GS + i] = go[start + np.uintp(i)] * w
            b[FIRED + i] = one if h[t, i] >= threshold else zero
    else:
        for i in range(n):
            g = go[start + np.uintp(i)] * w
            f0, f1 = h[t, i] >= threshold, h[t, TILE + i] >= threshold
            f2, f3 = h[t, 2 * TILE + i] >= threshold, h[t, 3 * TILE + i] >= threshold
            fired = f0 | f1 | f2 | f3
            b[GS + i] = g if f0 | (not fired) else zero
            b[GS + TILE + i] = g if f1 & (not f0) else zero
            b[GS + 2 * TILE + i] = g if f2 & (not (f0 | f1)) else zero
            b[GS + 3 * TILE + i] = g if f3 & (not (f0 | f1 | f2)) else zero
            b[FIRED + i] = one if fired else zero


@lean()
def _through_reset(b, n, h, t, threshold, keep, rest_gain, h_gain, one):
    """Gradient to h into CARRY: of its spike, and of the voltage behind the reset, which CARRY brings.

    d v / d h is ``keep`` where it fired (0 for a hard reset), else 1; with the reset in the graph, plus d v / d s times the
    surrogate: ``rest_gain + h_gain h``, which is r - h for a hard reset and -v_threshold for a soft one.
    """
    for i in range(n):
        voltage, slope = h[t, i], b[SG + i]
        kept = (keep if voltage >= threshold else one) + (rest_gain + h_gain * voltage) * slope
        b[CARRY + i] = b[GS + i] * slope + b[CARRY + i] * kept


@lean()
def _share(b, n, beta, gamma):
    """What a step hands to its drive, and back to the step before."""
    for i in range(n):
        b[GX + i] += b[CARRY + i] * gamma
        b[CARRY + i] *= beta


@lean()
def _before(b, n, h, t, threshold, low, high, rest):
    """v - r behind step ``t``, from its charged voltages, into V."""
    for i in range(n):
        b[V + i] = after(h[t, i], threshold, low, high) - rest


# Sums may be taken in the order that vectorises; it is the same order every time.
@lean(fastmath={"reassoc", "nsz"})
def _dot(a, p, b, q, n, zero):
    result = zero
    for i in range(n):
        result += a[p + i] * b[q + i]
    return result


@lean(fastmath={"reassoc", "nsz"})
def _total(a, p, n, zero):
    result = zero
    for i in range(n):
        result += a[p + i]
    return result


@lean()
def _through_affine(b, begin, end, shape, slots, last, scale, chunk, g_scale, g_shift, zero):
    """GX becomes the gradient to y; those to scale and shift are summed by plane, or by chunk and channel."""
    run, runs, _, _, _, _, _ = geometry(shape, slots, last)
    place, i, plane, channel = locate(begin, run, runs, shape[1])
    slot = begin
    while slot < end:
        n = np.uintp(min(run - place, end - slot))
        for corner in range(4 if len(slots) > 1 else 1):
            at = np.uintp(corner * TILE + slot - begin)
            x, y = np.uintp(GX) + at, np.uintp(Y) + at
            if last:
                c, row = np.uintp(place), np.uintp(chunk * shape[1] + place)
                for j in range(n):
                    g_shift[row + j] += b[x + j]
                    g_scale[row + j] += b[x + j] * b[y + j]
                    b[x + j] *= scale[c + j]
            else:
                g_shift[plane] += _total(b, x, n, zero)
                g_scale[plane] += _dot(b, x, b, y, n, zero)
                factor = scale[channel]
                for j in range(n):
                    b[x + j] *= factor
        slot, place = slot + min(run - place, end - slot), 0
        i, plane, channel = following(i, runs, plane, channel, shape[1])


@njit(cache=True, nogil=True, error_model="numpy")
def backward(
    begin, end, go, gv, y, scale, shift, v0, lengths, linear, constants, mode, resets, kind, numbers, slots, last, shape,
    chunk_slots, weights, group, gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear,
):  # fmt: skip
    """Gradients of ``numba_forward.forward``.

    Args:
        begin, end: chunks of ``chunk_slots`` slots. Every sum is taken chunk by chunk, so that it does not depend on how
            many threads share them.
        go, gv: gradients of out and v_out; gy, gv0: gradients to y and v0 (empty: not wanted).
        resets: keep, rest_gain and h_gain of ``_through_reset``; kind, numbers: the surrogate.
        g_scale, g_shift: [planes], or [chunks * C] in channels_last, zeros; g_linear: [chunks, G, 2];
            g_weights: [chunks, T].
        need_linear: g_linear is wanted (a PLIF).
    """
    tau, rest, threshold, low, high, one, zero = constants
    keep, rest_gain, h_gain = resets
    size = gy.size // lengths.size
    emitted = size if len(slots) == 1 else size // 4
    corners = 1 if len(slots) == 1 else 4
    capacity = TILE * 4 // corners
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    none = scale[:0]
    b, h = np.zeros(REGIONS * SPAN, y.dtype), np.zeros((steps, SPAN), y.dtype)
    for chunk in range(begin, end):
        limit = min((chunk + 1) * chunk_slots, emitted)
        for tile in range(chunk * chunk_slots, limit, capacity):
            stop = min(tile + capacity, limit)
            n = stop - tile
            # All corners in one loop: of a tile that is not full, over the gaps between them, which are cleared.
            full = (corners - 1) * TILE + n
            if n < capacity:
                b[:] = zero
            b[V : V + SPAN] = rest
            # One call in a loop instead of two: the compiler copies `load` into every place that calls it.
            for which in range(2):
                if which or v0.size:
                    source, region = (gv, CARRY) if which else (v0, V)
                    load(source, 0, tile, stop, b, region, TILE, none, none, shape, slots, last)
            if need_linear:
                for i in range(SPAN):
                    b[BEGIN + i] = b[V + i] - rest
            t = 0
            for g in range(lengths.size):
                load(y, g * size, tile, stop, b, X, TILE, scale, shift, shape, slots, last)
                for _ in range(lengths[g]):
                    _recompute_any(b, full, h, t, mode, tau, rest, threshold, low, high, linear[g, 0], linear[g, 1])
                    t += 1
            for g in range(lengths.size - 1, -1, -1):
                beta, gamma = linear[g, 0], linear[g, 1]
                beta_sum, gamma_sum = zero, zero
                b[GX : GX + SPAN] = zero
                for which in range(2):
                    if (scale.size > 0) if which else need_linear:
                        region, factor, offset = (Y, none, none) if which else (X, scale, shift)
                        load(y, g * size, tile, stop, b, region, TILE, factor, offset, shape, slots, last)
                for _ in range(lengths[g]):
                    t -= 1
                    w = weights[t] if weights.size else one
                    start = np.uintp(t // group * emitted + tile)
                    _to_spikes(go, start, w, b, n, h, t, slots, threshold, one, zero)
                    if weights.size:
                        g_weights[chunk, t] += _dot(go, start, b, np.uintp(FIRED), np.uintp(n), zero)
                    derivative(h, t, threshold, b, np.uintp(SG), np.uintp(full), kind, numbers)
                    _through_reset(b, full, h, t, threshold, keep, rest_gain, h_gain, one)
                    if need_linear:
                        if t:
                            _before(b, full, h, t - 1, threshold, low, high, rest)
                        else:
                            for i in range(SPAN):
                                b[V + i] = b[BEGIN + i]
                        for c in range(corners):
                            at, m = np.uintp(c * TILE), np.uintp(n)
                            beta_sum += _dot(b, np.uintp(CARRY) + at, b, np.uintp(V) + at, m, zero)
                            gamma_sum += _dot(b, np.uintp(CARRY) + at, b, np.uintp(X) + at, m, zero)
                    _share(b, full, beta, gamma)
                g_linear[chunk, g, 0] += beta_sum
                g_linear[chunk, g, 1] += gamma_sum
                if scale.size:
                    _through_affine(b, tile, stop, shape, slots, last, scale, chunk, g_scale, g_shift, zero)
                store(b, GX, TILE, gy, g * size, tile, stop, shape, slots, last)
            if gv0.size:
                store(b, CARRY, TILE, gv0, 0, tile, stop, shape, slots, last)


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def backward_parallel(
    threads, chunks, go, gv, y, scale, shift, v0, lengths, linear, constants, mode, resets, kind, numbers, slots, last,
    shape, chunk_slots, weights, group, gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear,
):  # fmt: skip
    """``backward`` over all chunks on Numba's threads."""
    for i in prange(threads):
        backward(
            chunks * i // threads, chunks * (i + 1) // threads, go, gv, y, scale, shift, v0, lengths, linear, constants,
            mode, resets, kind, numbers, slots, last, shape, chunk_slots, weights, group, gy, gv0, g_scale, g_shift,
            g_linear, g_weights, need_linear,
        )  # fmt: skip
