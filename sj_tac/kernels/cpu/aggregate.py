"""``aggregate`` on the CPU, compiled by Numba: weighted sums of groups of frames in one pass, and their gradients."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

# Numbers that are summed at a time, and over which a weight's gradient is summed by itself.
PIECE = 1024


@njit(cache=True, nogil=True, error_model="numpy")
def forward(begin, end, x, weights, group, out):
    """Pieces ``begin`` to ``end`` of ``out[g] = sum_j weights[g * group + j] x[g * group + j]``; x: [T, M], out: [G, M]."""
    sums = np.empty(PIECE, x.dtype)
    for piece in range(begin, end):
        start = np.uintp(piece * PIECE)
        n = np.uintp(min(PIECE, x.shape[1] - piece * PIECE))
        for g in range(out.shape[0]):
            first = g * group
            w = weights[first]
            for i in range(n):
                sums[i] = x[first, start + i] * w
            for t in range(first + 1, min(first + group, x.shape[0])):
                w = weights[t]
                for i in range(n):
                    sums[i] += x[t, start + i] * w
            for i in range(n):
                out[g, start + i] = sums[i]


@njit(error_model="numpy", fastmath={"reassoc", "nsz"})
def _dot(a, s, b, t, start, n, zero):
    result = zero
    for i in range(n):
        result += a[s, start + i] * b[t, start + i]
    return result


@njit(cache=True, nogil=True, error_model="numpy")
def backward(begin, end, go, x, weights, group, gx, g_weights, zero):
    """Gradients to x, [T, M] or [T, 0] where it is not wanted, and to the weights: [pieces, T], or [0, T]."""
    for piece in range(begin, end):
        start = np.uintp(piece * PIECE)
        n = np.uintp(min(PIECE, go.shape[1] - piece * PIECE))
        for t in range(weights.size):
            if g_weights.shape[0]:
                g_weights[piece, t] = _dot(go, t // group, x, t, start, n, zero)
            if gx.shape[1]:
                w = weights[t]
                for i in range(n):
                    gx[t, start + i] = go[t // group, start + i] * w


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def forward_parallel(threads, pieces, x, weights, group, out):
    """``forward`` over all pieces on Numba's threads."""
    for i in prange(threads):
        forward(pieces * i // threads, pieces * (i + 1) // threads, x, weights, group, out)


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def backward_parallel(threads, pieces, go, x, weights, group, gx, g_weights, zero):
    """``backward`` over all pieces on Numba's threads."""
    for i in prange(threads):
        backward(pieces * i // threads, pieces * (i + 1) // threads, go, x, weights, group, gx, g_weights, zero)
