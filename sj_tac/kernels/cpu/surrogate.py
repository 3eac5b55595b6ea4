"""Derivatives of SpikingJelly's fused surrogates, a row at a time, for the backward pass of ``fire``.

Numbered as SpikingJelly numbers them, in the order of ``host.FUSED_SURROGATES``.
"""

from __future__ import annotations

import math

import numpy as np

from sj_tac.kernels.cpu.steps import lean

SIGMOID, ATAN, PIECEWISE_QUADRATIC, PIECEWISE_EXP, SOFT_SIGN, SUPER_SPIKE, ERF = range(7)


def constants(alpha: float, dtype: type) -> tuple[np.floating, ...]:
    """alpha, alpha/2, alpha pi/2, alpha^2, 1/alpha, 1/(2 alpha), alpha/sqrt(pi), 1 and 0, in ``dtype``.

    A Python float inside a kernel would lift its arithmetic to float64 and out of the vector registers.
    """
    values = (
        alpha,
        alpha / 2,
        alpha * math.pi / 2,
        alpha * alpha,
        1 / alpha,
        1 / (2 * alpha),
        alpha / math.sqrt(math.pi),
        1.0,
        0.0,
    )
    return tuple(dtype(v) for v in values)


@lean()
def derivative(h, t, threshold, out, q, n, kind, numbers):
    """d spike / d h at ``h - threshold`` of the first ``n`` voltages h[t], into ``out`` from ``q`` on."""
    # ``numbers`` from ``constants``; n and q are unsigned, see numba_tiles.
    alpha, half, angle, square, inverse, soft, erf, one, zero = numbers
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
