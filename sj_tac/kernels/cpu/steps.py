"""The neuron's step for Numba: one neuron at a time (inlined into the tile loops) and a row at a time (for the backward).

The order of operations is SpikingJelly's (and the reference kernel's), without contraction into fused multiply-adds, so that
spikes are the same. ``tau`` is sigmoid(w) for a PLIF; decay and gain are those of a merged step.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from sj_tac.host.neurons import ChargeMode
from sj_tac.kernels.cpu.arguments import Array

# For functions that make no arrays: without reference counts, whose atomic increments at every call cost more than a row;
# and without the wrappers for callers outside of compiled code, which take an eighth of the time of compiling.
lean = partial(njit, error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)

# Numbers of the modes, for what is compiled.
LIF_DECAY, LIF, PLIF_DECAY, PLIF, IF, MERGED = (int(mode) for mode in ChargeMode)

# The frame that lies first. As Python's 0 it would be a type of its own, for which Numba compiles what is called once more.
FIRST = np.intp(0)


def as_type(mode: ChargeMode) -> Array:
    """A mode as an empty array of 1 + mode dimensions, which are part of its type: a kernel is compiled for its mode.

    A branch by a number would put the loops of all six into every kernel: most of the time of compiling.
    """
    return np.empty((0,) * (1 + int(mode)), np.bool_)


@lean()
def charged(x, v, mode, tau, rest, decay, gain):
    """h of one neuron."""
    if mode.ndim == 1 + LIF_DECAY:
        return v + (x - (v - rest)) / tau
    if mode.ndim == 1 + LIF:
        return v - (v - rest) / tau + x
    if mode.ndim == 1 + PLIF_DECAY:
        return v + (x - (v - rest)) * tau
    if mode.ndim == 1 + PLIF:
        return v - (v - rest) * tau + x
    if mode.ndim == 1 + IF:
        return v + x
    return rest + decay * (v - rest) + gain * x


@lean()
def after(h, threshold, low, high):
    """The voltage behind the reset: ``h - threshold``, or, where both limits are the rest, that."""
    behind = h - threshold
    behind = behind if behind > low else low
    behind = behind if behind < high else high
    return behind if h >= threshold else h
