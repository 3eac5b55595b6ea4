"""What straight.py prepares: a launch of the neuron's kernel, kept by everything that it was made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.kernels import backends, fire as kernels, reference
from sj_tac.kernels.checks import WIDE
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import NO_POOL, in_registers, overlap
from sj_tac.runtime.deferred import Deferred
from sj_tac.runtime.groups import Groups, Sums
from sj_tac.runtime.runs import Inputs

if TYPE_CHECKING:
    from sj_tac.runtime.neurons import Unit

# Stands for "no launch is made for these".
NONE: Any = object()
# As many launches as a unit keeps: sizes of batches and clips that take turns.
KEPT = 16


class Launch(Protocol):
    """What runs the steps: ``kernels.cpu.launches.Launch`` or ``kernels.gpu.launches.Launch``."""

    shape: tuple[int, ...]
    last: bool

    @property
    def kernel(self) -> str:
        """Its name."""

    @property
    def reads_weights(self) -> bool:
        """Whether the sums' weights and a PLIF's w are read in every call, or are numbers in the launch."""

    @property
    def convolves(self) -> bool:
        """Whether it is given frames and weights in the place of drives."""

    def __call__(
        self,
        y: Any,
        v0: Tensor | None,
        residual: Tensor | None,
        affine: tuple[Tensor | None, Tensor | None],
        weights: Tensor | None,
        w: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]: ...


class Prepared(NamedTuple):
    """A launch, and what else does not change between the calls that it is for.

    Attributes:
        wanted: what the reader behind sums, or None for frames; lengths: steps on each drive; window: the pool's.
        inner, outer: shapes of the frames behind the pool and before it.
        narrow: the sums are of another dtype than the frames, for a reader of that dtype.
    """

    launch: Launch
    wanted: Sums | None
    lengths: list[int]
    window: tuple[int, ...] | None
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    narrow: bool = False

    def fits(self, wanted: Sums | None) -> bool:
        """Whether it makes other sums, too: weights that hang on a tensor of a device are new in every call."""
        before = self.wanted
        alike = before is not None and wanted is not None and before.size == wanted.size and before.of == wanted.of
        return alike and self.launch.reads_weights


def _is_by_channel(x: Tensor, y: Tensor) -> bool:
    """Whether a scale or shift is for drives ``y``: of their channels, on their device; half ones are widened."""
    known = x.dtype is WIDE[y.dtype] or x.dtype is y.dtype
    return known and not x.requires_grad and x.shape == y.shape[2:3] and x.device == y.device


def find(
    unit: Unit, node: Any, inputs: Inputs, wanted: Sums | None, key: tuple[Any, ...], drives: Deferred | None = None
) -> Any:
    """What was prepared for ``key``, now if not before; NONE where nothing can be. ``drives``: to be convolved as well."""
    try:
        found = unit.launches.get(key)
    except TypeError:  # a pool's options are lists
        return NONE
    if found is None or (found is not NONE and found.wanted is not wanted and not found.fits(wanted)):
        found = _prepare(unit, node, inputs, key[0], wanted, drives) or NONE
        if len(unit.launches) >= KEPT:
            unit.launches.clear()
        unit.launches[key] = found
    return found


def _prepare(
    unit: Unit, node: Any, inputs: Inputs, of: tuple[Groups, torch.dtype, Any], wanted: Sums | None, drives: Deferred | None
) -> Prepared | None:
    """A launch for such inputs; None where neither CUDA kernels run nor, on the CPU, those in registers.

    ``of``: the groups of the drives, the dtype of what is put out, and that of the frames, with their device.
    """
    (y, v, residual, scale, shift, _), (groups, emitted, kind) = inputs, of
    if y is None and drives is not None:
        y = drives.stand_in()
    assert y is not None
    window = None if unit.pool is None else host.pool_window(unit.pool)
    if not y.numel() or (window is None) is not (unit.pool is None):
        return None
    kernel, _ = kernels.choose(unit.backend, node, unit.pool, y.device, y.dtype, False)
    if kernel == reference.NAME:
        return None
    lengths = list(groups.steps)
    weights, size = (None, 1) if wanted is None else (wanted.flat, wanted.size)
    if scale is not None and shift is not None:
        if not (_is_by_channel(scale, y) and _is_by_channel(shift, y)):
            return None  # the long way has words for a norm of other channels
        scale, shift = scale.to(WIDE[y.dtype]), shift.to(WIDE[y.dtype])
    if residual is not None and residual.dtype is not y.dtype:
        # The launch reads either; the check of operands knows them alike.
        residual = residual.new_empty(1, dtype=y.dtype).expand(residual.shape)
    call = kernels.Call(y, node, lengths, v, residual, scale, shift, unit.pool, weights, size)
    o = kernels.operands(call, None)
    launch = _launch(o, kernel, None if drives is None else drives.one, emitted)
    if launch is None:
        return None
    frames = (groups.total, *y.shape[1:])
    inner = launch.shape if wanted is None else (groups.total, *launch.shape[1:])
    assert (window is None) == (o.pool == NO_POOL)
    return Prepared(launch, wanted, lengths, window, inner, frames, emitted is not kind[0])


def _launch(o: Operands, kernel: str, one: Any, emitted: torch.dtype) -> Launch | None:
    """A launch of the kernel of this name, with a convolution in it or not; None of those on the CPU that do not run in
    registers.
    """
    if one is not None and kernel in backends.ON_CUDA:
        return conv_fire.ConvLaunch(o, kernel, one)
    if kernel in backends.ON_CUDA:
        from sj_tac.kernels.gpu import launches as on_cuda

        return on_cuda.Launch(o, kernel)
    if not in_registers(o.y, o.pool, o.window, o.residual):
        return None
    from sj_tac.kernels.cpu import conv_launches, launches as on_cpu  # they import Numba

    if one is None:
        return on_cpu.Launch(o, emitted)
    fits = not overlap(o.pool, o.window) and (one.last or o.pool != NO_POOL)
    return conv_launches.ConvLaunch(o, one, emitted) if fits else None
