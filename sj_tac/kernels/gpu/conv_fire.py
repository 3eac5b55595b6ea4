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
from sj_tac.kernels.layout import RUNS, empty
from sj_tac.kernels.operands import Operands

# The variable that forbids it, and the devices where it can be had.
VARIABLE = "SJ_TAC_CONV_FIRE"
DEVICES = {"cuda"}
# Dtypes that it reads; under autocast, others of them are cast as torch's convolution casts them.
READS = set(cuda.IO)
# Input channels, at most, and the kernels and strides that there are.
FEW, KERNELS, STRIDES = 4, (3, 5, 7), (1, 2)
# Threads of a block, of them in one plane, and in one row; output channels of a thread.
BLOCK, PLANE, ROW, DEEP = 256, 64, 32, 4
# In channels_last: channels of a thread, its neurons, and threads along the channels.
ABREAST, NEURONS, LANES = 4, 16, 64
# There, too: numbers of the next frame that a thread may hold while it works on one; threads that a multiprocessor is to
# have registers for, where filters are 3x3 and blocks have no fewer than so many.
AHEAD, THREADS, SMALLEST = 2, 1024, 128


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
        last: the output is channels_last; frames_last, filters_last: so are frames, and filters.
    """

    inputs: int
    kernel: int
    stride: int
    padding: int
    height: int
    width: int
    biased: bool
    last: bool = False
    frames_last: bool = False
    filters_last: bool = False


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
    # Maps of one pixel lie as channels_last does, whose kernels know no convolution.
    if not (alike and known and frames.dtype in cuda.IO and shape[3] * shape[4] > 1 and frames.numel()):
        return None
    lies = [_lies(frames), _lies(filters)]
    if None in lies or not (bias is None or bias.is_contiguous()):
        return None
    last = _is_last(of, options) if any(lies) or inputs == 1 else False
    found = Convolution(inputs, kernel, stride, padding, frames.shape[3], frames.shape[4], bias is not None)
    return None if last is None else found._replace(last=last, frames_last=bool(lies[0]), filters_last=bool(lies[1]))


def _lies(x: Tensor) -> bool | None:
    """Whether a tensor [..., C, H, W] is channels_last, or contiguous; None where it is neither."""
    if x.is_contiguous():
        return False
    # Of four dimensions torch knows itself, which is quicker.
    last = x.is_contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.movedim(-3, -1).is_contiguous()
    return True if last else None


def _is_last(of: Convolved, options: Sequence[tuple[int, int] | int]) -> bool | None:
    """Whether torch's own convolution puts out channels_last, or contiguous; None where nobody can say.

    It goes by the strides of both, of one channel or sample as well, and by the library that computes it.
    """
    select = getattr(torch._C, "_select_conv_backend", None)
    decide = getattr(torch._C, "_conv_determine_backend_memory_format", None)
    if select is None or decide is None:
        return None
    frames, (stride, padding, dilation, groups) = of.frames.flatten(0, 1), options
    by = select(frames, of.filters, of.bias, stride, padding, dilation, False, (0, 0), groups)
    return {torch.channels_last: True, torch.contiguous_format: False}.get(decide(frames, of.filters, by))


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


class Tiles(NamedTuple):
    """What decides how large the tiles of blocks may be.

    Attributes:
        columns, rows: neurons of a thread; channels: its output channels; patches: in shared memory at once.
    """

    conv: Convolution
    columns: int
    rows: int
    channels: int
    patches: int

    def patch(self, tx: int, ty: int) -> int:
        """Numbers that a block looks at in a frame, as conv.cuh lays them out."""
        conv = self.conv
        jump = self.columns * conv.stride
        vector = next(n for n in (4, 2, 1) if jump % n == 0)
        span = (self.columns - 1) * conv.stride + conv.kernel
        across = _up((tx - 1) * jump + _up(span, vector), 4)
        return conv.inputs * ((ty * self.rows - 1) * conv.stride + conv.kernel) * across

    def cost(self, tx: int, ty: int) -> int:
        """Numbers of a channel that it has from memory, which hands out 8 side by side at once."""
        across, down = ((n - 1) * self.conv.stride + self.conv.kernel for n in (tx * self.columns, ty * self.rows))
        return down * (across + 8)

    def needs(self, tx: int, ty: int, tz: int) -> int:
        """Bytes of shared memory of a block of tx * ty * tz threads."""
        conv = self.conv
        return 4 * (_up(conv.inputs * conv.kernel**2 * tz * self.channels, 4) + self.patches * self.patch(tx, ty))

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

    def along_channels(self, wide: int, high: int, through: int) -> tuple[int, int, int]:
        """The same in channels_last: threads first along the channels, then by the map, so that few are idle."""
        threads, most = BLOCK, -(-through // -(-through // min(LANES, BLOCK)))
        while threads:
            tz = min(most, threads)
            while tz:
                plane = 1 << (threads // tz).bit_length() - 1
                shapes = {(cuda.power(wide, 1 << i), cuda.power(high, plane >> i)) for i in range(plane.bit_length())}
                tx, ty = min(shapes, key=lambda s: (_up(wide, s[0]) * _up(high, s[1]), -s[0] * s[1], self.cost(*s), s))
                if self.needs(tx, ty, tz) <= cuda.SHARED:
                    return tx, ty, tz
                tz = -(-tz // 2) if tz > 1 else 0
            threads //= 2
        return 1, 1, 1


class ConvFire(Fire):
    """``Fire`` for drives that a convolution makes on the way; the tensor in their place only says what they are like."""

    def __init__(self, o: Operands, conv: Convolution) -> None:
        self.conv = conv
        super().__init__(o)
        merged = o.mode == ChargeMode.MERGED
        if self.height * self.width == 1 or o.residual is not None or merged:
            raise ValueError(
                f"convolution and fire in one kernel got drives {list(o.y.shape)}, a residual: {o.residual is not None}, "
                f"merged steps: {merged}; it takes maps of more than a pixel, no residual and no merged steps"
            )
        if cuda.needs_wide(self.groups * self.n * conv.inputs * conv.height * conv.width):
            self.common["WIDE"] = True

    def is_last(self, y: Tensor) -> bool:
        """As torch's convolution puts them out; of one channel, both formats are the same."""
        return self.conv.last and self.c > 1

    def drives(self, y: Tensor) -> Tensor:
        """No tensor but what stands for one."""
        return y

    def stepping(self, windows: bool, out: Tensor, v: Tensor) -> tuple[cuda.Program, int]:
        """The program that convolves and takes the steps, and its blocks; ``shared`` is what each takes."""
        masks = out.dtype == torch.int32
        width = self._abreast(windows, out, v)
        macros = self.neuron_macros(windows, width) | {"MASKS": masks, "REST0": self.rests_at_zero}
        if masks:
            macros["GROUP"] = 0
        return self._tiled("conv_fire_forward", macros, width, 2)

    def convolving(self) -> tuple[cuda.Program, int]:
        """The program that makes drives alone."""
        width = self._abreast(False)
        # Of no neuron, so that all share it.
        macros: dict[str, int | bool] = dict.fromkeys(("MODE", "HARD", "AFFINE", "WINDOWS", "MEAN", "RESIDUAL"), 0)
        macros |= self.common | {"GROUP": 0, "WIDTH_V": width, "K": 1, "WHOLE": 1}
        return self._tiled("conv_drives", macros, width, 1)

    def _abreast(self, windows: bool, *written: Tensor) -> int:
        """Slots of a thread that lie side by side in memory."""
        if self.last:
            return cuda.widest(ABREAST, self.c, self.frame, *written)
        # In one row: two by two neurons behind windows, else up to four.
        return 1 if windows else cuda.widest(4, self.width, self.frame, *written)

    def _sets(self, side: int, width: int) -> int:
        """How many sets of so many slots a thread has: by channels, or in channels_last along a row."""
        if not self.last:
            return next(d for d in (DEEP, 2, 1) if self.c % d == 0)
        most = max(1, NEURONS // (side * side * width))
        # Many share the filters that a thread has read; past the end of a row they are for nothing.
        return min((1 << i for i in range(most.bit_length())), key=lambda d: _up(self.width, side * d) * (1 + 1 / (2 * d)))

    def _tiled(self, name: str, macros: dict[str, int | bool], width: int, patches: int) -> tuple[cuda.Program, int]:
        """A program by the tiles that its blocks have, and how many those are; ``patches``: in shared memory at once."""
        conv, side = self.conv, 2 if macros["WINDOWS"] else 1
        deep = self._sets(side, width)
        along, channels = (deep, width) if self.last else (width, deep)
        wide, high, through = -(-self.width // (side * along)), self.height // side, -(-self.c // channels)
        tile = Tiles(conv, side * along, side, channels, patches)
        tx, ty, tz = (tile.along_channels if self.last else tile.fitting)(wide, high, through)
        block = tx * ty * tz
        self.shared, turns = tile.needs(tx, ty, tz), -(-tile.patch(tx, ty) // block)
        steps = self.last and patches > 1
        macros |= {
            "C_IN": conv.inputs, "KERNEL": conv.kernel, "STRIDE": conv.stride, "PADDING": conv.padding, "BIAS": conv.biased,
            "FRAMES_LAST": conv.frames_last, "FILTERS_LAST": conv.filters_last, "FITS": self.width % (side * along) == 0,
            "AHEAD": turns if steps and turns <= AHEAD else 0,
            "RESIDENT": THREADS if steps and conv.kernel == 3 and block >= SMALLEST else 0,
            "TX": tx, "TY": ty, "TZ": tz, "DEEP": deep, "BLOCK": block,
        }  # fmt: skip
        return cuda.program(name, **macros), self.n * -(-wide // tx) * -(-high // ty) * -(-through // tz)


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
        conv = self.conv
        assert (of.frames.shape, of.filters.shape, of.bias is not None) == (self.read, self.filters, conv.biased)
        assert of.bias is None or of.bias.shape == self.filters[:1]
        assert all(x is None or (x.dtype is self.dtype and x.device == self.device) for x in of)
        assert (_lies(of.frames), _lies(of.filters)) == (conv.frames_last, conv.filters_last)
        assert of.bias is None or of.bias.is_contiguous()
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
        y = empty(of.frames, list(self.made), self.conv.last, self.dtype)
        at = [0 if x is None else x.data_ptr() for x in (*read, y)]
        launchers.prepared(self.kernel, self.alone)(*at)
        return y
