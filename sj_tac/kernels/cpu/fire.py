"""``fire`` and its backward on the CPU, by the compiled kernels of src/."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sj_tac.kernels.checks import WIDE, emitted_shape
from sj_tac.kernels.cpu.call import DTYPES, Call, library, pointer, threads
from sj_tac.kernels.layout import empty, is_channels_last, laid
from sj_tac.kernels.operands import Operands

# Nanoseconds of a neuron's step, about: in the forward, and in the backward, which steps once more and then walks back.
STEP, BACK = 0.2, 0.8


@lru_cache(maxsize=1024)
def _lengths(lengths: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(lengths))(*lengths)


@lru_cache(maxsize=1024)
def _known(
    shape: torch.Size,
    last: bool,
    dtype: torch.dtype,
    size: tuple[int, ...],
    numbers: tuple[Any, ...],
    lengths: tuple[int, ...],
) -> bytes:
    """A call with everything but its pointers, tau and threads: what stays the same from call to call."""
    mode, decay, gain, rest, threshold, hard, detach, surrogate, alpha, pool, window, group = numbers
    resets = (0.0, rest, -1.0) if hard else (1.0, -threshold, 0.0)
    keep, rest_gain, h_gain = (resets[0], 0.0, 0.0) if detach else resets
    drives, samples, channels, height, width = shape
    kh, kw, sh, sw, ph, pw = window
    known = Call(
        drives=drives, steps=sum(lengths), group=group, samples=samples, channels=channels, height=height, width=width,
        last=last, pool=pool, kh=kh, kw=kw, sh=sh, sw=sw, ph=ph, pw=pw, out_height=size[0], out_width=size[1],
        dtype=DTYPES[dtype], mode=mode, hard=hard, surrogate=surrogate, decay=decay, gain=gain, keep=keep,
        rest_gain=rest_gain, h_gain=h_gain, alpha=alpha, rest=rest, threshold=threshold,
    )  # fmt: skip
    return bytes(known)


def _call(o: Operands, last: bool, emitted: Sequence[int], nanoseconds: float) -> Call:
    lengths, window = tuple(o.lengths), tuple(o.window) if o.pool else (1, 1, 1, 1, 0, 0)
    group = 1 if o.weights is None else o.group
    numbers = (
        int(o.mode), o.decay, o.gain, o.rest, o.threshold, o.hard, o.detach, o.surrogate, o.alpha, o.pool, window, group
    )  # fmt: skip
    call = Call.from_buffer_copy(_known(o.y.shape, last, o.y.dtype, tuple(emitted[-2:]), numbers, lengths))
    call.tau = o.tau if o.q is None else float(o.q)
    call.lengths = ctypes.addressof(_lengths(lengths))
    call.threads = threads(o.y[0].numel() * sum(lengths) * nanoseconds)
    return call


def _lying(o: Operands, last: bool) -> Operands:
    """The operands without gaps, in one memory format: kernels read numbers one behind the other."""
    residual, v0 = (None if x is None else laid(x, last) for x in (o.residual, o.v0))
    small = [None if x is None else x.contiguous() for x in (o.scale, o.shift, o.linear, o.weights)]
    return o._replace(
        y=laid(o.y, last), residual=residual, v0=v0, scale=small[0], shift=small[1], linear=small[2], weights=small[3]
    )


def _read(call: Call, o: Operands) -> None:
    call.y, call.residual, call.v0 = o.y.data_ptr(), pointer(o.residual), pointer(o.v0)
    call.scale, call.shift = pointer(o.scale), pointer(o.shift)
    call.linear, call.weights = pointer(o.linear), pointer(o.weights)


def forward(o: Operands) -> tuple[Tensor, Tensor]:
    """Output and voltages in the memory format of y."""
    last, emitted = is_channels_last(o.y), emitted_shape(o)
    o = _lying(o, last)
    out, v = empty(o.y, list(emitted), last), empty(o.y, list(o.y.shape[1:]), last, WIDE[o.y.dtype])
    if v.numel():
        call = _call(o, last, emitted, STEP)
        _read(call, o)
        call.out, call.v = out.data_ptr(), v.data_ptr()
        library().fire_forward(call)
    return out, v


def backward(go: Tensor, gv: Tensor | None, o: Operands, need_linear: bool, need_weights: bool) -> tuple[Tensor, ...]:
    """Gradients to y, residual, scale, shift, v0, linear and weights; empty for what is None or not needed."""
    last, emitted, wide = is_channels_last(o.y), emitted_shape(o), WIDE[o.y.dtype]
    o, go, gv = _lying(o, last), laid(go, last), None if gv is None else laid(gv, last)
    y, none = o.y, o.y.new_empty(0, dtype=wide)
    gy, gv0 = empty(y, list(y.shape), last), None if o.v0 is None else empty(y, list(y.shape[1:]), last, wide)
    g_residual = y.new_empty(0) if o.residual is None else empty(y, list(o.residual.shape), last)
    call = _call(o, last, emitted, BACK)
    pieces = call.pieces = library().backward_pieces(call) if gy.numel() else 0
    channels, drives = y.shape[2], y.shape[0]

    def partial(*shape: int, wanted: bool) -> Tensor | None:
        return y.new_zeros((pieces, *shape), dtype=wide) if wanted else None

    g_scale, g_shift = (partial(channels, wanted=o.scale is not None) for _ in range(2))
    g_linear = partial(drives, 2, wanted=need_linear and o.linear is not None)
    g_weights = partial(call.steps, wanted=need_weights and o.weights is not None)
    if pieces:
        _read(call, o)
        call.go, call.gv, call.gy, call.gv0 = go.data_ptr(), pointer(gv), gy.data_ptr(), pointer(gv0)
        call.g_residual = None if o.residual is None else g_residual.data_ptr()
        call.g_scale, call.g_shift = pointer(g_scale), pointer(g_shift)
        call.g_linear, call.g_weights = pointer(g_linear), pointer(g_weights)
        library().fire_backward(call)
    sums = [none.clone() if x is None else x.sum(0) for x in (g_scale, g_shift, g_linear, g_weights)]
    return gy, g_residual, sums[0], sums[1], none.clone() if gv0 is None else gv0, sums[2], sums[3]
