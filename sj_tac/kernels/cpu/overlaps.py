"""``fire`` on the CPU for MaxPool of 3x3 windows, stride 2, padding 1, compiled by Numba: sheets of cells, contiguous.

In channels_last it is overlaps_last.py's.
"""

from __future__ import annotations

import numpy as np

from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.linked import lean
from sj_tac.kernels.cpu.sheets import (
    any_fired,
    cells,
    fill_inside,
    find_fired,
    load,
    locate,
    store,
    store_windows,
)
from sj_tac.kernels.cpu.steps import (
    AS_IF,
    AS_LIF,
    AS_LIF_DECAY,
    AS_MERGED,
    AS_PLIF,
    AS_PLIF_DECAY,
    FIRST,
    IF,
    LIF,
    LIF_DECAY,
    PLIF,
    PLIF_DECAY,
    after,
    charged,
)

# Neurons of the rows of cells that run all steps together, so that their voltages stay in the cache.
STRIP = 8192


@lean()
def _advance(x, v, h, t, n, mode, neuron, linear):
    decay, gain = linear
    tau, rest, threshold, low, high = neuron.tau, neuron.rest, neuron.threshold, neuron.low, neuron.high
    for i in range(n):
        voltage = charged(x[i], v[i], mode, tau, rest, decay, gain)
        h[t, i] = voltage
        v[i] = after(voltage, threshold, low, high)


@lean()
def advance(x, v, h, t, n, neuron, linear):
    """One step of ``n`` neurons: charged voltages into h[t], and the reset; linear: beta and gamma."""
    mode = neuron.mode
    if mode == LIF_DECAY:
        _advance(x, v, h, t, n, AS_LIF_DECAY, neuron, linear)
    elif mode == LIF:
        _advance(x, v, h, t, n, AS_LIF, neuron, linear)
    elif mode == PLIF_DECAY:
        _advance(x, v, h, t, n, AS_PLIF_DECAY, neuron, linear)
    elif mode == PLIF:
        _advance(x, v, h, t, n, AS_PLIF, neuron, linear)
    elif mode == IF:
        _advance(x, v, h, t, n, AS_IF, neuron, linear)
    else:
        _advance(x, v, h, t, n, AS_MERGED, neuron, linear)


@lean()
def _add(sums, fired, n, block, row, w, zero):
    """The sums of windows in which a neuron fires grow by ``w``."""
    for i in range(n):
        sums[i] += w if any_fired(fired, 0, i, block, row) else zero


@kernel
def forward(begin, end, inputs, neuron, layout, outputs):
    """All steps of the sheets ``begin`` to ``end``, as frames or as weighted sums of ``group`` steps.

    Args:
        inputs, neuron, layout, outputs: Inputs, without a residual, Neuron, Sheets and Outputs (see arguments.py).
    """
    y, _, scale, shift, v0, lengths, linear, weights, group = inputs
    out, v_out = outputs
    rest, threshold, one, zero = neuron.rest, neuron.threshold, neuron.one, neuron.zero
    size = v_out.size
    height, width = cells(layout)
    affine, none = (scale, shift), (scale[:0], shift[:0])
    steps = 0
    for g in range(lengths.size):
        steps += lengths[g]
    emitted = out.size // (-(-steps // group))
    most = max(1, min(height, STRIP // (4 * (width + 1) * layout.block)))
    capacity = most * (width + 1) * layout.block
    x, v, h = np.empty(4 * capacity, y.dtype), np.empty(4 * capacity, y.dtype), np.empty((1, 4 * capacity), y.dtype)
    sums, inside = np.empty(capacity, y.dtype), np.empty(capacity, np.int32)
    fired = np.empty((1, (most + 1) * (width + 1) * layout.block + layout.block), np.int32)
    # What has fired in the last row of cells above the strip, at every step.
    edge = np.empty((steps, (width + 1) * layout.block), np.int32)
    for p in range(begin, end):
        _, _, block = locate(p, layout)
        row = (width + 1) * block
        margin = np.uintp(row + block)
        edge[:], fired[:] = 0, 0
        for first in range(0, height, most):
            rows = (first, min(first + most, height))
            corner = np.uintp((rows[1] - first) * row)
            n = np.uintp(4) * corner
            fill_inside(inside, rows, block, layout)
            x[:] = zero
            v[:] = rest
            if v0.size:
                load(v0, FIRST, p, rows, v, none, layout)
            t = 0
            for g in range(lengths.size):
                load(y, g * size, p, rows, x, affine, layout)
                for _ in range(lengths[g]):
                    if t % group == 0:
                        sums[:] = zero
                    advance(x, v, h, FIRST, n, neuron, (linear[g, 0], linear[g, 1]))
                    find_fired(h, FIRST, corner, inside, fired, margin, threshold)
                    for i in range(row):
                        fired[0, block + i] = edge[t, i]
                        edge[t, i] = fired[0, corner + np.uintp(block + i)]
                    w = weights[t] if weights.size else one
                    _add(sums, fired, corner, np.uintp(block), np.uintp(row), w, zero)
                    t += 1
                    if t % group == 0 or t == steps:
                        store_windows(sums, p, rows, out, (t - 1) // group * emitted, layout)
            store(v, p, rows, v_out, FIRST, layout)
