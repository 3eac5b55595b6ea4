"""A convolution that is noted and run later, by the neuron behind it: a part of its samples and channels at a time on the
CPU, in one kernel with the neuron on CUDA.

What a large convolution puts out is the largest tensor of a net, written once and read once. By default glibc gives its
memory back to the system, which hands it out anew, page by page, in every call; that can take longer than the convolution.
In parts it need not exist. A process that keeps its memory (``sj_tac.keep_memory``) gains nothing by it, and runs it whole.

A convolution of a few input channels may be run by the neuron's kernel itself (kernels/gpu/conv_fire.py on CUDA,
kernels/cpu/conv_launches.py on the CPU).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sj_tac.host import dispatch
from sj_tac.kernels import reference
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.layout import empty, is_channels_last
from sj_tac.runtime.expressions import Expression, Made
from sj_tac.runtime.values import Frames, Shared
from sj_tac.support import memory

# Bytes of an output above which glibc always gives it back; bytes that a part should have, which are kept for the next.
LARGE, PART = 32 << 20, 8 << 20
LARGEST_KEPT = LARGE - (1 << 16)
# How many of the largest are kept at most, and the small blocks behind them, which are never freed. With fewer than six,
# parts, outputs and voltages come to lie behind all of these in some processes, and are given back in every call.
KEPT, MOST_BEHIND = 6, 256
_BEHIND: list[Tensor] = []
# Channels of a part, at least: fewer make a convolution slower. Of few input channels it hardly matters.
FEWEST, FEWEST_OF_FEW, FEW = 64, 32, 4
# A copy of the weights, or of an input that is somebody else's, may cost this share of the output. In one kernel the output
# is neither written nor read, which pays for a larger copy.
SHARE, SHARE_IN_ONE = 8, 2

# Numbers of an output from which on one kernel is faster on the CPU.
LARGE_FOR_ONE = 1 << 18

# What a Conv2d's forward calls, as long as nobody has patched or overridden it.
_OWN = nn.Conv2d._conv_forward, F.conv2d
_WIDTHS = {torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}


class Options(NamedTuple):
    """What ``torch.conv2d`` takes behind the bias."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


class Deferred:
    """The output [G, N, C, H, W] of a convolution on frames and weights as they were when it was called.

    Nobody can change either: the weights are a copy; the frames are a copy, a tensor that nobody else has, or an expression
    that makes them again. There are no gradients.

    Args:
        filters: weight and bias.
        dtypes: what it computes in, and what its output is of; None for the weights' own.
        drive: what the layer knows, where ``one`` is given.

    Attributes:
        shape, dtype, device: of the output. made: the output, once somebody has asked for the whole of it.
        one: what one kernel convolves, which runs the neuron as well, or None; by: on CUDA, that kernel's launch, once it
            has run: drives that are read later are its own.
    """

    # fmt: off
    __slots__ = (
        "_bias", "_drive", "_frames", "_narrow", "_options", "_weight", "by", "device", "dtype", "made", "one",
        "shape",
    )
    # fmt: on

    def __init__(
        self,
        frames: Tensor | Expression,
        filters: tuple[Tensor, Tensor | None],
        options: Options,
        shape: Any,
        one: Any = None,
        dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
        drive: Any = None,
    ) -> None:
        weight, bias = filters
        narrow, dtype = dtypes
        self._frames, self._options, self._narrow = frames, options, narrow or weight.dtype
        self._weight = _copy(weight, self._narrow)
        self._bias = None if bias is None else _copy(bias, self._narrow)
        self.dtype = weight.dtype if dtype is None else dtype
        self.shape, self.device = torch.Size(shape), weight.device
        self.one, self._drive = one, drive
        self.made: Tensor | None = None
        self.by: conv_fire.ConvLaunch | None = None

    def make(self) -> Tensor:
        """The whole output; that which a neuron's steps have been run on, where they have."""
        if self.made is None and self.by is not None:
            self.made = self.by.drives(self.inputs())
        elif self.made is None:
            self.made = next(self.parts(self.shape[1], self.shape[2]))[1].to(self.dtype)
        return self.made

    def decline(self) -> None:
        """Tell the layer that no kernel runs this convolution with the neuron, so that the next call need not try."""
        if self.device.type not in conv_fire.DEVICES:
            self._drive.declined = self.one

    def inputs(self) -> conv_fire.Convolved:
        """Frames, weights and bias, for the kernel that convolves them."""
        with _as_called(self.device):
            return conv_fire.Convolved(self._whole_frames(), self._weight, self._bias)

    def stand_in(self) -> Tensor:
        """A tensor of the output's shape, dtype and device whose numbers mean nothing, and whose memory nobody touches."""
        if self.device.type not in conv_fire.DEVICES:  # one that lies as the output does
            return empty(self._weight, list(self.shape), self.one.last)
        return torch.empty(1, dtype=self.dtype, device=self.device).expand(self.shape)

    def _whole_frames(self) -> Tensor:
        return self._frames.make() if isinstance(self._frames, Expression) else self._frames

    def size_of_part(self) -> tuple[int, int]:
        """Samples and channels of a part: as many as ``PART`` bytes hold, and divisors of all, so that parts are alike."""
        groups, samples, channels, *map_ = self.shape
        of_one = groups * math.prod(map_) * _WIDTHS[self._narrow]
        wide = max((n for n in range(1, samples + 1) if samples % n == 0 and n * channels * of_one <= PART), default=1)
        if wide * channels * of_one <= PART or self._options.groups != 1:
            return wide, channels
        fewest = FEWEST_OF_FEW if self._weight.shape[1] <= FEW else FEWEST
        cuts = [n for n in range(min(fewest, channels), channels + 1) if channels % n == 0]
        return wide, max((n for n in cuts if n * of_one <= PART), default=cuts[0])

    def parts(self, samples: int, channels: int) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Where each part lies in N and C, and the part [G, samples, channels, H, W] itself, in the dtype of computing."""
        with _as_called(self.device):
            frames = self._whole_frames()
            last = is_channels_last(frames)
            for first in range(0, self.shape[1], samples):
                at = slice(first, first + samples)
                some = frames.flatten(0, 1) if samples == self.shape[1] else _folded(frames[:, at], last)
                for begin in range(0, self.shape[2], channels):
                    to = slice(begin, begin + channels)
                    bias = None if self._bias is None else self._bias[to]
                    y = torch.conv2d(some.to(self._narrow), self._weight[to], bias, *self._options)
                    yield (at, to), y.view(self.shape[0], -1, *y.shape[1:])


class Narrow:
    """The output of a convolution that computed in another dtype, which is of the net's own to whoever reads it.

    Attributes:
        raw: as it was computed. The others are ``Deferred``'s.
    """

    __slots__ = ("device", "dtype", "made", "one", "raw", "shape")

    def __init__(self, raw: Tensor, dtype: torch.dtype) -> None:
        self.raw, self.dtype, self.shape, self.device = raw, dtype, raw.shape, raw.device
        self.made: Tensor | None = None
        self.one = None

    def make(self) -> Tensor:
        """The output in the net's dtype."""
        if self.made is None:
            self.made = self.raw.to(self.dtype)
        return self.made


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype, copy=True)


@contextmanager
def _as_called(device: torch.device) -> Iterator[None]:
    """Without gradients, inference mode or autocast, as a convolution that was noted was called."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _folded(frames: Tensor, last: bool) -> Tensor:
    """Some samples of frames as [G * n, C, H, W], in the memory format that all have."""
    return frames.movedim(2, -1).flatten(0, 1).movedim(-1, 1) if last else frames.flatten(0, 1)


def defer(conv: Any, x: Any, frames: Tensor, owned: bool, narrow: torch.dtype | None = None) -> Deferred | None:
    """The convolution of compact frames [G, N, C, H, W], to be run later; None where it must be run now, or gains nothing.

    Args:
        conv: a Conv2d that runs the forward of its library's class, on parameters of its own.
        x: what it was called with, of which ``frames`` were made.
        owned: nobody else has the tensor ``frames``.
        narrow: the dtype that it is to compute in, where that is not the net's own; ``frames`` may be of it already.
    """
    weight, bias = conv._parameters["weight"], conv._parameters["bias"]
    options, shape, cast = options_of(conv), None, _autocast_to(frames)
    if options is not None and is_plain(conv, frames, weight, bias, cast or narrow, cast is not None):
        shape = output_shape(frames, weight, options)
    if options is None or shape is None:
        return None
    computes = cast or narrow or weight.dtype
    one = _in_one(conv, conv_fire.Convolved(frames, weight, bias), options, shape, computes)
    if one is None and (cast is not None or not _gains_in_parts(weight, shape, narrow or weight.dtype)):
        return None
    most = math.prod(shape) // (SHARE if one is None else SHARE_IN_ONE)
    if one is None:
        _let_parts_stay()
    kept: Tensor | Expression | None
    if cast is not None and cast is not frames.dtype:
        kept = frames.to(cast) if frames.numel() <= most else None
    else:
        kept = frames if owned else _kept(x, frames, most)
    if kept is None or weight.numel() > most:
        return None
    if cast is not None and frames.device.type == "cpu":
        weight, bias = _as_autocast_has(weight), None if bias is None else _as_autocast_has(bias)
        if not weight.isfinite().all():
            return None
    return Deferred(kept, (weight, bias), options, shape, one, (computes, cast), conv._tac)


def _as_autocast_has(x: Tensor) -> Tensor:
    """A convolution's weight or bias as its own operations would read it.

    Autocast casts a parameter once in a region, and does not see what is written into it since. It tells nobody what it has:
    here an operation of its own puts it out, times one or added to nothing.
    """
    if not (torch.is_autocast_cache_enabled() and x.requires_grad and x.is_leaf):
        return x
    if x.dim() == 1:
        return F.linear(x.new_zeros(1, 1), x.new_zeros(len(x), 1), x)[0]
    found = F.linear(x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
    return torch.empty_like(x, dtype=found.dtype).copy_(found)  # in the parameter's own memory format


def _autocast_to(frames: Tensor) -> torch.dtype | None:
    """The dtype in which autocast has a convolution compute, where one kernel reads it; None without autocast."""
    kind = frames.device.type
    if not dispatch.autocasts(kind):
        return None
    found = torch.get_autocast_dtype(kind)
    return found if kind in conv_fire.DEVICES or found is torch.bfloat16 else None


def may_be_one(conv: Any, frames: Tensor) -> bool:
    """Whether one kernel may run it with the neuron behind it: allowed, few channels, and input enough."""
    few = conv.in_channels <= conv_fire.FEW
    pays = frames.device.type in conv_fire.DEVICES or frames.numel() * conv.out_channels >= LARGE_FOR_ONE * conv.in_channels
    return bool(few and pays) and conv_fire.is_allowed(frames.device)


def _gains_in_parts(weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the output would be given back to the system in every call, on the CPU."""
    on_cpu = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64) and dtype in _WIDTHS
    return on_cpu and math.prod(shape) * _WIDTHS[dtype] >= LARGE and memory.mode() == memory.DEFAULT


def _in_one(conv: Any, of: conv_fire.Convolved, options: Options, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """What one kernel may convolve, in this dtype, and fire; None where it may not."""
    if of.frames.shape[2] > conv_fire.FEW or not conv_fire.is_allowed(of.frames.device):
        return None
    drive = conv._tac
    # Behind a collapse, neurons take their means another way; by the reference kernel nothing is fused at all.
    if drive.mode != "preserve" or drive.backend == reference.NAME:
        return None
    if of.frames.device.type not in conv_fire.DEVICES:
        from sj_tac.kernels.cpu import conv_launches  # it imports Numba

        one = conv_launches.convolution(*of, options, shape, dtype)
        return None if one == drive.declined else one
    return conv_fire.convolution(of, options, shape)


@cache
def _let_parts_stay() -> None:
    """Have glibc keep blocks below its limit, once in a process: up to ``KEPT`` of them, in pages that it has used.

    It keeps blocks of a size once one of that size was freed, but gives back what is free at the end of its heap, as soon
    as that is twice as much. Small blocks that stay lie behind the room here, so that it is no longer at the end.
    """

    def block(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    block(LARGEST_KEPT)
    room = [block(LARGEST_KEPT) for _ in range(KEPT)]
    end = max(some.data_ptr() for some in room)
    for _ in range(MOST_BEHIND):  # the first ones fill gaps that lie before
        _BEHIND.append(block(1 << 12))
        if _BEHIND[-1].data_ptr() > end:
            break


def is_own(conv: Any) -> bool:
    """Whether a Conv2d on the CPU would call torch's own convolution, in float32, on ordinary parameters."""
    weight, bias = conv._parameters["weight"], conv._parameters["bias"]
    return (
        type(weight) in dispatch.PLAIN
        and (bias is None or (type(bias) in dispatch.PLAIN and bias.dtype is torch.float32))
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and _calls_torchs(conv)
    )


def _calls_torchs(conv: Any) -> bool:
    """Whether the way from a Conv2d's forward to torch's convolution is torch's own."""
    return (type(conv)._conv_forward, F.conv2d) == _OWN and "_conv_forward" not in conv.__dict__


def is_plain(
    conv: Any, frames: Tensor, weight: Tensor, bias: Tensor | None, narrow: torch.dtype | None, cast: bool = False
) -> bool:
    """True where the convolution is torch's own on ordinary tensors, and nobody differentiates or watches it.

    Args:
        narrow: the dtype that it computes in, where that is not the weights' own.
        cast: autocast says so, and who asks casts frames and weights himself.
    """
    return (
        not torch.is_grad_enabled()
        and not dispatch.profiling()
        and type(frames) is Tensor
        and frames.device.type in ("cpu", *conv_fire.DEVICES)
        and dispatch.autocasts(frames.device.type) is cast
        and type(weight) in dispatch.PLAIN
        and (bias is None or type(bias) in dispatch.PLAIN)
        and all(t.device == frames.device and t.layout is torch.strided for t in (frames, weight))
        # Without memory, as sharding and offloading leave them, they are torch's to complain of.
        and all(t is None or t.data_ptr() for t in (weight, bias))
        and (frames.dtype in (weight.dtype, narrow) or (cast and {frames.dtype, weight.dtype, narrow} <= conv_fire.READS))
        and (bias is None or (bias.dtype is weight.dtype and bias.device == frames.device))
        and _calls_torchs(conv)
    )


def options_of(conv: Any) -> Options | None:
    """The options of a convolution that pads with zeros; None where it has others."""
    own = conv.__dict__
    found = Options(own["stride"], own["padding"], own["dilation"], own["groups"])
    pairs = all(type(pair) is tuple and len(pair) == 2 for pair in found[:3])
    return found if pairs and own.get("padding_mode") == "zeros" else None


def output_shape(frames: Tensor, weight: Tensor, options: Options) -> Sequence[int] | None:
    """The shape of the output; None where torch would raise, and says why itself."""
    if weight.dim() != 4 or frames.shape[2] != weight.shape[1] * options.groups or weight.shape[0] % options.groups:
        return None
    map_ = []
    for size, kernel, stride, padding, dilation in zip(frames.shape[3:], weight.shape[2:], *options[:3], strict=True):
        map_.append((size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 if stride > 0 else 0)
    return (*frames.shape[:2], weight.shape[0], *map_) if min(map_) > 0 else None


def _kept(x: Any, frames: Tensor, most: int) -> Tensor | Expression | None:
    """Frames that stay what they are whatever anybody writes; None where that costs too much."""
    if frames.numel() <= most:
        return frames.clone()
    expression = x.expression if isinstance(x, Frames) and not isinstance(x, Shared) else None
    if not isinstance(expression, Made) or expression.frames is not frames or not expression.made or x._viewed is not None:
        return None
    # Who writes into them writes into a copy, or past torch's functions, which the expression notices.
    expression.noted = True
    return expression
