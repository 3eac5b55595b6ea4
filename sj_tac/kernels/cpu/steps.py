"""The neuron's step for Numba: one neuron at a time (inlined into the tile loops) and a row at a time (for the backward).

The order of operations is SpikingJelly's (and the reference kernel's), without contraction into fused multiply-adds, so that
spikes are the same. ``tau`` is sigmoid(w) for a PLIF; decay and gain are those of a merged step.
"""

from __future__ import annotations

from functools import partial

from numba import njit

# For functions that make no arrays: without reference counts, whose atomic increments at every call cost more than a row.
lean = partial(njit, error_model="numpy", _nrt=False)

LIF_DECAY, LIF, PLIF_DECAY, PLIF, IF, MERGED = range(6)


# A mode is a tuple of that length: its length is part of its type, so a kernel is compiled for each mode that is used, with
# nothing left of the others in its loops.
M0, M1, M2, M3, M4, M5 = ((True,) * (1 + i) for i in range(6))


@lean()
def charged(x, v, mode, tau, rest, decay, gain):
    """h of one neuron."""
    if len(mode) == 1 + LIF_DECAY:
        return v + (x - (v - rest)) / tau
    if len(mode) == 1 + LIF:
        return v - (v - rest) / tau + x
    if len(mode) == 1 + PLIF_DECAY:
        return v + (x - (v - rest)) * tau
    if len(mode) == 1 + PLIF:
        return v - (v - rest) * tau + x
    if len(mode) == 1 + IF:
        return v + x
    return rest + decay * (v - rest) + gain * x


@lean()
def after(h, threshold, low, high):
    """The voltage behind the reset: ``h - threshold``, or, where both limits are the rest, that."""
    behind = h - threshold
    behind = behind if behind > low else low
    behind = behind if behind < high else high
    return behind if h >= threshold else h
