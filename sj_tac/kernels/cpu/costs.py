"""How long kernels take on one thread, in nanoseconds: whether more threads are worth their start (threads.py).

Measured on an AMD EPYC, and right within a factor of about three there.
"""

from __future__ import annotations

from typing import Any

from sj_tac.kernels.cpu.arguments import OddWindows, Sheets, Windows

# Of a neuron's step: straight from where drives lie; in contiguous windows; on maps that windows do not fill; in cells of
# overlapping windows, channels_last; in sheets of them, channels_last (backward alone) and contiguous; over planes.
STEP, IN_WINDOWS, ON_ODD_MAPS = 0.15, 0.4, 1.0
IN_CELLS, IN_SHEETS, IN_CONTIGUOUS_SHEETS, ON_PLANES = 0.2, 0.45, 1.0, 1.8
# Of a number: in sums of frames, and in their gradients.
SUMMED, SUMMED_BACK = 0.2, 0.5


def forward(steps: int, layout: Any) -> int:
    """Of so many neurons' steps, by how they lie: Neurons, Windows, OddWindows, Sheets; None for planes."""
    return int(steps * (IN_CELLS if isinstance(layout, Sheets) and layout.last else _of_each(layout)))


def backward(steps: int, layout: Any) -> int:
    """Of their backward, which takes the steps once more, back and with a surrogate's derivative."""
    return 3 * int(steps * _of_each(layout)) + steps // 2


def _of_each(layout: Any) -> float:
    """Of a step by tiles, sheets or planes."""
    if layout is None:
        return ON_PLANES
    if isinstance(layout, Sheets):
        return IN_SHEETS if layout.last else IN_CONTIGUOUS_SHEETS
    if isinstance(layout, OddWindows):
        return ON_ODD_MAPS
    return IN_WINDOWS if isinstance(layout, Windows) and not layout.last else STEP
