"""``sj_tac::fire`` and its backward as torch operators: schema, fake kernels, autograd; the kernels are in cpu/ and gpu/.

Numba is imported, and compiles, when an operator first runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sj_tac.kernels.checks import check_fire, check_fire_backward, emitted_shape, refuse_dtype
from sj_tac.kernels.gpu import launchers
from sj_tac.kernels.layout import RUNS, empty, is_channels_last
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import in_tiles
from sj_tac.kernels.reference import accumulation_dtype
from sj_tac.kernels.spread import gather, spread

# Dtypes of drives on each device.
ON_CPU = (torch.float32, torch.float64)
ON_CUDA = (torch.float32, torch.float16, torch.bfloat16)


def fire_now(
    y: Tensor,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    v0: Tensor | None,
    linear: Tensor | None,
    q: Tensor | None,
    weights: Tensor | None,
    lengths: Sequence[int],
    mode: int,
    tau: float,
    decay: float,
    gain: float,
    rest: float,
    threshold: float,
    hard: bool,
    detach: bool,
    surrogate: int,
    alpha: float,
    pool: int,
    window: Sequence[int],
    group: int,
    launcher: str = "",
) -> tuple[Tensor, Tensor]:
    """BN affine -> neuron steps -> pool -> weighted sums; see ``sj_tac.functional.fire`` for what the arguments mean.

    Args:
        y: [G, N, C, H, W], float32 or float64, as all tensors here; residual: [T, N, C, H, W], added step by step, or None;
            scale, shift: [C]; v0: [N, C, H, W], or None at rest.
        linear: [G, 2], beta and gamma of the step on each drive, or None where they are the numbers ``decay`` and ``gain``.
        q: sigmoid(w) of a PLIF, 0-dim, without gradient.
        weights: [T], one weight for each step, summed in groups of ``group``; None for frames.
        launcher: what is to launch the CUDA kernels, by its name; "": the first that works. Without meaning on a CPU.
        lengths: steps on each drive; mode: as ``host.charge_mode``; pool: NO_POOL, MAX_POOL or AVG_POOL.

    Raises:
        ValueError: operands that do not fit each other. NotImplementedError: forward-mode derivatives.

    Returns:
        Output and voltages in the memory format of y, but contiguous where ``in_tiles`` is False.
    """
    from sj_tac.kernels.cpu import fire as kernels

    o = Operands(
        y, residual, scale, shift, v0, linear, q, weights, lengths, mode, tau, decay, gain, rest, threshold, hard, detach,
        surrogate, alpha, pool, window, group, launcher,
    )  # fmt: skip
    refuse_dtype("fire", y, ON_CPU)
    check_fire(o)
    out = kernels.forward(o)
    RUNS["fire", "numba"] += 1
    return out


fire = torch.library.custom_op("sj_tac::fire", fire_now, mutates_args=(), device_types="cpu")


def _is_last(o: Operands) -> bool:
    """Whether what the kernels put out is channels_last, as y is."""
    return is_channels_last(o.y) and (o.y.device.type == "cuda" or in_tiles(o.y, o.pool, o.window))


@fire.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    o = Operands(*arguments)
    check_fire(o)
    last, wide = _is_last(o), accumulation_dtype(o.y.dtype)
    return empty(o.y, list(emitted_shape(o)), last), empty(o.y, list(o.y.shape[1:]), last, wide)


@torch.library.custom_op("sj_tac::fire_backward", mutates_args=(), device_types="cpu")
def fire_backward(
    go: Tensor,
    gv: Tensor,
    y: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    v0: Tensor | None,
    linear: Tensor | None,
    q: Tensor | None,
    weights: Tensor | None,
    lengths: Sequence[int],
    mode: int,
    tau: float,
    decay: float,
    gain: float,
    rest: float,
    threshold: float,
    hard: bool,
    detach: bool,
    surrogate: int,
    alpha: float,
    pool: int,
    window: Sequence[int],
    group: int,
    launcher: str,
    need_linear: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients to y, scale, shift, v0, linear and weights; empty for what is None, zero for a linear that needs none."""
    from sj_tac.kernels.cpu import fire as kernels

    o = Operands(
        y, None, scale, shift, v0, linear, q, weights, lengths, mode, tau, decay, gain, rest, threshold, hard, detach,
        surrogate, alpha, pool, window, group, launcher,
    )  # fmt: skip
    refuse_dtype("fire_backward", y, ON_CPU)
    check_fire_backward(go, gv, o)
    gy, g_scale, g_shift, gv0, g_linear, g_weights = kernels.backward(go, gv, o, need_linear)
    RUNS["fire", "numba"] += 1
    return gy, g_scale, g_shift, gv0, g_linear, g_weights


@fire_backward.register_fake
def _(go: Tensor, gv: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    o = Operands(y, None, *arguments[:-1])
    check_fire_backward(go, gv, o)
    wide, last = accumulation_dtype(y.dtype), _is_last(o)

    def like(x: Tensor | None) -> Tensor:
        return y.new_empty(0 if x is None else x.shape, dtype=wide)

    gv0 = like(None) if o.v0 is None else empty(y, list(y.shape[1:]), last, wide)
    return empty(y, list(y.shape), last), like(o.scale), like(o.shift), gv0, like(o.linear), like(o.weights)


def fire_on_cuda(launch: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """``fire`` by the CUDA programs; ``launch`` as gpu.program.Launcher."""
    from sj_tac.kernels.gpu import fire as cuda_fire

    o = Operands(*arguments)
    refuse_dtype("fire", o.y, ON_CUDA)
    check_fire(o)
    return cuda_fire.Fire(o).forward(launch)


def fire_backward_on_cuda(launch: Any, go: Tensor, gv: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """``fire_backward`` by the CUDA programs."""
    from sj_tac.kernels.gpu import fire as cuda_fire

    o = Operands(y, None, *arguments[:-1])
    refuse_dtype("fire_backward", y, ON_CUDA)
    check_fire_backward(go, gv, o)
    gy, g_scale, g_shift, gv0, g_linear, g_weights = cuda_fire.Fire(o).backward(launch, go, gv, arguments[-1])

    def or_none(gradient: Tensor | None, wanted: bool = True) -> Tensor:
        # A tensor of its own in every place, as an operator must return.
        return gradient.clone() if gradient is not None and wanted else y.new_empty(0, dtype=torch.float32)

    if g_linear is None and o.linear is not None:
        g_linear = torch.zeros_like(o.linear, memory_format=torch.contiguous_format)
    return (
        gy, or_none(g_scale, o.scale is not None), or_none(g_shift, o.shift is not None), gv0 if gv0 is not None else
        or_none(None), or_none(g_linear), or_none(g_weights),
    )  # fmt: skip


@fire.register_kernel("cuda")
def _on_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    name, launch = launchers.named(Operands(*arguments).launcher)
    out = fire_on_cuda(launch, *arguments)
    RUNS["fire", name] += 1
    return out


@fire_backward.register_kernel("cuda")
def _backward_on_cuda(*arguments: Any) -> tuple[Tensor, ...]:
    name, launch = launchers.named(arguments[-2])
    found = fire_backward_on_cuda(launch, *arguments)
    RUNS["fire", name] += 1
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Nothing of T frames but the residual, which is there anyway: the steps are run again from y and v0.
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx: Any, go: Tensor, gv: Tensor) -> tuple[Any, ...]:
    y, residual, scale, shift, v0, linear, q, weights = ctx.saved_tensors
    lengths, *options = ctx.options
    inputs = (y, scale, shift, v0, linear, q, weights, lengths)
    if residual is not None:
        drives, _, _, steps_linear, ones = spread(Operands(*ctx.saved_tensors, *ctx.options))
        inputs, go = (drives, None, None, v0, steps_linear, q, weights, ones), go.to(drives.dtype)
    found = fire_backward(go, gv, *inputs, *options, ctx.needs_input_grad[5])
    gy, g_scale, g_shift, gv0, g_linear, g_weights = (
        None if x is None else g for x, g in zip((*inputs[:5], weights), found, strict=True)
    )
    g_residual = None
    if residual is not None:
        g_residual = found[0].to(residual.dtype)
        gy, g_scale, g_shift, g_linear = gather(found[0], g_linear, y, scale, lengths)
    none = [None] * (1 + len(options))
    return (gy, g_residual, g_scale, g_shift, gv0, g_linear, None, g_weights, *none)


fire.register_autograd(_backward, setup_context=_setup)


def _no_second(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    raise NotImplementedError(
        "fire: the compiled kernels have no gradient of a gradient (create_graph=True), and surrogate gradients of spikes "
        "have no second order that means anything; take gradients of first order"
    )


fire_backward.register_autograd(_no_second)
