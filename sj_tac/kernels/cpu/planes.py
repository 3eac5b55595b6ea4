"""``fire`` on the CPU for the pools that the tiles do not know, compiled by Numba: one plane of a sample at a time.

Contiguous layout only. It is slower than the tiles: a step is several passes over the plane.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sj_tac.kernels.cpu.steps import M0, M1, M2, M3, M4, M5, after, charged
from sj_tac.kernels.cpu.surrogate import derivative
from sj_tac.kernels.pools import AVG_POOL, MAX_POOL


@njit(error_model="numpy")
def _charge(x, v, h, mode, tau, rest, decay, gain):
    for i in range(v.size):
        h[i] = charged(x[i], v[i], mode, tau, rest, decay, gain)


@njit(cache=True, error_model="numpy")
def charge(x, v, h, mode, tau, rest, decay, gain):
    """Charged voltages of a plane."""
    if mode == 0:
        _charge(x, v, h, M0, tau, rest, decay, gain)
    elif mode == 1:
        _charge(x, v, h, M1, tau, rest, decay, gain)
    elif mode == 2:
        _charge(x, v, h, M2, tau, rest, decay, gain)
    elif mode == 3:
        _charge(x, v, h, M3, tau, rest, decay, gain)
    elif mode == 4:
        _charge(x, v, h, M4, tau, rest, decay, gain)
    else:
        _charge(x, v, h, M5, tau, rest, decay, gain)


@njit(cache=True, error_model="numpy")
def reset(h, v, s, threshold, low, high, one, zero):
    """Voltages behind the reset, and spikes."""
    for i in range(h.size):
        v[i] = after(h[i], threshold, low, high)
        s[i] = one if h[i] >= threshold else zero


@njit(cache=True, error_model="numpy")
def drive(y, x, scale, shift, plane):
    """The BatchNorm's affine map of one plane."""
    if scale.size:
        a, b = scale[plane % scale.size], shift[plane % scale.size]
        for i in range(y.size):
            x[i] = y[i] * a + b
    else:
        x[:] = y


@njit(cache=True, error_model="numpy")
def pool_plane(s, out, kind, width, window, out_width, area):
    """Max or mean over the windows of one plane; ``window`` is (kh, kw, sh, sw, ph, pw)."""
    kh, kw, sh, sw, ph, pw = window
    height = s.size // width
    for o in range(out.size // out_width):
        for q in range(out_width):
            best = s[0] - s[0]
            for a in range(max(0, o * sh - ph), min(height, o * sh - ph + kh)):
                for b in range(max(0, q * sw - pw), min(width, q * sw - pw + kw)):
                    value = s[a * width + b]
                    best = max(best, value) if kind == MAX_POOL else best + value
            out[o * out_width + q] = best if kind == MAX_POOL else best / area


@njit(cache=True, error_model="numpy")
def unpool_plane(g, s, gs, kind, width, window, out_width, area):
    """Gradient of ``pool_plane``: to the first largest of each window, as torch's, or to all of it alike."""
    kh, kw, sh, sw, ph, pw = window
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


@njit(cache=True, nogil=True, error_model="numpy")
def forward(
    begin, end, y, scale, shift, v0, lengths, linear, constants, mode, area, pool, window, sizes, weights, group, out, v_out
):
    """Steps of the planes ``begin`` to ``end``, pooled, as frames or as weighted sums of ``group`` steps.

    Args:
        y: [G, P, H*W] drives of P = N*C planes; v0: [P, H*W], or empty; the rest as in numba_forward, but for
        pool, window, area: MAX_POOL or AVG_POOL, (kh, kw, sh, sw, ph, pw) and what a mean divides by.
        sizes: width of a plane, width of a pooled plane; out: [T or ceil(T / group), P, pooled H*W]; v_out: [P, H*W].
    """
    tau, rest, threshold, low, high, one, zero = constants
    width, out_width = sizes
    size = v_out.shape[1]
    x, h, s, pooled = np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty_like(out[0, 0])
    for p in range(begin, end):
        v = v_out[p]
        if v0.size:
            v[:] = v0[p]
        else:
            v[:] = rest
        t = 0
        for g in range(lengths.size):
            drive(y[g, p], x, scale, shift, p)
            for _ in range(lengths[g]):
                charge(x, v, h, mode, tau, rest, linear[g, 0], linear[g, 1])
                reset(h, v, s, threshold, low, high, one, zero)
                pool_plane(s, pooled, pool, width, window, out_width, area)
                row, w = out[t // group, p], weights[t] if weights.size else one
                if t % group == 0:
                    row[:] = zero
                for i in range(row.size):
                    row[i] += pooled[i] * w
                t += 1


# Sums may be taken in the order that vectorises; it is the same order every time.
@njit(cache=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def dot(a, b, zero):
    result = zero
    for i in range(a.size):
        result += a[i] * b[i]
    return result


@njit(cache=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def total(a, zero):
    result = zero
    for i in range(a.size):
        result += a[i]
    return result


@njit(cache=True, nogil=True, error_model="numpy")
def backward(
    begin, end, go, gv, y, scale, shift, v0, lengths, linear, constants, mode, resets, kind, numbers, area, pool, window,
    sizes, weights, group, gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear,
):  # fmt: skip
    """Gradients of ``forward``, from y and v0 alone: a plane's steps are run again, their voltages kept for the way back.

    Args:
        go, gv: gradients of out and v_out; gy, gv0: gradients out, shaped as y and v0.
        g_scale, g_shift: [P]; g_linear: [P, G, 2]; g_weights: [P, T]: partial sums of every plane, to be summed outside in
            one order, whichever thread they come from.
        resets, kind, numbers, need_linear: as in numba_backward.
    """
    tau, rest, threshold, low, high, one, zero = constants
    keep, rest_gain, h_gain = resets
    width, out_width = sizes
    size = gv.shape[1]
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    x, start, v = np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty(size, y.dtype)
    gx, gs, sg, s = np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty(size, y.dtype), np.empty(size, y.dtype)
    pooled, gp, charged_at = np.empty_like(go[0, 0]), np.empty_like(go[0, 0]), np.empty((steps, size), y.dtype)
    for p in range(begin, end):
        if v0.size:
            start[:] = v0[p]
        else:
            start[:] = rest
        v[:] = start
        t = 0
        for g in range(lengths.size):
            drive(y[g, p], x, scale, shift, p)
            for _ in range(lengths[g]):
                charge(x, v, charged_at[t], mode, tau, rest, linear[g, 0], linear[g, 1])
                reset(charged_at[t], v, s, threshold, low, high, one, zero)
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
                reset(h, v, s, threshold, low, high, one, zero)
                pool_plane(s, pooled, pool, width, window, out_width, area)
                row = go[t // group, p]
                for i in range(row.size):
                    gp[i] = row[i] * w
                if weights.size:
                    g_weights[p, t] = dot(row, pooled, zero)
                unpool_plane(gp, s, gs, pool, width, window, out_width, area)
                derivative(charged_at, t, threshold, sg, np.uintp(0), np.uintp(size), kind, numbers)
                for i in range(size):
                    kept = (keep if h[i] >= threshold else one) + (rest_gain + h_gain * h[i]) * sg[i]
                    carry[i] = gs[i] * sg[i] + carry[i] * kept
                if need_linear:
                    if t:
                        reset(charged_at[t - 1], v, s, threshold, low, high, one, zero)
                    else:
                        v[:] = start
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
                gy[g, p] = gx
        if gv0.size:
            gv0[p] = carry
        g_scale[p], g_shift[p] = scale_sum, shift_sum


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def forward_parallel(
    threads, planes, y, scale, shift, v0, lengths, linear, constants, mode, area, pool, window, sizes, weights, group, out,
    v_out,
):  # fmt: skip
    """``forward`` over all planes on Numba's threads."""
    for i in prange(threads):
        forward(
            planes * i // threads, planes * (i + 1) // threads, y, scale, shift, v0, lengths, linear, constants, mode, area,
            pool, window, sizes, weights, group, out, v_out,
        )  # fmt: skip


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def backward_parallel(
    threads, planes, go, gv, y, scale, shift, v0, lengths, linear, constants, mode, resets, kind, numbers, area, pool,
    window, sizes, weights, group, gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear,
):  # fmt: skip
    """``backward`` over all planes on Numba's threads."""
    for i in prange(threads):
        backward(
            planes * i // threads, planes * (i + 1) // threads, go, gv, y, scale, shift, v0, lengths, linear, constants,
            mode, resets, kind, numbers, area, pool, window, sizes, weights, group, gy, gv0, g_scale, g_shift, g_linear,
            g_weights, need_linear,
        )  # fmt: skip
