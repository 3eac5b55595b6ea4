"""Derivatives of SpikingJelly's fused surrogates, a row at a time, for the backward pass of ``fire``.

Numbered as SpikingJelly numbers them, in the order of ``host.FUSED_SURROGATES``.
"""

from __future__ import annotations

import math

import numpy as np

from sj_tac.kernels.cpu.linked import lean

SIGMOID, ATAN, PIECEWISE_QUADRATIC, PIECEWISE_EXP, SOFT_SIGN, SUPER_SPIKE, ERF = range(7)


def numbers(alpha: float, dtype: type) -> tuple[np.floating, ...]:
    """alpha, alpha/2, alpha pi/2, alpha^2, 1/alpha, 1/(2 alpha) and alpha/sqrt(pi), in ``dtype``: the end of ``Slopes``."""
    values = (
        alpha,
        alpha / 2,
        alpha * math.pi / 2,
        alpha * alpha,
        1 / alpha,
        1 / (2 * alpha),
        alpha / math.sqrt(math.pi),
    )
    return tuple(dtype(v) for v in values)


@lean()
def derivative(h, t, out, q, n, slopes):
    """d spike / d h at ``h - threshold`` of the first ``n`` voltages h[t], into ``out`` from ``q`` on."""
    # n and q are unsigned, see tiles.py.
    kind, threshold, one, zero = slopes.kind, slopes.threshold, slopes.one, slopes.zero
    alpha, half, angle, square = slopes.alpha, slopes.half, slopes.angle, slopes.square
    inverse, soft, erf = slopes.inverse, slopes.soft, slopes.erf
    if kind == SIGMOID:
        for i in range(n):
            s = one / (one + np.exp(-alpha * (h[t, i] - threshold)))
            out[q + i] = (one - s) * s * alpha
    elif kind == ATAN:
        for i in range(n):
            z = (h[t, i] - threshold) * angle
            out[q + i] = half / (one + z * z)
    elif kind == PIECEWISE_QUADRATIC:
        for i in range(n):
            out[q + i] = max(alpha - square * abs(h[t, i] - threshold), zero)
    elif kind == PIECEWISE_EXP:
        for i in range(n):
            out[q + i] = half * np.exp(-alpha * abs(h[t, i] - threshold))
    elif kind == SOFT_SIGN:
        for i in range(n):
            z = inverse + abs(h[t, i] - threshold)
            out[q + i] = soft / (z * z)
    elif kind == SUPER_SPIKE:
        for i in range(n):
            z = one + abs(h[t, i] - threshold)
            out[q + i] = alpha / (z * z)
    else:
        for i in range(n):
            z = alpha * (h[t, i] - threshold)
            out[q + i] = erf * np.exp(-z * z)
