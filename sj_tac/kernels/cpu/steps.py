"""The neuron's step for Numba: one neuron at a time (inlined into the tile loops) and a row at a time (for the backward).

The order of operations is SpikingJelly's (and the reference kernel's), without contraction into fused multiply-adds, so that
spikes are the same. ``tau`` is sigmoid(w) for a PLIF; decay and gain are those of a merged step.
"""

from __future__ import annotations

import numpy as np

from sj_tac.host.neurons import ChargeMode
from sj_tac.kernels.cpu.linked import lean

# Numbers of the modes, for what is compiled.
LIF_DECAY, LIF, PLIF_DECAY, PLIF, IF, MERGED = (int(mode) for mode in ChargeMode)
# A mode as a type: a tuple of that length, which is part of its type, so that a loop is compiled for each mode, with nothing
# left of the others in it.
AS_LIF_DECAY, AS_LIF, AS_PLIF_DECAY, AS_PLIF, AS_IF, AS_MERGED = ((True,) * (1 + int(mode)) for mode in ChargeMode)

# The frame that lies first. As Python's 0 it would be a type of its own, for which Numba compiles what is called once more.
FIRST = np.intp(0)


@lean()
def resting(rest, zero):
    """The voltage at rest, of which None stands for 0."""
    return zero if rest is None else rest


@lean()
def above(v, rest):
    """``v - rest``."""
    return v if rest is None else v - rest


@lean()
def charged(x, v, mode, tau, rest, decay, gain):
    """h of one neuron; ``rest``: None for 0, which costs nothing."""
    if len(mode) == 1 + LIF_DECAY:
        return v + (x - above(v, rest)) / tau
    if len(mode) == 1 + LIF:
        return v - above(v, rest) / tau + x
    if len(mode) == 1 + PLIF_DECAY:
        return v + (x - above(v, rest)) * tau
    if len(mode) == 1 + PLIF:
        return v - above(v, rest) * tau + x
    if len(mode) == 1 + IF:
        return v + x
    if rest is None:
        return decay * v + gain * x
    return rest + decay * (v - rest) + gain * x


@lean()
def after(h, threshold, low, high):
    """The voltage behind the reset: ``h - threshold`` within its limits; with a ``high`` of None it is ``low``."""
    if high is None:
        return low if h >= threshold else h
    behind = h - threshold
    behind = behind if behind > low else low
    behind = behind if behind < high else high
    return behind if h >= threshold else h
