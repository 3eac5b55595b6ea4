"""``fire`` on the CPU for the pools that tiles and sheets do not know, compiled by Numba: one plane of a sample at a time.

Contiguous layout only. It is slower than tiles and sheets: a step is several passes over the plane.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.linked import lean
from sj_tac.kernels.cpu.steps import (
    AS_IF,
    AS_LIF,
    AS_LIF_DECAY,
    AS_MERGED,
    AS_PLIF,
    AS_PLIF_DECAY,
    IF,
    LIF,
    LIF_DECAY,
    PLIF,
    PLIF_DECAY,
    after,
    charged,
)
from sj_tac.kernels.cpu.surrogate import derivative
from sj_tac.kernels.pools import AVG_POOL, MAX_POOL


@lean()
def _copy(a, b):
    """``b[:] = a``, which would compile the error for two sizes, too, for seconds."""
    for i in range(a.size):
        b[i] = a[i]


@lean()
def _charge(x, v, h, mode, neuron, decay, gain):
    tau, rest = neuron.tau, neuron.rest
    for i in range(v.size):
        h[i] = charged(x[i], v[i], mode, tau, rest, decay, gain)


@lean()
def charge(x, v, h, neuron, decay, gain):
    """Charged voltages of a plane."""
    mode = neuron.mode
    if mode == LIF_DECAY:
        _charge(x, v, h, AS_LIF_DECAY, neuron, decay, gain)
    elif mode == LIF:
        _charge(x, v, h, AS_LIF, neuron, decay, gain)
    elif mode == PLIF_DECAY:
        _charge(x, v, h, AS_PLIF_DECAY, neuron, decay, gain)
    elif mode == PLIF:
        _charge(x, v, h, AS_PLIF, neuron, decay, gain)
    elif mode == IF:
        _charge(x, v, h, AS_IF, neuron, decay, gain)
    else:
        _charge(x, v, h, AS_MERGED, neuron, decay, gain)


@lean()
def reset(h, v, s, neuron):
    """Voltages behind the reset, and spikes."""
    threshold, low, high, one, zero = neuron.threshold, neuron.low, neuron.high, neuron.one, neuron.zero
    for i in range(h.size):
        v[i] = after(h[i], threshold, low, high)
        s[i] = one if h[i] >= threshold else zero


@lean()
def drive(y, x, scale, shift, plane):
    """The BatchNorm's affine map of one plane."""
    if scale.size:
        a, b = scale[plane % scale.size], shift[plane % scale.size]
        for i in range(y.size):
            x[i] = y[i] * a + b
    else:
        _copy(y, x)


@lean()
def pool_plane(s, out, pool):
    """Max or mean over the windows of one plane."""
    kind, kh, kw, sh, sw, ph, pw, area, width, out_width = pool
    height = s.size // width
    for o in range(out.size // out_width):
        for q in range(out_width):
            best = s[0] - s[0]
            for a in range(max(0, o * sh - ph), min(height, o * sh - ph + kh)):
                for b in range(max(0, q * sw - pw), min(width, q * sw - pw + kw)):
                    value = s[a * width + b]
                    best = max(best, value) if kind == MAX_POOL else best + value
            out[o * out_width + q] = best if kind == MAX_POOL else best / area


@lean()
def unpool_plane(g, s, gs, pool):
    """Gradient of ``pool_plane``: to the first largest of each window, as torch's, or to all of it alike."""
    kind, kh, kw, sh, sw, ph, pw, area, width, out_width = pool
    height = s.size // width
    gs[:] = 0
    for o in range(g.size // out_width):
        for q in range(out_width):
            grad = g[o * out_width + q]
            first = -1
            for a in range(max(0, o * sh - ph), min(height, o * sh - ph + kh)):
                for b in range(max(0, q * sw - pw), min(width, q * sw - pw + kw)):
                    at = a * width + b
                    if kind == AVG_POOL:
                        gs[at] += grad / area
                    elif first < 0 or s[at] > s[first]:
                        first = at
            if kind == MAX_POOL:
                gs[first] += grad


@kernel
def forward(begin, end, inputs, neuron, pool, outputs):
    """Steps of the planes ``begin`` to ``end``, pooled, as frames or as weighted sums of ``group`` steps.

    Args:
        inputs, neuron, pool, outputs: Inputs, Neuron, Pool and Outputs (see arguments.py).
    """
    y, _, scale, shift, v0, lengths, linear, weights, group = inputs
    out, v_out = outputs
    rest, one, zero = neuron.rest, neuron.one, neuron.zero
    size = v_out.shape[1]
    x, h, s, pooled = np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty_like(out[0, 0])
    for p in range(begin, end):
        v = v_out[p]
        if v0.size:
            _copy(v0[p], v)
        else:
            v[:] = rest
        t = 0
        for g in range(lengths.size):
            drive(y[g, p], x, scale, shift, p)
            for _ in range(lengths[g]):
                charge(x, v, h, neuron, linear[g, 0], linear[g, 1])
                reset(h, v, s, neuron)
                pool_plane(s, pooled, pool)
                row, w = out[t // group, p], weights[t] if weights.size else one
                if t % group == 0:
                    row[:] = zero
                for i in range(row.size):
                    row[i] += pooled[i] * w
                t += 1


# Sums may be taken in the order that vectorises; it is the same order every time.
@lean(fastmath={"reassoc", "nsz"})
def dot(a, b, zero):
    result = zero
    for i in range(a.size):
        result += a[i] * b[i]
    return result


@lean(fastmath={"reassoc", "nsz"})
def total(a, zero):
    result = zero
    for i in range(a.size):
        result += a[i]
    return result


@kernel
def backward(begin, end, arriving, slopes, pool, gradients):
    """Gradients of ``forward``, from y and v0 alone: a plane's steps are run again, their voltages kept for the way back.

    Args:
        arriving, slopes, pool, gradients: Arriving, Slopes, Pool and Gradients (see arguments.py); a plane is a chunk.
    """
    go, gv, y, scale, shift, v0, lengths, linear, weights, group = arriving
    gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear, _ = gradients
    rest, threshold, one, zero = slopes.rest, slopes.threshold, slopes.one, slopes.zero
    keep, rest_gain, h_gain = slopes.keep, slopes.rest_gain, slopes.h_gain
    size = gv.shape[1]
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    x, start, v = np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty(size, y.dtype)
    gx, gs, sg, s = np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty(size, y.dtype)
    pooled, gp, charged_at = np.empty_like(go[0, 0]), np.empty_like(go[0, 0]), np.empty((steps, size), y.dtype)
    for p in range(begin, end):
        if v0.size:
            _copy(v0[p], start)
        else:
            start[:] = rest
        _copy(start, v)
        t = 0
        for g in range(lengths.size):
            drive(y[g, p], x, scale, shift, p)
            for _ in range(lengths[g]):
                charge(x, v, charged_at[t], slopes, linear[g, 0], linear[g, 1])
                reset(charged_at[t], v, s, slopes)
                t += 1
        carry = gv[p].copy()
        scale_sum, shift_sum = zero, zero
        for g in range(lengths.size - 1, -1, -1):
            drive(y[g, p], x, scale, shift, p)
            gx[:] = zero
            beta, gamma = linear[g, 0], linear[g, 1]
            beta_sum, gamma_sum = zero, zero
            for _ in range(lengths[g]):
                t -= 1
                h, w = charged_at[t], weights[t] if weights.size else one
                reset(h, v, s, slopes)
                pool_plane(s, pooled, pool)
                row = go[t // group, p]
                for i in range(row.size):
                    gp[i] = row[i] * w
                if weights.size:
                    g_weights[p, t] = dot(row, pooled, zero)
                unpool_plane(gp, s, gs, pool)
                derivative(charged_at, t, sg, np.uintp(0), np.uintp(size), slopes)
                for i in range(size):
                    kept = (keep if h[i] >= threshold else one) + (rest_gain + h_gain * h[i]) * sg[i]
                    carry[i] = gs[i] * sg[i] + carry[i] * kept
                if need_linear:
                    if t:
                        reset(charged_at[t - 1], v, s, slopes)
                    else:
                        _copy(start, v)
                    for i in range(size):
                        v[i] -= rest
                    beta_sum += dot(carry, v, zero)
                    gamma_sum += dot(carry, x, zero)
                for i in range(size):
                    gx[i] += carry[i] * gamma
                    carry[i] = carry[i] * beta
            g_linear[p, g, 0], g_linear[p, g, 1] = beta_sum, gamma_sum
            if scale.size:
                a, plane = scale[p % scale.size], y[g, p]
                scale_sum += dot(gx, plane, zero)
                shift_sum += total(gx, zero)
                for i in range(size):
                    gy[g, p, i] = gx[i] * a
            else:
                _copy(gx, gy[g, p])
        if gv0.size:
            _copy(carry, gv0[p])
        g_scale[p], g_shift[p] = scale_sum, shift_sum
