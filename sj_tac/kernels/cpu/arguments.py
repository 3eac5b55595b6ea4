"""What the compiled kernels are called with. Numba takes a NamedTuple apart, so that a field costs what an argument does.

All arrays are of one dtype, float32 or float64, and so are the numbers of a neuron: a Python float inside a kernel would
lift its arithmetic to float64 and out of the vector registers. Frames (drives, residual, output and their gradients) may be
the bits of bfloat16 instead, as int16, with float32 for the rest (see halves.py). An array that is not wanted is empty.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np

from sj_tac.host.neurons import ChargeMode

Array = np.ndarray[Any, Any]
Number = np.floating[Any]


class Inputs(NamedTuple):
    """What ``forward`` reads.

    Attributes:
        y: [G, M] drives, one after the other, a frame of M = N*C*H*W in its own layout; planes: [G, N*C, H*W].
        residual: [T, M]; scale, shift: [C]; v0: [M], or empty for voltages at rest; planes: [N*C, H*W].
        lengths: [G] steps on each drive; linear: [G, 2] beta and gamma of ``h = r + beta (v - r) + gamma x``.
        weights: [T], or empty for frames; group: how many steps are summed.
    """

    y: Array
    residual: Array
    scale: Array
    shift: Array
    v0: Array
    lengths: Array
    linear: Array
    weights: Array
    group: int


class Arriving(NamedTuple):
    """What ``backward`` reads: the gradients ``go`` of the output and ``gv`` of the last voltages, and as ``Inputs``."""

    go: Array
    gv: Array
    y: Array
    scale: Array
    shift: Array
    v0: Array
    lengths: Array
    linear: Array
    weights: Array
    group: int


class Neuron(NamedTuple):
    """A neuron's step: a ChargeMode, tau (sigmoid(w) for a PLIF), and the limits of the voltage behind the reset.

    For tiles, its type is one of ``NEURONS_OF_TILES``, and one that resets hard to 0, as most do, has None for rest and
    high, which stand for 0 and for low: types of their own, for which steps are compiled with less in them.
    """

    mode: int
    tau: Number
    rest: Number
    threshold: Number
    low: Number
    high: Number
    one: Number
    zero: Number


def _of_mode(mode: ChargeMode) -> Any:
    """``Neuron`` as a type of its own for a mode: a kernel is compiled for the one that is used."""
    made: Any = namedtuple(f"Neuron{mode.name}", Neuron._fields)  # type: ignore[misc]
    made.as_type = (True,) * (1 + int(mode))  # type: ignore[attr-defined]  # see steps.py
    return made


# For tiles, by mode.
NEURONS_OF_TILES = tuple(_of_mode(mode) for mode in sorted(ChargeMode))
# By their names, too, as Numba's cache on disk finds them.
NeuronLIF_DECAY, NeuronLIF, NeuronPLIF_DECAY, NeuronPLIF, NeuronIF, NeuronMERGED = NEURONS_OF_TILES


class Slopes(NamedTuple):
    """A neuron's step as ``Neuron``, and its derivatives.

    Attributes:
        keep, rest_gain, h_gain: d v / d h of the reset is ``keep`` where it fired, else 1, plus ``rest_gain + h_gain h``
            times the surrogate.
        kind: the surrogate's number; alpha and the rest: see ``surrogate.numbers``.
    """

    mode: int
    tau: Number
    rest: Number
    threshold: Number
    low: Number
    high: Number
    one: Number
    zero: Number
    keep: Number
    rest_gain: Number
    h_gain: Number
    kind: int
    alpha: Number
    half: Number
    angle: Number
    square: Number
    inverse: Number
    soft: Number
    erf: Number


class Neurons(NamedTuple):
    """Tiles whose slots are neurons: channels_last or contiguous; size of a map, and how many of them a sample has."""

    last: bool
    height: int
    width: int
    channels: int


class Windows(NamedTuple):
    """Tiles whose slots are windows of 2x2 neurons. The field more than in ``Neurons`` is what a kernel knows them by."""

    last: bool
    height: int
    width: int
    channels: int
    corners: int = 4


class OddWindows(NamedTuple):
    """Windows on a map of odd height or width, as if it were one larger. Known by its field more than in ``Windows``.

    The windows at its lower and right edge have two neurons, or one, and put nothing out: the pool has none there.
    """

    last: bool
    height: int
    width: int
    channels: int
    corners: int = 4
    odd: bool = True


class Sheets(NamedTuple):
    """Sheets of a frame: channels_last or contiguous; size of a frame, and how many channels a sheet has (contiguous: 1)."""

    last: bool
    height: int
    width: int
    channels: int
    block: int


class Pool(NamedTuple):
    """A pool over planes: MAX_POOL or AVG_POOL, its windows, what a mean divides by, widths of a plane before and behind."""

    kind: int
    kh: int
    kw: int
    sh: int
    sw: int
    ph: int
    pw: int
    area: Number
    width: int
    out_width: int


class Outputs(NamedTuple):
    """What ``forward`` writes: [T or ceil(T / group), emitted] and the last voltages [M]; planes: as ``Inputs``."""

    out: Array
    v: Array


class Gradients(NamedTuple):
    """What ``backward`` writes.

    Attributes:
        y, v0: as the inputs.
        scale, shift: [planes], or [chunks * C] in channels_last, zeros; linear: [chunks, G, 2] and weights: [chunks, T],
            zeros: partial sums of every chunk, to be summed outside in one order, whichever thread they come from.
        need_linear: ``linear`` is wanted (a PLIF). chunk: slots of a chunk; planes: 1.
    """

    y: Array
    v0: Array
    scale: Array
    shift: Array
    linear: Array
    weights: Array
    need_linear: bool
    chunk: int
