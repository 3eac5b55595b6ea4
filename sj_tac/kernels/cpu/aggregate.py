"""``aggregate`` on the CPU, compiled by Numba: weighted sums of groups of frames in one pass, and their gradients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sj_tac.kernels.cpu.arguments import Array
from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.halves import narrowed, widened
from sj_tac.kernels.cpu.linked import lean

# Numbers that are summed at a time, and over which a weight's gradient is summed by itself.
PIECE = 1024


class Frames(NamedTuple):
    """What ``backward`` reads: the gradient [G, M] of the sums, and the frames [T, M] and weights [T] that were summed.

    Frames and their gradients may be bits of bfloat16, as int16 (see halves.py), with weights in float32.
    """

    go: Array
    x: Array
    weights: Array


class Gradients(NamedTuple):
    """What ``backward`` writes: to the frames [T, M], and to the weights [pieces, T]; of size 0 what is not wanted."""

    x: Array
    weights: Array


@kernel
def forward(begin, end, x, weights, group, out):
    """Pieces ``begin`` to ``end`` of ``out[g] = sum_j weights[g * group + j] x[g * group + j]``; x: [T, M], out: [G, M]."""
    sums = np.empty(PIECE, weights.dtype)
    for piece in range(begin, end):
        start = np.uintp(piece * PIECE)
        n = np.uintp(min(PIECE, x.shape[1] - piece * PIECE))
        for g in range(out.shape[0]):
            first = g * group
            w = weights[first]
            for i in range(n):
                sums[i] = widened(x[first, start + i]) * w
            for t in range(first + 1, min(first + group, x.shape[0])):
                w = weights[t]
                for i in range(n):
                    sums[i] += widened(x[t, start + i]) * w
            for i in range(n):
                out[g, start + i] = narrowed(sums[i], out)


@lean(fastmath={"reassoc", "nsz"})
def _dot(a, s, b, t, start, n, zero):
    result = zero
    for i in range(n):
        result += widened(a[s, start + i]) * widened(b[t, start + i])
    return result


@kernel
def backward(begin, end, frames, group, zero, gradients):
    """Gradients of ``forward`` from pieces ``begin`` to ``end``; zero is of the weights' dtype."""
    go, x, weights = frames
    gx, g_weights = gradients
    for piece in range(begin, end):
        start = np.uintp(piece * PIECE)
        n = np.uintp(min(PIECE, go.shape[1] - piece * PIECE))
        for t in range(weights.size):
            if g_weights.shape[0]:
                g_weights[piece, t] = _dot(go, t // group, x, t, start, n, zero)
            if gx.shape[1]:
                w = weights[t]
                for i in range(n):
                    gx[t, start + i] = narrowed(widened(go[t // group, start + i]) * w, gx)
