"""Convolution and ``fire`` in one CUDA kernel, where frames have a few channels: a net's first layer.

The drives never reach memory. On an H200 that was faster than cuDNN's convolution and ``fire`` behind it for every layer
that was measured (docs/gpu.md), so it is taken where it can be, but for ``SJ_TAC_CONV_FIRE=0`` in the environment.
How it works: src/conv_fire.cu. The CPU's: kernels/cpu/conv_launches.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sj_tac.errors import BackendError
from sj_tac.host.neurons import ChargeMode
from sj_tac.kernels.gpu import launchers, program as cuda
from sj_tac.kernels.gpu.fire import Fire
from sj_tac.kernels.gpu.launches import Launch
from sj_tac.kernels.layout import RUNS
from sj_tac.kernels.operands import Operands

# The variable that forbids it, and the devices where it can be had.
VARIABLE = "SJ_TAC_CONV_FIRE"
DEVICES = {"cuda"}
# Input channels, at most, and the kernels and strides that there are.
FEW, KERNELS, STRIDES = 4, (3, 5, 7), (1, 2)
# Threads of a block, of them in one plane, and in one row; output channels of a thread.
BLOCK, PLANE, ROW, DEEP = 256, 64, 32, 4


def is_allowed(device: torch.device) -> bool:
    """Whether there is such a kernel for this device, and ``SJ_TAC_CONV_FIRE`` does not forbid it.

    Raises BackendError where it is neither 1 nor 0.
    """
    if device.type not in DEVICES and device.type != "cpu":
        return False
    said = os.environ.get(VARIABLE, "")
    if said not in ("", "0", "1"):
        raise BackendError(
            f"{VARIABLE}={said!r} in the environment is neither 1 nor 0; 0 forbids convolution and fire in one kernel, "
            "1 is as nothing"
        )
    return said != "0"


class Convolution(NamedTuple):
    """A convolution that the kernel can run: padding is zeros, and all is the same along rows and columns.

    Attributes:
        inputs: C_in; kernel: rows and columns of a filter; height, width: of a frame.
    """

    inputs: int
    kernel: int
    stride: int
    padding: int
    height: int
    width: int
    biased: bool


class Convolved(NamedTuple):
    """What drives are made of, all of one dtype: frames [G, N, C_in, H, W], filters [C, C_in, kernel, kernel], bias [C]."""

    frames: Tensor
    filters: Tensor
    bias: Tensor | None


def convolution(of: Convolved, options: Sequence[tuple[int, int] | int], shape: Sequence[int]) -> Convolution | None:
    """The kernel's convolution for these tensors; None where it has none.

    Args:
        options: stride, padding, dilation and groups, as torch.conv2d takes them. shape: of the output, [G, N, C, H, W].
    """
    frames, filters, bias = of
    (stride, other), (padding, also), dilation, groups = options  # type: ignore[misc]
    inputs, kernel = filters.shape[1:3]
    alike = stride == other and padding == also and kernel == filters.shape[3]
    known = dilation == (1, 1) and groups == 1 and stride in STRIDES and kernel in KERNELS and inputs <= FEW
    lies = frames.is_contiguous() and filters.is_contiguous() and (bias is None or bias.is_contiguous())
    # Maps of one pixel lie as channels_last does, whose kernels know no convolution.
    if not (alike and known and lies and frames.dtype in cuda.IO and shape[3] * shape[4] > 1 and frames.numel()):
        return None
    return Convolution(inputs, kernel, stride, padding, frames.shape[3], frames.shape[4], bias is not None)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


class Tiles(NamedTuple):
    """What decides how large the tiles of blocks may be.

    Attributes:
        columns, rows: neurons of a thread; deep: its output channels; patches: in shared memory at once.
    """

    conv: Convolution
    columns: int
    rows: int
    deep: int
    patches: int

    def needs(self, tx: int, ty: int, tz: int) -> int:
        """Bytes of shared memory of a block of tx * ty * tz threads, as conv.cuh lays it out."""
        conv = self.conv
        jump = self.columns * conv.stride
        vector = next(n for n in (4, 2, 1) if jump % n == 0)
        span = (self.columns - 1) * conv.stride + conv.kernel
        across = _up((tx - 1) * jump + _up(span, vector), 4)
        patch = conv.inputs * ((ty * self.rows - 1) * conv.stride + conv.kernel) * across
        return 4 * (_up(conv.inputs * conv.kernel**2 * tz * self.deep, 4) + self.patches * patch)

    def fitting(self, wide: int, high: int, through: int) -> tuple[int, int, int]:
        """Threads along slots, rows of slots and channels, of a map with so many: as many as fit, rows as long as may be."""
        plane = PLANE
        while plane > 1:
            row = min(ROW, plane)
            while row:
                tx = cuda.power(wide, row)
                ty = cuda.power(high, plane // tx)
                tz = cuda.power(through, BLOCK // (tx * ty))
                while tz > 4 and self.needs(tx, ty, tz) > cuda.SHARED:
                    tz //= 2
                if self.needs(tx, ty, tz) <= cuda.SHARED:
                    return tx, ty, tz
                row //= 2
            plane //= 2
        return 1, 1, 1


class ConvFire(Fire):
    """``Fire`` for drives that a convolution makes on the way; the tensor in their place only says what they are like."""

    def __init__(self, o: Operands, conv: Convolution) -> None:
        self.conv = conv
        super().__init__(o)
        merged = o.mode == ChargeMode.MERGED
        if self.last or o.residual is not None or merged:
            raise ValueError(
                f"convolution and fire in one kernel got drives {list(o.y.shape)}, a residual: {o.residual is not None}, "
                f"merged steps: {merged}; it takes maps of more than a pixel, no residual and no merged steps"
            )
        if cuda.needs_wide(self.groups * self.n * conv.inputs * conv.height * conv.width):
            self.common["WIDE"] = True

    def drives(self, y: Tensor) -> Tensor:
        """No tensor but what stands for one."""
        return y

    def stepping(self, windows: bool, out: Tensor, v: Tensor) -> tuple[cuda.Program, int]:
        """The program that convolves and takes the steps, and its blocks; ``shared`` is what each takes."""
        masks = out.dtype == torch.int32
        # A thread's neurons lie side by side in one row: two by two behind windows, else up to four.
        width = 1 if windows else cuda.widest(4, self.width, self.frame, out, v)
        macros = self.neuron_macros(windows, width) | {"MASKS": masks, "REST0": self.rests_at_zero}
        if masks:
            macros["GROUP"] = 0
        return self._tiled("conv_fire_forward", macros, width, 2)

    def convolving(self) -> tuple[cuda.Program, int]:
        """The program that makes drives alone."""
        width = cuda.widest(4, self.width, self.frame)
        # Of no neuron, so that all share it.
        macros: dict[str, int | bool] = dict.fromkeys(("MODE", "HARD", "AFFINE", "WINDOWS", "MEAN", "RESIDUAL"), 0)
        macros |= self.common | {"GROUP": 0, "WIDTH_V": width, "K": 1, "WHOLE": 1}
        return self._tiled("conv_drives", macros, width, 1)

    def _tiled(self, name: str, macros: dict[str, int | bool], width: int, patches: int) -> tuple[cuda.Program, int]:
        """A program by the tiles that its blocks have, and how many those are; ``patches``: in shared memory at once."""
        conv, side = self.conv, 2 if macros["WINDOWS"] else 1
        deep = next(d for d in (DEEP, 2, 1) if self.c % d == 0)
        wide, high = self.width // (side * width), self.height // side
        tile = Tiles(conv, side * width, side, deep, patches)
        tx, ty, tz = tile.fitting(wide, high, self.c // deep)
        self.shared = tile.needs(tx, ty, tz)
        macros |= {
            "C_IN": conv.inputs, "KERNEL": conv.kernel, "STRIDE": conv.stride, "PADDING": conv.padding, "BIAS": conv.biased,
            "TX": tx, "TY": ty, "TZ": tz, "DEEP": deep, "BLOCK": tx * ty * tz,
        }  # fmt: skip
        return cuda.program(name, **macros), self.n * -(-wide // tx) * -(-high // ty) * -(-self.c // (tz * deep))


class ConvLaunch(Launch):
    """Convolution and ``fire`` for operands like those it was made of, by one launcher; numbers in tensors may be others."""

    __slots__ = ("alone", "conv", "filters", "made", "read")
    convolves = True

    def __init__(self, o: Operands, kernel: str, conv: Convolution) -> None:
        """``o.y`` only says what the drives are like. Raises as ``Launch``."""
        groups, samples, channels = o.y.shape[:3]
        self.conv, self.made = conv, tuple(o.y.shape)
        self.read = groups, samples, conv.inputs, conv.height, conv.width
        self.filters = channels, conv.inputs, conv.kernel, conv.kernel
        super().__init__(o, kernel)

    def _call(self, o: Operands) -> Fire:
        return ConvFire(o, self.conv)

    def _prepare(self, call: Fire, o: Operands, kernel: str) -> None:
        super()._prepare(call, o, kernel)
        assert isinstance(call, ConvFire)
        program, blocks = call.convolving()
        # Not compiled before somebody asks.
        self.alone = cuda.Launch(program, blocks, self._numbers(call), call.shared, self.device)

    def _numbers(self, call: Fire) -> tuple[cuda.Argument, ...]:
        return call.call, np.int32(self.conv.height), np.int32(self.conv.width)

    def _checked(self, of: Convolved) -> Convolved:
        """The tensors, which the kernel reads without looking."""
        assert (of.frames.shape, of.filters.shape, of.bias is not None) == (self.read, self.filters, self.conv.biased)
        assert of.bias is None or of.bias.shape == self.filters[:1]
        assert all(x is None or (x.dtype is self.dtype and x.is_contiguous() and x.device == self.device) for x in of)
        return of

    def __call__(
        self,
        y: Any,
        v0: Tensor | None,
        residual: Tensor | None,
        affine: tuple[Tensor | None, Tensor | None],
        weights: Tensor | None,
        w: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As ``Launch``; ``y``: ``Convolved``, in the place of drives; residual: None."""
        assert residual is None
        rate = w.to(torch.float32).sigmoid() if self.rate and w is not None else None
        found = self._run(self._checked(y), v0, affine, weights, (rate,))
        RUNS["conv_fire", self.kernel] += 1
        return found

    def drives(self, of: Convolved) -> Tensor:
        """The drives [G, N, C, H, W], to the last bit those that a call runs its steps on."""
        read = self._checked(of)
        y = torch.empty(self.made, dtype=self.dtype, device=self.device)
        at = [0 if x is None else x.data_ptr() for x in (*read, y)]
        launchers.prepared(self.kernel, self.alone)(*at)
        return y
