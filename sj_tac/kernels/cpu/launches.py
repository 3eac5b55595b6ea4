"""``fire`` forward on the CPU, prepared once for drives of one shape and one neuron: a call makes arrays and runs it.

What ``fire.forward`` finds out on every call costs as much as a small map itself: checks, numbers of the neuron, shapes,
and which kernel it is. A launch knows all that; whoever keeps one must ask for another where any of it has changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sj_tac.kernels.backends import NUMBA
from sj_tac.kernels.checks import WIDE, check_fire, emitted_shape
from sj_tac.kernels.cpu import costs, fire, forward, overlaps_last, threads
from sj_tac.kernels.cpu.arguments import Inputs, Outputs
from sj_tac.kernels.cpu.threads import flat, frames_or_none, share, vector
from sj_tac.kernels.layout import RUNS, is_channels_last
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import NAMES, in_registers, overlap


class Launch:
    """The forward of ``fire`` for operands like those it was made of.

    What may be other in a call are the numbers in the tensors of drives, voltages, residual, scale and shift. Their
    shapes, dtypes and memory formats, and which of them are None, may not; voltages and residual may lie in any format.
    The weights of the sums and a PLIF's w are numbers in the launch. The output's dtype may be another than the drives': one
    of float32 and bfloat16 each; so may the residual's.
    """

    kernel = NUMBA
    reads_weights = convolves = False

    # fmt: off
    __slots__ = (
        "added", "affine", "dense", "dtype", "frame", "last", "layout", "neuron", "no_frames", "none", "out", "rest",
        "run", "shape", "size", "units", "v", "work",
    )
    # fmt: on

    def __init__(self, o: Operands, dtype: torch.dtype | None = None) -> None:
        """Raises ValueError where the operands do not fit each other, or are for other kernels."""
        check_fire(o)
        y, in_cells = o.y, overlap(o.pool, o.window)
        self.last = is_channels_last(y)
        if not in_registers(y, o.pool, o.window, o.residual) or not y.numel():
            raise ValueError(
                f"a launch is made for drives that kernels run in registers; it got {list(y.shape)}, channels_last: "
                f"{self.last}, {NAMES[o.pool]} of windows {list(o.window)}, a residual: {o.residual is not None}"
            )
        self.run = overlaps_last.forward if in_cells else forward.forward
        self.dtype = y.dtype if dtype is None else dtype
        self.dense = y.is_contiguous() and y.dtype is not torch.bfloat16
        self.shape = emitted_shape(o)
        self.out, self.v = self._lying(self.shape), self._lying(tuple(y.shape[1:]))
        self.none, self.no_frames = vector(None, y), frames_or_none(None, self.last, y)
        self.neuron = fire.neuron_of_tiles(o)
        self.layout: Any
        self.units, self.layout = fire._sheets(o, True, fire.BLOCK) if in_cells else fire._tiles(o, self.last)
        steps = fire._steps_of(tuple(o.lengths))
        # In the order of Inputs, behind the voltages.
        self.rest = (steps, fire._linear(o).copy(), vector(o.weights, y).copy(), o.group)
        self.size, self.frame = y.numel(), y[0].numel()
        self.affine = 0 if o.scale is None else y.shape[2]
        steps_in_all = self.frame * sum(o.lengths)
        self.work = costs.forward(steps_in_all, self.layout)
        self.added = 0 if o.residual is None else steps_in_all

    def _lying(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape in the order in which its numbers lie."""
        return (*shape[:-3], shape[-2], shape[-1], shape[-3]) if self.last else shape

    def __call__(
        self,
        y: Tensor,
        v0: Tensor | None,
        residual: Tensor | None,
        affine: tuple[Tensor | None, Tensor | None],
        *_: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Output and last voltages, as ``fire`` gives them; ``affine``: scale and shift; weights and w are not read."""
        dtype, wide = self.dtype, WIDE[y.dtype]
        out = torch.empty(self.out, dtype=dtype, device="cpu")
        v = torch.empty(self.v, dtype=wide, device="cpu")
        none, (scale, shift) = self.none, affine
        drives = y.numpy().reshape(-1) if self.dense else flat(y, self.last, y)
        added = self.no_frames if residual is None else flat(residual, self.last, y)
        voltages = none if v0 is None else flat(v0, self.last, y)
        if scale is None or shift is None:
            scales = shifts = none
        elif scale.dtype is shift.dtype is wide and scale.is_contiguous() and shift.is_contiguous():
            # ``vector`` without its call, which counts here.
            scales, shifts = scale.numpy(), shift.numpy()
        else:
            scales, shifts = vector(scale, y), vector(shift, y)
        # The kernel reads without looking.
        assert (drives.size, added.size, scales.size, shifts.size) == (self.size, self.added, self.affine, self.affine)
        assert v0 is None or voltages.size == self.frame
        # Past NamedTuple's own function.
        read = tuple.__new__(Inputs, (drives, added, scales, shifts, voltages, *self.rest))
        put_out = (out.view(torch.int16) if dtype is torch.bfloat16 else out).numpy().reshape(-1)
        written = tuple.__new__(Outputs, (put_out, v.numpy().reshape(-1)))
        if self.work < threads.ALONE:
            self.run.serial(0, self.units, read, self.neuron, self.layout, written)
        else:
            share(self.run, self.units, self.work, read, self.neuron, self.layout, written)
        RUNS["fire", "numba"] += 1
        # Detached, a view is none: who detaches the voltage in place must not meet one.
        return (out.movedim(-1, -3), v.movedim(-1, -3).detach()) if self.last else (out, v)
