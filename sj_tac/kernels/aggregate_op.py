"""``sj_tac::aggregate`` and its backward as torch operators: fake kernels and autograd here, the CPU kernels from Numba.

Numba is imported, and compiles, when an operator first runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sj_tac.kernels.checks import check_aggregate, refuse_dtype
from sj_tac.kernels.cpu import costs, threads
from sj_tac.kernels.cpu.threads import flat, frames_or_none, share, vector
from sj_tac.kernels.gpu import launchers
from sj_tac.kernels.layout import RUNS, empty, is_channels_last

# Dtypes of frames on each device.
ON_CPU = (torch.float32, torch.float64, torch.bfloat16)
ON_CUDA = (torch.float32, torch.float16, torch.bfloat16)


def _like(x: Tensor, frames: int) -> Tensor:
    """Memory for ``frames`` frames in the memory format of x."""
    return empty(x, [frames, *x.shape[1:]], x.dim() > 3 and is_channels_last(x))


def _rows(x: Tensor, like: Tensor) -> Any:
    """[T, ...] as an array [T, M] in the memory format of ``like``."""
    last = like.dim() > 3 and is_channels_last(like)
    return flat(x, last, like).reshape(x.shape[0], -1)


@cache
def _compiled() -> Any:
    from sj_tac.kernels.cpu import aggregate as numba_aggregate

    return numba_aggregate


def aggregate_now(x: Tensor, weights: Tensor, group: int, launcher: str = "") -> Tensor:
    """``out[g] = sum_j weights[g * group + j] x[g * group + j]``: x [T, ...], weights [T].

    In float32 or float64, or, for x and the sums, in bfloat16 with weights in float32.

    Args:
        launcher: what is to launch the CUDA kernel, by its name; "": the first that works. Without meaning on a CPU.
    """
    refuse_dtype("aggregate", x, ON_CPU)
    check_aggregate(x, weights, group)
    numba_aggregate, shape = _compiled(), x.shape
    if x.is_contiguous() and x.dtype is not torch.bfloat16:
        # What _rows and _like do, without their calls: small maps cost little more than the way to their kernel.
        out = torch.empty((-(-shape[0] // group), *shape[1:]), dtype=x.dtype, device=x.device)
        rows = (x.detach() if x.requires_grad else x).numpy().reshape(shape[0], -1)
        written = out.numpy().reshape(out.shape[0], -1)
    else:
        out = _like(x, -(-shape[0] // group))
        rows, written = _rows(x, x), _rows(out, x)
    pieces, work = -(-rows.shape[1] // numba_aggregate.PIECE), int(rows.size * costs.SUMMED)
    assert rows.shape[0] == shape[0] == weights.numel(), (rows.shape, weights.shape)
    if work < threads.ALONE:
        numba_aggregate.forward.serial(0, pieces, rows, vector(weights, x), group, written)
    else:
        share(numba_aggregate.forward, pieces, work, rows, vector(weights, x), group, written)
    RUNS["aggregate", "numba"] += 1
    return out


aggregate = torch.library.custom_op("sj_tac::aggregate", aggregate_now, mutates_args=(), device_types="cpu")


@aggregate.register_fake
def _(x: Tensor, weights: Tensor, group: int, launcher: str = "") -> Tensor:
    check_aggregate(x, weights, group)
    return _like(x, -(-x.shape[0] // group))


@torch.library.custom_op("sj_tac::aggregate_backward", mutates_args=(), device_types="cpu")
def aggregate_backward(
    go: Tensor, x: Tensor, weights: Tensor, group: int, need_x: bool, need_weights: bool, launcher: str = ""
) -> tuple[Tensor, Tensor]:
    """Gradients to x and weights; empty where not needed."""
    refuse_dtype("aggregate", x, ON_CPU)
    check_aggregate(x, weights, group, go)
    numba_aggregate = _compiled()
    frames, size = x.shape[0], x.numel() // x.shape[0]
    pieces = -(-size // numba_aggregate.PIECE)
    gx = _like(x, frames) if need_x else x.new_empty(0)
    # A weight's gradient is summed piece by piece, so that it does not depend on how many threads share the pieces.
    partial = weights.new_zeros(pieces if need_weights else 0, frames)
    read = numba_aggregate.Frames(_rows(go, x), _rows(x, x), vector(weights, x))
    written = numba_aggregate.Gradients(
        _rows(gx, x) if need_x else frames_or_none(None, False, x).reshape(frames, 0), partial.numpy()
    )
    zero, work = vector(weights.new_zeros(1), x)[0], int(x.numel() * costs.SUMMED_BACK)
    share(numba_aggregate.backward, pieces, work, read, group, zero, written)
    RUNS["aggregate", "numba"] += 1
    return gx, partial.sum(0) if need_weights else weights.new_empty(0)


@aggregate_backward.register_fake
def _(
    go: Tensor, x: Tensor, weights: Tensor, group: int, need_x: bool, need_weights: bool, launcher: str = ""
) -> tuple[Tensor, Tensor]:
    check_aggregate(x, weights, group, go)
    gx = _like(x, x.shape[0]) if need_x else x.new_empty(0)
    return gx, weights.new_empty(x.shape[0] if need_weights else 0)


def on_cuda(x: Tensor, weights: Tensor, group: int, launcher: str = "") -> Tensor:
    """``aggregate`` by the CUDA kernel, past torch's dispatch."""
    from sj_tac.kernels.gpu import aggregate as cuda_aggregate

    refuse_dtype("aggregate", x, ON_CUDA)
    check_aggregate(x, weights, group)
    name, launch = launchers.named(launcher)
    out = cuda_aggregate.forward(launch, x, weights, group)
    RUNS["aggregate", name] += 1
    return out


aggregate.register_kernel("cuda", on_cuda)


@aggregate_backward.register_kernel("cuda")
def _backward_on_cuda(
    go: Tensor, x: Tensor, weights: Tensor, group: int, need_x: bool, need_weights: bool, launcher: str = ""
) -> tuple[Tensor, Tensor]:
    from sj_tac.kernels.gpu import aggregate as cuda_aggregate

    refuse_dtype("aggregate", x, ON_CUDA)
    check_aggregate(x, weights, group, go)
    name, launch = launchers.named(launcher)
    gx, g_weights = cuda_aggregate.backward(launch, go, x, weights, group, need_x, need_weights)
    RUNS["aggregate", name] += 1
    return (x.new_empty(0) if gx is None else gx), (weights.new_empty(0) if g_weights is None else g_weights)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.group, ctx.launcher = inputs[2:]


def _backward(ctx: Any, go: Tensor) -> tuple[Any, ...]:
    x, weights = ctx.saved_tensors
    need_x, need_weights = ctx.needs_input_grad[:2]
    gx, g_weights = aggregate_backward(go, x, weights, ctx.group, need_x, need_weights, ctx.launcher)
    return gx if need_x else None, g_weights if need_weights else None, None, None


aggregate.register_autograd(_backward, setup_context=_setup)


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.group, *ctx.needed, ctx.launcher = inputs[3:]


def _second(ctx: Any, by_gx: Tensor, by_weights: Tensor) -> tuple[Any, ...]:
    """The gradients are products of go with weights and with x, so theirs are the same sums of other factors."""
    go, x, weights = ctx.saved_tensors
    group, (need_x, need_weights), launcher = ctx.group, ctx.needed, ctx.launcher
    to_go = to_x = to_weights = None
    if need_x:
        to_go = aggregate(by_gx, weights, group, launcher)
        to_weights = aggregate_backward(go, by_gx, weights, group, False, True, launcher)[1]
    if need_weights:
        through = aggregate(x, by_weights, group, launcher)
        to_go = through if to_go is None else to_go + through
        to_x = aggregate_backward(go, x, by_weights, group, True, False, launcher)[0]
    return to_go, to_x, to_weights, None, None, None, None


aggregate_backward.register_autograd(_second, setup_context=_setup_second)
