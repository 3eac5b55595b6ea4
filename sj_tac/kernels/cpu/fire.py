"""``fire`` and its backward on the CPU, by the compiled kernels of src/."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sj_tac.kernels.checks import WIDE, emitted_shape
from sj_tac.kernels.cpu import call as calls
from sj_tac.kernels.cpu.call import DTYPES, Call, library, pointer, threads
from sj_tac.kernels.layout import empty, is_channels_last, laid
from sj_tac.kernels.operands import Operands

# Nanoseconds of a neuron's step, about: in the forward, and in the backward, which steps once more and then walks back.
STEP, BACK = 0.2, 0.8


class Plan(NamedTuple):
    """What stays the same from call to call.

    Attributes:
        call: the bytes of a Call with everything but its pointers and threads. lengths: of its steps, to which it points.
        last: whether frames lie in channels_last. y, residual, v: strides of drives, residual and voltages that do.
        shape: of the output; out: its strides. steps: of all neurons.
    """

    call: bytes
    lengths: Any
    last: bool
    y: tuple[int, ...]
    residual: tuple[int, ...]
    v: tuple[int, ...]
    shape: tuple[int, ...]
    out: tuple[int, ...]
    steps: int


_PLANS: dict[Any, Plan] = {}


class Convolution(NamedTuple):
    """A convolution that the kernel computes as it steps, in float32, in the place of its drives, in channels_last.

    Attributes:
        x: frames [G, N, channels, height, width], contiguous, with the padding in them. weight: [C, channels, kh, kw].
        stride, dilation: of rows and columns.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int]
    dilation: tuple[int, int]


class Beside(NamedTuple):
    """What a call has beside its operands.

    Attributes:
        convolution: what computes y, of which the shape alone is read then.
        joined: of the output's shape and dtype, and added to it. whole: the output is whole numbers, in uint8.
    """

    convolution: Convolution | None = None
    joined: Tensor | None = None
    whole: bool = False


NOTHING_BESIDE = Beside()


def _plan(o: Operands, last: bool) -> Plan:
    """The plan of operands that check_fire has seen; last: whether frames lie in channels_last."""
    y, group = o.y, o.group if o.weights is not None else 0
    key = (y.shape, last, y.dtype, tuple(o.lengths), o[9:20], tuple(o.window), group)
    found = _PLANS.get(key)
    if found is None:
        if len(_PLANS) > 1000:
            _PLANS.clear()
        found = _PLANS[key] = _made(o, last)
    return found


def _made(o: Operands, last: bool) -> Plan:
    y, lengths, emitted = o.y, tuple(o.lengths), emitted_shape(o)
    resets = (0.0, o.rest, -1.0) if o.hard else (1.0, -o.threshold, 0.0)
    keep, rest_gain, h_gain = (resets[0], 0.0, 0.0) if o.detach else resets
    drives, samples, channels, height, width = y.shape
    kh, kw, sh, sw, ph, pw = o.window if o.pool else (1, 1, 1, 1, 0, 0)
    whole = (ctypes.c_int64 * len(lengths))(*lengths)
    call = Call(
        drives=drives, steps=sum(lengths), group=1 if o.weights is None else o.group, samples=samples, channels=channels,
        height=height, width=width, last=last, pool=o.pool, kh=kh, kw=kw, sh=sh, sw=sw, ph=ph, pw=pw, out_height=emitted[-2],
        out_width=emitted[-1], dtype=DTYPES[y.dtype], emits=DTYPES[y.dtype], mode=int(o.mode), hard=o.hard,
        surrogate=o.surrogate, tau=o.tau, decay=o.decay, gain=o.gain, keep=keep, rest_gain=rest_gain, h_gain=h_gain,
        alpha=o.alpha, rest=o.rest, threshold=o.threshold, lengths=ctypes.addressof(whole),
    )  # fmt: skip
    like = torch.empty(0, device="meta")
    shapes = [list(y.shape), [sum(lengths), *y.shape[1:]], list(y.shape[1:]), list(emitted)]
    drive, residual, v, out = (empty(like, shape, last).stride() for shape in shapes)
    steps = samples * channels * height * width * sum(lengths)
    return Plan(bytes(call), whole, last, drive, residual, v, tuple(emitted), out, steps)


def _lying(x: Tensor, strides: tuple[int, ...], last: bool) -> Tensor:
    """Frames without gaps: kernels read numbers one behind the other."""
    return x if x.stride() == strides else laid(x, last)


def _call(o: Operands, plan: Plan, nanoseconds: float, reads_y: bool = True) -> tuple[Call, Any]:
    """A call but for what it writes, and the tensors that it reads, which must live until it is done."""
    call, last = Call.from_buffer_copy(plan.call), plan.last
    if o.q is not None:
        call.tau = float(o.q)
    call.threads = threads(plan.steps * nanoseconds)
    y = _lying(o.y, plan.y, last) if reads_y else None
    residual = None if o.residual is None else _lying(o.residual, plan.residual, last)
    v0 = None if o.v0 is None else _lying(o.v0, plan.v, last)
    small = [None if x is None else x.contiguous() for x in (o.scale, o.shift, o.linear, o.weights)]
    call.y, call.residual, call.v0 = pointer(y), pointer(residual), pointer(v0)
    call.scale, call.shift, call.linear, call.weights = map(pointer, small)
    return call, (y, residual, v0, small)


def _convolve(call: Call, by: Convolution) -> Any:
    """Have a call compute its drives; returns what must live until it is done."""
    (channels, height, width), (kh, kw) = by.x.shape[2:], by.weight.shape[2:]
    # [channels * kh * kw, C], C filled up as src/call.h says.
    weights = F.pad(by.weight.permute(1, 2, 3, 0).flatten(0, 2), (0, -by.weight.shape[0] % 16)).contiguous()
    bias = None if by.bias is None else by.bias.contiguous()
    numbers = channels, height, width, kh, kw, *by.stride, *by.dilation
    found = calls.Convolution(pointer(by.x), pointer(weights), pointer(bias), *numbers)
    call.convolution = ctypes.addressof(found)
    return found, weights, bias


def forward(o: Operands, beside: Beside = NOTHING_BESIDE) -> tuple[Tensor, Tensor]:
    """Output and voltages in the memory format of y."""
    y, (convolution, joined, whole) = o.y, beside
    plan = _plan(o, convolution is not None or is_channels_last(y))
    out = y.new_empty_strided(plan.shape, plan.out, dtype=torch.uint8 if whole else y.dtype)
    v = y.new_empty_strided(y.shape[1:], plan.v, dtype=WIDE[y.dtype])
    if joined is not None and (joined.shape != out.shape or joined.dtype is not out.dtype):
        raise ValueError(
            f"fire got frames {list(joined.shape)} of {joined.dtype} to join an output {list(out.shape)} of {out.dtype}"
        )
    if plan.steps:
        call, _alive = _call(o, plan, STEP, convolution is None)
        _too = None if convolution is None else _convolve(call, convolution)
        joined = None if joined is None else _lying(joined, plan.out, plan.last)
        call.emits, call.joined = DTYPES[out.dtype], pointer(joined)
        call.out, call.v = out.data_ptr(), v.data_ptr()
        library().fire_forward(call)
    return out, v


def backward(go: Tensor, gv: Tensor | None, o: Operands, need_linear: bool, need_weights: bool) -> tuple[Tensor | None, ...]:
    """Gradients to y, residual, scale, shift, v0, linear and weights; None for what is None or not needed."""
    plan, y, wide = _plan(o, is_channels_last(o.y)), o.y, WIDE[o.y.dtype]
    go, gv = _lying(go, plan.out, plan.last), None if gv is None else _lying(gv, plan.v, plan.last)
    gy = y.new_empty_strided(y.shape, plan.y)
    gv0 = None if o.v0 is None else y.new_empty_strided(y.shape[1:], plan.v, dtype=wide)
    g_residual = None if o.residual is None else y.new_empty_strided(o.residual.shape, plan.residual)
    call, _alive = _call(o, plan, BACK)
    pieces = call.pieces = library().backward_pieces(call) if plan.steps else 0

    def partial(*shape: int, wanted: bool) -> Tensor | None:
        return y.new_zeros((pieces, *shape), dtype=wide) if wanted else None

    g_scale, g_shift = (partial(call.channels, wanted=o.scale is not None) for _ in range(2))
    g_linear = partial(call.drives, 2, wanted=need_linear and o.linear is not None)
    g_weights = partial(call.steps, wanted=need_weights and o.weights is not None)
    if pieces:
        call.go, call.gv, call.gy, call.gv0 = pointer(go), pointer(gv), pointer(gy), pointer(gv0)
        call.g_residual = pointer(g_residual)
        call.g_scale, call.g_shift = pointer(g_scale), pointer(g_shift)
        call.g_linear, call.g_weights = pointer(g_linear), pointer(g_weights)
        library().fire_backward(call)
    sums = [None if x is None else x[0] if pieces == 1 else x.sum(0) for x in (g_scale, g_shift, g_linear, g_weights)]
    return gy, g_residual, sums[0], sums[1], gv0, sums[2], sums[3]
