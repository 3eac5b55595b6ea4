"""Derivatives of SpikingJelly's fused surrogates, a plane at a time, for the backward pass of ``fire``.

Numbered as SpikingJelly numbers them, in the order of ``host.FUSED_SURROGATES``.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

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


@njit(cache=True, error_model="numpy")
def derivative(h, threshold, out, kind, numbers):
    """d spike / d h at ``h - threshold`` into ``out``; ``numbers`` from ``constants``."""
    alpha, half, angle, square, inverse, soft, erf, one, zero = numbers
    n = h.size
    if kind == SIGMOID:
        for i in range(n):
            s = one / (one + np.exp(-alpha * (h[i] - threshold)))
            out[i] = (one - s) * s * alpha
    elif kind == ATAN:
        for i in range(n):
            z = (h[i] - threshold) * angle
            out[i] = half / (one + z * z)
    elif kind == PIECEWISE_QUADRATIC:
        for i in range(n):
            out[i] = max(alpha - square * abs(h[i] - threshold), zero)
    elif kind == PIECEWISE_EXP:
        for i in range(n):
            out[i] = half * np.exp(-alpha * abs(h[i] - threshold))
    elif kind == SOFT_SIGN:
        for i in range(n):
            z = inverse + abs(h[i] - threshold)
            out[i] = soft / (z * z)
    elif kind == SUPER_SPIKE:
        for i in range(n):
            z = one + abs(h[i] - threshold)
            out[i] = alpha / (z * z)
    else:
        for i in range(n):
            z = alpha * (h[i] - threshold)
            out[i] = erf * np.exp(-z * z)
