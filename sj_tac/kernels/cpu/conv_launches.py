"""Convolution and ``fire`` in one kernel on the CPU, for frames of a few channels: a net's first layer.

That convolution's output is the largest tensor of a net. Here it is never written: each tile's drives are made in front of
its steps (convolving.py in channels_last, sliding.py in contiguous memory, with a MaxPool of 2 x 2 windows). They are those
of torch's own convolution to the last bit where that takes its sums in the same order, which depends on the processor, the
library and the shapes. So each shape is checked once, before the kernel runs: every number of torch's output on random
frames and weights is compared. In bfloat16 it runs where the processor computes in that, by the same instruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import config
from torch import Tensor

from sj_tac.host.arrays import lent
from sj_tac.kernels.cpu import costs, forward, halves, sources
from sj_tac.kernels.cpu.arguments import Convolved, ConvolvedInputs, Neurons, OddWindows, Outputs, SlidInputs, Windows
from sj_tac.kernels.cpu.conv_sources import source_of, with_room
from sj_tac.kernels.cpu.launches import Launch
from sj_tac.kernels.cpu.registers import LANES
from sj_tac.kernels.cpu.threads import flat, share
from sj_tac.kernels.layout import RUNS
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import NAMES, NO_POOL, overlap

# Whether torch's convolution was found to be this one, by all that this check depends on: many kinds of call share it, as of
# large batches only some samples are compared. And what was found for a kind of call. How many of either are kept.
_FOUND: dict[Any, bool] = {}
_KINDS: dict[Any, Convolution | None] = {}
_UNKNOWN: Any = object()
KEPT = 256
# What it computes in, and what it reads then.
_READ = {torch.float32: (torch.float32,), torch.bfloat16: (torch.float32, torch.bfloat16)}
# Bytes of torch's output that are compared at most: of some samples where the batch has more.
COMPARED = 1 << 26
# Rows and columns of a filter at most.
MOST = 7
# A float32 to which nothing below 64 adds anything.
LOSES = 2.0**30
# In contiguous memory, numbers of an output, and windows in a register, from which on one kernel is faster.
LARGE, FULL = 3 << 19, 0.75 * LANES


class Convolution(NamedTuple):
    """A convolution that the kernel can run, on frames of one size.

    Attributes:
        inputs, height, width: channels and size of a frame. high, wide: of a window; down, along: its strides; above,
            before: paddings, with zeros, on both sides. strides: of frames, [G * N, C_in, H, W].
        last: whether the output is channels_last, or contiguous. by_columns: whether a window is summed column by column,
            not row by row. narrow: whether it computes in bfloat16.
    """

    inputs: int
    height: int
    width: int
    high: int
    wide: int
    down: int
    along: int
    above: int
    before: int
    biased: bool
    strides: tuple[int, ...]
    last: bool = False
    by_columns: bool = False
    narrow: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in, and its drives are of."""
        return torch.bfloat16 if self.narrow else torch.float32


def convolution(
    frames: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    options: Sequence[Any],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Convolution | None:
    """The kernel's convolution for these tensors, of which torch's own gives the same drives; None where it has none.

    Args:
        frames: [G, N, C_in, H, W]; filters: [C, C_in, high, wide]; options: stride, padding, dilation and groups, as
            torch.conv2d takes them; shape: of the output, [G, N, C, H, W]; dtype: what it computes in: float32, or bfloat16,
            to which numbers are rounded.
    """
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return None
    threads, more = torch.get_num_threads(), None if bias is None else bias.dtype
    key = (
        frames.shape, frames.stride(), frames.dtype, filters.shape, filters.stride(), filters.dtype, more,
        *options, *shape, dtype, threads, torch._C._get_mkldnn_enabled(), *_precision(),
    )  # fmt: skip
    found = _KINDS.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        if len(_KINDS) >= KEPT:
            _KINDS.clear()
        found = _KINDS[key] = _of_kind(frames, filters, bias, options, shape, dtype)
    return found if found is not None and _are_finite(filters, found) else None


def _are_finite(filters: Tensor, conv: Convolution) -> bool:
    """The padding's zeros are multiplied as well, which adds nothing but where a weight is infinite or no number."""
    if conv.narrow or not (filters.is_contiguous() or filters.is_contiguous(memory_format=torch.channels_last)):
        return bool(filters.to(conv.dtype).isfinite().all())
    return bool(np.isfinite(lent(filters, np.float32)).all())


def _of_kind(
    frames: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    options: Sequence[Any],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Convolution | None:
    """``convolution`` of all tensors like these, whatever their numbers."""
    (down, along), (above, before), dilation, groups = options
    outputs, inputs, high, wide = filters.shape
    fits = outputs > 1 and max(high, wide) <= MOST  # one channel of an output lies in both memory formats
    plain = dilation == (1, 1) and groups == 1
    narrow = dtype is torch.bfloat16
    read = _READ.get(dtype, ()) if not narrow or halves.can_multiply_pairs() else ()
    if not (fits and plain and all(x is None or x.dtype in read for x in (frames, filters, bias))):
        return None
    if not frames.numel() or shape[3] * shape[4] == 1:
        return None
    orders = _orders(frames, filters, options, shape) if all(map(_has_no_gaps, (frames, filters))) else ()
    height, width = frames.shape[3:]
    strides = frames.flatten(0, 1).stride()  # of a single sample, too: torch's choice of a format hangs on it
    alike = Convolution(inputs, height, width, high, wide, down, along, above, before, bias is not None, strides)
    some = (alike._replace(last=last, by_columns=by_columns, narrow=narrow) for last, by_columns in orders)
    return next((one for one in some if _is_torchs(one, filters, options, shape)), None)


def _has_no_gaps(x: Tensor) -> bool:
    """Whether it is contiguous or channels_last."""
    return x.is_contiguous() or x.movedim(-3, -1).is_contiguous()


def _orders(frames: Tensor, filters: Tensor, options: Sequence[Any], shape: Sequence[int]) -> Iterator[tuple[bool, bool]]:
    """Whether torch's output may be channels_last, and its sums taken by columns; nothing where the kernel does not pay.

    Frames and filters have no gaps.
    """
    if 1 in (frames.stride(2), filters.stride(1)):  # either is channels_last, or lies in both formats
        if filters.shape[1] == 1:
            yield True, True
        yield True, False
    windows = (shape[4] + 1) // 2
    full = windows >= FULL * -(-windows // LANES)
    if frames.is_contiguous() and filters.is_contiguous() and options[0] == (1, 1) and full and math.prod(shape) >= LARGE:
        yield False, False


def _precision() -> Any:
    """The arithmetic that torch's convolutions are allowed."""
    getter: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    named = None if getter is None else getter("mkldnn", "conv")
    return named, torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


def _is_torchs(conv: Convolution, filters: Tensor, options: Sequence[Any], shape: Sequence[int]) -> bool:
    """Whether torch's convolution with filters of these shapes gives the kernel's drives to the last bit."""
    groups, batch, *of_one = shape
    samples = min(groups * batch, max(1, COMPARED // (4 * math.prod(of_one))))
    enabled, threads = torch._C._get_mkldnn_enabled(), torch.get_num_threads()
    key = conv, filters.shape[0], filters.stride(), samples, enabled, threads, _precision()
    found = _FOUND.get(key)
    if found is None:
        if len(_FOUND) >= KEPT:
            _FOUND.clear()
        draws = (_like_normal, *((_cancelling, _smallest) if conv.narrow else ()))
        found = _FOUND[key] = all(_differing(conv, samples, filters, options, draw) == 0 for draw in draws)
    return found


def _like_normal(frames: Tensor, filters: Tensor, bias: Tensor, random: torch.Generator) -> None:
    """Draw the numbers that convolutions are compared on."""
    for some in (frames, filters, bias):
        some.normal_(generator=random)


def _smallest(frames: Tensor, filters: Tensor, bias: Tensor, random: torch.Generator) -> None:
    """Draw drives of about the smallest numbers, which processors make zeros of in bfloat16: the bias of empty frames."""
    frames.zero_()
    filters.normal_(generator=random)
    bias.normal_(generator=random).mul_(torch.finfo(torch.float32).tiny)


def _cancelling(frames: Tensor, filters: Tensor, bias: Tensor, random: torch.Generator) -> None:
    """Draw numbers whose order of additions shows in a sum that is rounded to bfloat16, as it hardly ever does in others'.

    Frames are of ones. In each filter one number, anywhere, is so large that what is added to it is lost until its opposite
    comes: of two orders one loses something that the other keeps, and all that is kept shows.
    """
    bias.normal_(generator=random)
    frames.fill_(1.0)
    flat = torch.rand(filters.shape, generator=random, device="cpu").flatten(1).add(1)
    flat[:, :1], flat[:, 1:2] = LOSES, -LOSES
    places = torch.rand(flat.shape, generator=random, device="cpu").argsort(1)
    filters.copy_(flat.gather(1, places).view(filters.shape))


def _differing(conv: Convolution, samples: int, filters: Tensor, options: Sequence[Any], draw: Callable[..., None]) -> int:
    """How many drives of this many frames are others than torch's; filters as these lie in memory, numbers by ``draw``."""
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        sizes = samples, conv.inputs, conv.height, conv.width
        x = torch.empty_strided(sizes, conv.strides, dtype=torch.float32, device="cpu")
        w = torch.empty_strided(filters.shape, filters.stride(), dtype=torch.float32, device="cpu")
        more = torch.empty(len(w), dtype=torch.float32, device="cpu")
        draw(x, w, more, random)
        x, w, bias = x.to(conv.dtype), w.to(conv.dtype), more.to(conv.dtype) if conv.biased else None
        y = torch.conv2d(x, w, bias, *options)
    if not y.is_contiguous(memory_format=torch.channels_last if conv.last else torch.contiguous_format):
        return y.numel()
    return differing(conv, x[None], w, bias, y)


def differing(conv: Convolution, frames: Tensor, filters: Tensor, bias: Tensor | None, y: Tensor) -> int:
    """How many drives, or windows that have such, are not those of ``y``, to the last bit.

    Args:
        frames: [G, N, C_in, H, W]; y: [G * N, C, H, W], as the kernel's drives lie in memory.
    """
    samples, channels, height, width = y.shape
    source, slots = source_of(conv, frames, filters, bias, (height, width)), y.numel()
    layout: Neurons | Windows | OddWindows = Neurons(True, height, width, channels)
    if not conv.last:
        slots = samples * channels * -(-height // 2) * -(-width // 2)
        layout = (OddWindows if height % 2 or width % 2 else Windows)(False, height, width, channels)
    found, made = np.zeros(slots, np.int64), flat(y.float(), conv.last, y).view(np.int32)
    share(sources.differing, slots, int(y.numel() * costs.COMPARED), source, made, layout, found)
    return int(np.count_nonzero(found))


class ConvLaunch(Launch):
    """Convolution and ``fire`` for operands like those it was made of; numbers in tensors may be others."""

    __slots__ = ("conv", "filters", "map", "read")
    convolves = True

    def __init__(self, o: Operands, conv: Convolution, dtype: torch.dtype | None = None) -> None:
        """``o.y`` only says what the drives are like. Raises ValueError as ``Launch``, and for a residual."""
        super().__init__(o, dtype)
        fits = self.last is conv.last and (self.last or o.pool != NO_POOL) and not overlap(o.pool, o.window)
        if not fits or o.residual is not None or o.y.dtype is not conv.dtype:
            raise ValueError(
                f"convolution and fire in one kernel got drives {list(o.y.shape)} of {o.y.dtype}, channels_last: "
                f"{self.last}, a residual: {o.residual is not None}, {NAMES[o.pool]} of windows {list(o.window)}; it takes "
                f"{conv.dtype}, channels_last: {conv.last}, no residual, and MaxPool of 2 x 2 windows or, in channels_last, "
                "no pool"
            )
        self.conv, self.map = conv, o.y.shape[3:]
        self.work += int(o.y.numel() * costs.CONVOLVED)
        self.read = *o.y.shape[:2], conv.inputs, conv.height, conv.width
        self.filters = o.y.shape[2], conv.inputs, conv.high, conv.wide

    def __call__(
        self,
        y: Any,
        v0: Tensor | None,
        residual: Tensor | None,
        affine: tuple[Tensor | None, Tensor | None],
        *_: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As ``Launch``; ``y``: frames, filters and bias, in the place of drives; residual: None."""
        frames, filters, bias = y
        # The kernel reads without looking.
        assert residual is None
        assert (frames.shape, filters.shape, bias is not None) == (self.read, self.filters, self.conv.biased)
        assert bias is None or bias.shape == self.filters[:1]
        assert self.conv.narrow or all(x is None or x.dtype is torch.float32 for x in y)
        source = source_of(self.conv, frames, filters, bias, self.map)
        scales, shifts = (with_room(x) for x in affine)
        voltages = self.none if v0 is None else flat(v0, self.last, frames)
        assert scales.size == shifts.size == (self.affine and self.affine + LANES)
        assert voltages.size in (0, self.frame)
        # Whatever the default dtype is.
        out, v = (torch.empty(n, dtype=d, device="cpu") for n, d in ((self.out, self.dtype), (self.v, torch.float32)))
        put_out = (out.view(torch.int16) if self.dtype is torch.bfloat16 else out).numpy().reshape(-1)
        inputs: Any = ConvolvedInputs if isinstance(source, Convolved) else SlidInputs
        read = inputs(*source, self.none, scales, shifts, voltages, *self.rest)
        written = Outputs(put_out, v.numpy().reshape(-1))
        share(forward.forward, self.units, self.work, read, self.neuron, self.layout, written)
        RUNS["conv_fire", "numba"] += 1
        return (out.movedim(-1, -3), v.movedim(-1, -3).detach()) if self.last else (out, v)
