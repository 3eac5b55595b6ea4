"""``fire`` backward by tiles, compiled by Numba: the steps of a tile are run again from y and v0, and then walked back.

The charged voltages of a tile, [T, 4 * TILE], are all that is kept of the trajectory, and they stay in the cache.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.geometry import (
    PITCH,
    TILE,
    counts,
    following,
    geometry,
    in_windows,
    is_odd,
    locate,
    of_odd_maps,
    room,
)
from sj_tac.kernels.cpu.halves import widened
from sj_tac.kernels.cpu.linked import lean
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
)
from sj_tac.kernels.cpu.surrogate import derivative
from sj_tac.kernels.cpu.tiles import ask_for, ask_for_output, load, put_out, repeated, store

# Where what lies in the buffer, four corners each; behind it all lie the charged voltages of every step.
SPAN = 4 * TILE
X, V, CARRY, GX, GS, SG, Y, FIRED, BEGIN = (np.intp(i * PITCH) for i in range(9))
REGIONS = 9


@lean()
def _recompute(b, n, h, t, mode, neuron, decay, gain):
    """Charged voltages of step ``t`` into h[t], and the reset."""
    tau, rest, threshold, low, high = neuron.tau, neuron.rest, neuron.threshold, neuron.low, neuron.high
    for i in range(n):
        voltage = charged(b[X + i], b[V + i], mode, tau, rest, decay, gain)
        h[t, i] = voltage
        b[V + i] = after(voltage, threshold, low, high)


@lean()
def _recompute_any(b, n, h, t, neuron, decay, gain):
    """``_recompute`` of the mode that is wanted."""
    mode = neuron.mode
    if mode == LIF_DECAY:
        _recompute(b, n, h, t, AS_LIF_DECAY, neuron, decay, gain)
    elif mode == LIF:
        _recompute(b, n, h, t, AS_LIF, neuron, decay, gain)
    elif mode == PLIF_DECAY:
        _recompute(b, n, h, t, AS_PLIF_DECAY, neuron, decay, gain)
    elif mode == PLIF:
        _recompute(b, n, h, t, AS_PLIF, neuron, decay, gain)
    elif mode == IF:
        _recompute(b, n, h, t, AS_IF, neuron, decay, gain)
    else:
        _recompute(b, n, h, t, AS_MERGED, neuron, decay, gain)


@lean()
def _to_spikes(go, start, w, b, n, step, layout, neuron):
    """Gradient of the spikes; a window's goes to the first of its largest, as torch's: the very first where none fires.

    Args:
        step: the charged voltages of all steps, and which step.
    """
    h, t = step
    threshold, one, zero = neuron.threshold, neuron.one, neuron.zero
    if not in_windows(layout):
        for i in range(n):
            b[GS + i] = widened(go[start + np.uintp(i)]) * w
            b[FIRED + i] = one if h[t, i] >= threshold else zero
    else:
        for i in range(n):
            g = widened(go[start + np.uintp(i)]) * w
            f0, f1 = h[t, i] >= threshold, h[t, TILE + i] >= threshold
            f2, f3 = h[t, 2 * TILE + i] >= threshold, h[t, 3 * TILE + i] >= threshold
            fired = f0 | f1 | f2 | f3
            b[GS + i] = g if f0 | (not fired) else zero
            b[GS + TILE + i] = g if f1 & (not f0) else zero
            b[GS + 2 * TILE + i] = g if f2 & (not (f0 | f1)) else zero
            b[GS + 3 * TILE + i] = g if f3 & (not (f0 | f1 | f2)) else zero
            b[FIRED + i] = one if fired else zero


@of_odd_maps
def _to_spikes_of_odd(go, places, w, b, n, step, neuron, layout):
    """``_to_spikes`` from SG, to which the gradients of the windows that an odd map has are brought: 0 for the others.

    Args:
        places: where the first of these gradients lies, and the slots that they are for.
    """
    first, slots = places
    for i in range(n):
        b[SG + i] = neuron.zero
    for j in range(slots.size):
        b[np.uintp(SG + slots[j])] = widened(go[np.uintp(first + j)])
    _to_spikes(b, np.uintp(SG), w, b, n, step, layout, neuron)


@lean()
def _through_reset(b, n, h, t, slopes):
    """Gradient to h into CARRY: of its spike, and of the voltage behind the reset, which CARRY brings.

    d v / d h is ``keep`` where it fired (0 for a hard reset), else 1; with the reset in the graph, plus d v / d s times the
    surrogate: ``rest_gain + h_gain h``, which is r - h for a hard reset and -v_threshold for a soft one.
    """
    threshold, one = slopes.threshold, slopes.one
    keep, rest_gain, h_gain = slopes.keep, slopes.rest_gain, slopes.h_gain
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
def _before(b, n, h, t, neuron):
    """v - r behind step ``t``, from its charged voltages, into V."""
    threshold, low, high, rest = neuron.threshold, neuron.low, neuron.high, neuron.rest
    for i in range(n):
        b[V + i] = after(h[t, i], threshold, low, high) - rest


# Sums may be taken in the order that vectorises; it is the same order every time.
@lean(fastmath={"reassoc", "nsz"})
def _dot(a, p, b, q, n, zero):
    result = zero
    for i in range(n):
        result += widened(a[p + i]) * b[q + i]
    return result


@lean(fastmath={"reassoc", "nsz"})
def _total(a, p, n, zero):
    result = zero
    for i in range(n):
        result += a[p + i]
    return result


@lean()
def _through_affine(b, begin, end, layout, scale, chunk, sums, zero):
    """GX becomes the gradient to y; those to scale and shift are summed by plane, or by chunk and channel.

    Args:
        sums: where the sums for scale and shift grow.
    """
    g_scale, g_shift = sums
    last, channels = layout.last, layout.channels
    run, runs, _, _, _, _, _ = geometry(layout)
    place, i, plane, channel = locate(begin, run, runs, channels)
    slot = begin
    while slot < end:
        n = np.uintp(min(run - place, end - slot))
        for corner in range(4 if in_windows(layout) else 1):
            at = np.uintp(corner * TILE + slot - begin)
            x, y = np.uintp(GX) + at, np.uintp(Y) + at
            if last:
                c, row = np.uintp(place), np.uintp(chunk * channels + place)
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
        i, plane, channel = following(i, runs, plane, channel, channels)


@kernel
def backward(begin, end, arriving, slopes, layout, gradients):
    """Gradients of ``forward``.

    Args:
        begin, end: chunks of ``gradients.chunk`` slots. Every sum is taken chunk by chunk, so that it does not depend on how
            many threads share them.
        arriving, slopes, gradients: Arriving, Slopes and Gradients; layout: Neurons, Windows or
            OddWindows (see arguments.py).
    """
    go, gv, y, scale, shift, v0, lengths, linear, weights, group = arriving
    gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear, chunk_slots = gradients
    rest, one, zero = slopes.rest, slopes.one, slopes.zero
    size = gy.size // lengths.size
    total, emitted = counts(size, layout)
    corners = 4 if in_windows(layout) else 1
    capacity = TILE * 4 // corners
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    affine, none, sums = (repeated(scale, layout), repeated(shift, layout)), (scale[:0], shift[:0]), (g_scale, g_shift)
    b = room(REGIONS + steps, gv)
    h, slots = b[REGIONS * PITCH :].reshape((steps, PITCH)), np.empty(TILE, np.intp)
    for chunk in range(begin, end):
        limit = min((chunk + 1) * chunk_slots, total)
        for tile in range(chunk * chunk_slots, limit, capacity):
            stop = min(tile + capacity, limit)
            n = stop - tile
            # All corners in one loop: of a tile that is not full, over the gaps between them, which are cleared.
            full = (corners - 1) * TILE + n
            if n < capacity:
                b[: REGIONS * PITCH] = zero
            whole, first = put_out(tile, stop, slots, layout) if is_odd(layout) else (n, tile)
            b[V : V + SPAN] = rest
            # One call in a loop instead of two: the compiler copies `load` into every place that calls it.
            for which in range(2):
                if which or v0.size:
                    source, region = (gv, CARRY) if which else (v0, V)
                    load(source, FIRST, tile, stop, b, region, none, layout)
            if need_linear:
                for i in range(SPAN):
                    b[BEGIN + i] = b[V + i] - rest
            t = 0
            for g in range(lengths.size):
                load(y, g * size, tile, stop, b, X, affine, layout)
                if g + 1 < lengths.size:
                    ask_for(y, (g + 1) * size, tile, stop, layout, False)
                for _ in range(lengths[g]):
                    _recompute_any(b, full, h, t, slopes, linear[g, 0], linear[g, 1])
                    t += 1
            for g in range(lengths.size - 1, -1, -1):
                beta, gamma = linear[g, 0], linear[g, 1]
                beta_sum, gamma_sum = zero, zero
                ask_for(gy, g * size, tile, stop, layout, True)
                b[GX : GX + SPAN] = zero
                for which in range(2):
                    if (scale.size > 0) if which else need_linear:
                        region, through = (Y, none) if which else (X, affine)
                        load(y, g * size, tile, stop, b, region, through, layout)
                for _ in range(lengths[g]):
                    t -= 1
                    w = weights[t] if weights.size else one
                    frame = t // group * emitted
                    if frame:
                        ask_for_output(go, frame - emitted + first, whole, False)
                    if is_odd(layout):
                        _to_spikes_of_odd(go, (frame + first, slots[:whole]), w, b, n, (h, t), slopes, layout)
                        if weights.size:
                            g_weights[chunk, t] += _dot(b, np.uintp(SG), b, np.uintp(FIRED), np.uintp(n), zero)
                    else:
                        start = np.uintp(frame + first)
                        _to_spikes(go, start, w, b, n, (h, t), layout, slopes)
                        if weights.size:
                            g_weights[chunk, t] += _dot(go, start, b, np.uintp(FIRED), np.uintp(n), zero)
                    derivative(h, t, b, np.uintp(SG), np.uintp(full), slopes)
                    _through_reset(b, full, h, t, slopes)
                    if need_linear:
                        if t:
                            _before(b, full, h, t - 1, slopes)
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
                    _through_affine(b, tile, stop, layout, scale, chunk, sums, zero)
                store(b, GX, gy, g * size, tile, stop, layout, False)
            if gv0.size:
                store(b, CARRY, gv0, FIRST, tile, stop, layout, False)
