"""``fire`` on the CPU, forward and backward, compiled by Numba: one plane of one sample and channel at a time.

A plane's voltage stays in the cache while all of its steps run; what is written is the output alone. The order of operations
is SpikingJelly's (and the reference kernel's), without contraction into fused multiply-adds, so that spikes are the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sj_tac.kernels.numba_surrogate import derivative

# How a step charges; see `step`.
LIF_DECAY, LIF, PLIF_DECAY, PLIF, IF, MERGED = range(6)
NO_POOL, MAX_POOL, AVG_POOL = range(3)


@njit(cache=True, error_model="numpy")
def step(x, v, s, mode, tau, rest, threshold, hard, decay, gain, one, zero):
    """One step of a plane: voltage ``v`` in place, spikes into ``s``. One pass each, so that the compiler vectorises.

    ``tau`` is sigmoid(w) for a PLIF; decay and gain are those of a merged step.
    """
    n = v.size
    if mode == LIF_DECAY:
        for i in range(n):
            h = v[i] + (x[i] - (v[i] - rest)) / tau
            v[i] = (rest if hard else h - threshold) if h >= threshold else h
            s[i] = one if h >= threshold else zero
    elif mode == LIF:
        for i in range(n):
            h = v[i] - (v[i] - rest) / tau + x[i]
            v[i] = (rest if hard else h - threshold) if h >= threshold else h
            s[i] = one if h >= threshold else zero
    elif mode == PLIF_DECAY:
        for i in range(n):
            h = v[i] + (x[i] - (v[i] - rest)) * tau
            v[i] = (rest if hard else h - threshold) if h >= threshold else h
            s[i] = one if h >= threshold else zero
    elif mode == PLIF:
        for i in range(n):
            h = v[i] - (v[i] - rest) * tau + x[i]
            v[i] = (rest if hard else h - threshold) if h >= threshold else h
            s[i] = one if h >= threshold else zero
    elif mode == IF:
        for i in range(n):
            h = v[i] + x[i]
            v[i] = (rest if hard else h - threshold) if h >= threshold else h
            s[i] = one if h >= threshold else zero
    else:
        for i in range(n):
            h = rest + decay * (v[i] - rest) + gain * x[i]
            v[i] = (rest if hard else h - threshold) if h >= threshold else h
            s[i] = one if h >= threshold else zero


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
def halve(s, out, width):
    """MaxPool of 2x2 windows that tile the rows of ``s``: the pool of nearly every net, and vectorised."""
    half = width // 2
    for o in range(out.size // half):
        upper, lower = s[2 * o * width : (2 * o + 1) * width], s[(2 * o + 1) * width : (2 * o + 2) * width]
        row = out[o * half : (o + 1) * half]
        for q in range(half):
            row[q] = max(max(upper[2 * q], lower[2 * q]), max(upper[2 * q + 1], lower[2 * q + 1]))


@njit(cache=True, error_model="numpy")
def unhalve(g, s, gs, width, zero):
    """Gradient of ``halve``: to the first largest of each window, as torch's; without branches, so that it vectorises."""
    half = width // 2
    for o in range(g.size // half):
        upper, lower = s[2 * o * width : (2 * o + 1) * width], s[(2 * o + 1) * width : (2 * o + 2) * width]
        g_upper, g_lower = gs[2 * o * width : (2 * o + 1) * width], gs[(2 * o + 1) * width : (2 * o + 2) * width]
        row = g[o * half : (o + 1) * half]
        for q in range(half):
            a, b, c, d = upper[2 * q], upper[2 * q + 1], lower[2 * q], lower[2 * q + 1]
            largest = max(max(a, b), max(c, d))
            to_b, to_c = a < largest, max(a, b) < largest
            to_d = to_c and c < largest
            g_upper[2 * q] = zero if to_b else row[q]
            g_upper[2 * q + 1] = row[q] if to_b and not to_c else zero
            g_lower[2 * q] = row[q] if to_c and not to_d else zero
            g_lower[2 * q + 1] = row[q] if to_d else zero


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
    begin, end, y, scale, shift, v0, lengths, linear, constants, mode, hard, pool, window, sizes, weights, group, out, v_out
):
    """Steps of every plane, pooled, as frames or as weighted sums of ``group`` steps.

    Args:
        begin, end: the planes to do; threads share them (see ops.py), since each is computed alone.
        y: [G, P, H*W] drives of P = N*C planes; scale, shift: [C], or empty for none; v0, v_out: [P, H*W].
        lengths: [G] steps on each drive; linear: [G, 2] beta and gamma of ``h = r + beta (v - r) + gamma x``.
        constants: tau (or sigmoid(w)), rest, threshold, 1, 0, pool area, all of y's dtype.
        window: of the pool; sizes: width of a plane, width of a pooled plane.
        weights: [T], or empty for frames; out: [T or ceil(T / group), P, pooled H*W].
    """
    tau, rest, threshold, one, zero, area = constants
    width, out_width = sizes
    size = v0.shape[1]
    # A tile of rows whose buffers stay in the first-level cache; only pools of 2x2 or none never look across its edges.
    halves = pool == MAX_POOL and window == (2, 2, 2, 2, 0, 0) and size // width % 2 == 0 and width % 2 == 0
    tile = max(2, 1024 // width // 2 * 2) * width if halves or pool == NO_POOL else size
    for p in range(begin, end):
        x_tile, s_tile = np.empty(min(tile, size), v0.dtype), np.empty(min(tile, size), v0.dtype)
        pooled_tile = np.empty(out.shape[2], v0.dtype)
        for start in range(0, size, tile):
            stop = min(start + tile, size)
            v, x, s = v_out[p, start:stop], x_tile[: stop - start], s_tile[: stop - start]
            v[:] = v0[p, start:stop]
            first, last = start, stop
            if halves:
                first, last = start // (2 * width) * out_width, stop // (2 * width) * out_width
            elif pool != NO_POOL:
                first, last = 0, out.shape[2]
            pooled = pooled_tile[: last - first]
            t = 0
            for g in range(y.shape[0]):
                drive(y[g, p, start:stop], x, scale, shift, p)
                for _ in range(lengths[g]):
                    step(x, v, s, mode, tau, rest, threshold, hard, linear[g, 0], linear[g, 1], one, zero)
                    frame = s
                    if halves:
                        halve(s, pooled, width)
                        frame = pooled
                    elif pool != NO_POOL:
                        pool_plane(s, pooled, pool, width, window, out_width, area)
                        frame = pooled
                    if weights.size == 0:
                        out[t, p, first:last] = frame
                    else:
                        row, w = out[t // group, p, first:last], weights[t]
                        if t % group == 0:
                            for i in range(row.size):
                                row[i] = frame[i] * w
                        else:
                            for i in range(row.size):
                                row[i] += frame[i] * w
                    t += 1


@njit(cache=True, error_model="numpy")
def charge(x, v, h, mode, tau, rest, decay, gain):
    """The first half of ``step``, for the backward pass, which needs the charged voltage ``h`` itself."""
    n = v.size
    if mode == LIF_DECAY:
        for i in range(n):
            h[i] = v[i] + (x[i] - (v[i] - rest)) / tau
    elif mode == LIF:
        for i in range(n):
            h[i] = v[i] - (v[i] - rest) / tau + x[i]
    elif mode == PLIF_DECAY:
        for i in range(n):
            h[i] = v[i] + (x[i] - (v[i] - rest)) * tau
    elif mode == PLIF:
        for i in range(n):
            h[i] = v[i] - (v[i] - rest) * tau + x[i]
    elif mode == IF:
        for i in range(n):
            h[i] = v[i] + x[i]
    else:
        for i in range(n):
            h[i] = rest + decay * (v[i] - rest) + gain * x[i]


@njit(cache=True, error_model="numpy")
def reset(h, v, threshold, rest, hard):
    """The second half: the voltage behind the reset."""
    for i in range(h.size):
        v[i] = (rest if hard else h[i] - threshold) if h[i] >= threshold else h[i]


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


@njit(cache=True, error_model="numpy")
def through_reset(h, sg, gs, carry, threshold, rest, hard, detach, one, zero):
    """Gradient to h into ``carry``: of its spike, and of the voltage behind the reset, which ``carry`` brings."""
    for i in range(h.size):
        if hard:
            kept = zero if h[i] >= threshold else one
            if not detach:
                kept = kept + (rest - h[i]) * sg[i]
        else:
            kept = one if detach else one - threshold * sg[i]
        carry[i] = gs[i] * sg[i] + carry[i] * kept


@njit(cache=True, nogil=True, error_model="numpy")
def backward(
    begin, end, go, gv, y, scale, shift, v0, lengths, linear, constants, mode, hard, detach, kind, numbers, pool, window,
    sizes, weights, group, gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear,
):  # fmt: skip
    """Gradients of ``forward``, from y and v0 alone: a plane's steps are run again, their voltages kept for the way back.

    Args:
        go, gv: gradients of out and v_out; gy, gv0: gradients out, shaped as y and v0.
        g_scale, g_shift: [P]; g_linear: [P, G, 2]; g_weights: [P, T]: partial sums of every plane, to be summed outside in
            one order, whichever thread they come from.
        detach: as ``detach_reset``; kind, numbers: the surrogate; need_linear: g_linear is wanted (a PLIF).
    """
    tau, rest, threshold, one, zero, area = constants
    width, out_width = sizes
    size = v0.shape[1]
    halves = pool == MAX_POOL and window == (2, 2, 2, 2, 0, 0) and size // width % 2 == 0 and width % 2 == 0
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    for p in range(begin, end):
        v, x = v0[p].copy(), np.empty_like(v0[p])
        charged = np.empty((steps, size), y.dtype)
        t = 0
        for g in range(lengths.size):
            drive(y[g, p], x, scale, shift, p)
            for _ in range(lengths[g]):
                charge(x, v, charged[t], mode, tau, rest, linear[g, 0], linear[g, 1])
                reset(charged[t], v, threshold, rest, hard)
                t += 1
        carry, gx = gv[p].copy(), np.empty_like(v)
        gs, sg, s = np.empty_like(v), np.empty_like(v), np.empty_like(v)
        pooled, gp = np.empty_like(go[0, p]), np.empty_like(go[0, p])
        scale_sum, shift_sum = zero, zero
        for g in range(lengths.size - 1, -1, -1):
            drive(y[g, p], x, scale, shift, p)
            gx[:] = zero
            beta, gamma = linear[g, 0], linear[g, 1]
            beta_sum, gamma_sum = zero, zero
            for _ in range(lengths[g]):
                t -= 1
                h = charged[t]
                for i in range(size):
                    s[i] = one if h[i] >= threshold else zero
                frame = s
                if halves:
                    halve(s, pooled, width)
                    frame = pooled
                elif pool != NO_POOL:
                    pool_plane(s, pooled, pool, width, window, out_width, area)
                    frame = pooled
                if weights.size == 0:
                    gp[:] = go[t, p]
                else:
                    row, w = go[t // group, p], weights[t]
                    for i in range(row.size):
                        gp[i] = row[i] * w
                    g_weights[p, t] = dot(row, frame, zero)
                if halves:
                    unhalve(gp, s, gs, width, zero)
                elif pool != NO_POOL:
                    unpool_plane(gp, s, gs, pool, width, window, out_width, area)
                else:
                    gs[:] = gp
                derivative(h, threshold, sg, kind, numbers)
                through_reset(h, sg, gs, carry, threshold, rest, hard, detach, one, zero)
                if need_linear:
                    if t:
                        reset(charged[t - 1], v, threshold, rest, hard)
                    else:
                        v[:] = v0[p]
                if need_linear:
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
        gv0[p] = carry
        g_scale[p], g_shift[p] = scale_sum, shift_sum


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def forward_parallel(
    threads, planes, y, scale, shift, v0, lengths, linear, constants, mode, hard, pool, window, sizes, weights, group, out,
    v_out,
):  # fmt: skip
    """``forward`` over all planes on Numba's threads."""
    for i in prange(threads):
        forward(
            planes * i // threads, planes * (i + 1) // threads, y, scale, shift, v0, lengths, linear, constants, mode, hard,
            pool, window, sizes, weights, group, out, v_out,
        )  # fmt: skip


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def backward_parallel(
    threads, planes, go, gv, y, scale, shift, v0, lengths, linear, constants, mode, hard, detach, kind, numbers, pool,
    window, sizes, weights, group, gy, gv0, g_scale, g_shift, g_linear, g_weights, need_linear,
):  # fmt: skip
    """``backward`` over all planes on Numba's threads."""
    for i in prange(threads):
        backward(
            planes * i // threads, planes * (i + 1) // threads, go, gv, y, scale, shift, v0, lengths, linear, constants,
            mode, hard, detach, kind, numbers, pool, window, sizes, weights, group, gy, gv0, g_scale, g_shift, g_linear,
            g_weights, need_linear,
        )  # fmt: skip
