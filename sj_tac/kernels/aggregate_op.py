"""``sj_tac::aggregate`` and its backward as torch operators: fake kernels and autograd; the kernels are in cpu/ and gpu/."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sj_tac.kernels.backends import CPP
from sj_tac.kernels.checks import check_aggregate, refuse_dtype
from sj_tac.kernels.cpu import aggregate as on_cpu
from sj_tac.kernels.gpu import launchers
from sj_tac.kernels.layout import RUNS, empty, in_memory, is_channels_last

# Dtypes of frames on each device.
ON_CPU = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ON_CUDA = (torch.float32, torch.float16, torch.bfloat16)


def _like(x: Tensor, frames: int) -> Tensor:
    """Memory for ``frames`` frames in the memory format of x."""
    return empty(x, [frames, *x.shape[1:]], x.dim() > 3 and is_channels_last(x))


def aggregate_now(x: Tensor, weights: Tensor, group: int, launcher: str = "") -> Tensor:
    """``out[g] = sum_j weights[g * group + j] x[g * group + j]``: x [T, ...], weights [T].

    In float32 or float64, or, for x and the sums, in bfloat16 or float16 with weights in float32.

    Args:
        launcher: what is to launch the CUDA kernel, by its name; "": the first that works. Without meaning on a CPU.
    """
    x, weights = in_memory(x), in_memory(weights)
    refuse_dtype("aggregate", x, ON_CPU)
    check_aggregate(x, weights, group)
    RUNS["aggregate", CPP] += 1
    return on_cpu.forward(x, weights, group)


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
    gx, g_weights = on_cpu.backward(go, x, weights, group, need_x, need_weights)
    RUNS["aggregate", CPP] += 1
    return (x.new_empty(0) if gx is None else gx), (weights.new_empty(0) if g_weights is None else g_weights)


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

    x, weights = in_memory(x), in_memory(weights)
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
