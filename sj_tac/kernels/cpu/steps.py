"""The neuron's step for Numba: one neuron at a time (inlined into the tile loops) and a row at a time (for the backward).

The order of operations is SpikingJelly's (and the reference kernel's), without contraction into fused multiply-adds, so that
spikes are the same. ``tau`` is sigmoid(w) for a PLIF; decay and gain are those of a merged step.
"""

from __future__ import annotations

from functools import partial

from numba import njit

from sj_tac.host.neurons import ChargeMode
from sj_tac.kernels.cpu.arguments import Neuron, Slopes

# For functions that make no arrays: without reference counts, whose atomic increments at every call cost more than a row;
# and without the wrappers for callers outside of compiled code, which take an eighth of the time of compiling.
lean = partial(njit, error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)

# Numbers of the modes, for what is compiled.
LIF_DECAY, LIF, PLIF_DECAY, PLIF, IF, _ = (int(mode) for mode in ChargeMode)
NEURON, SLOPES = len(Neuron._fields), len(Slopes._fields)


@lean()
def charged(x, v, neuron, decay, gain):
    """h of one neuron, which is a Neuron or Slopes of its mode (see ``arguments.of_mode``): known when it is compiled."""
    mode = len(neuron) - (SLOPES if len(neuron) >= SLOPES else NEURON)
    tau, rest = neuron.tau, neuron.rest
    if mode == LIF_DECAY:
        return v + (x - (v - rest)) / tau
    if mode == LIF:
        return v - (v - rest) / tau + x
    if mode == PLIF_DECAY:
        return v + (x - (v - rest)) * tau
    if mode == PLIF:
        return v - (v - rest) * tau + x
    if mode == IF:
        return v + x
    return rest + decay * (v - rest) + gain * x


@lean()
def after(h, threshold, low, high):
    """The voltage behind the reset: ``h - threshold``, or, where both limits are the rest, that."""
    behind = h - threshold
    behind = behind if behind > low else low
    behind = behind if behind < high else high
    return behind if h >= threshold else h
