"""``sj_tac::fire`` and its backward as torch operators: fake kernels and autograd here, the CPU kernels from Numba.

Numba is imported, and compiles, when an operator first runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sj_tac.kernels.cpu.threads import RUNS, empty, flat, is_channels_last, share, vector
from sj_tac.kernels.pools import in_tiles, pooled_size
from sj_tac.kernels.reference import accumulation_dtype
from sj_tac.kernels.spread import gather, spread


def _outputs(
    y: Tensor, lengths: Sequence[int], pool: int, window: Sequence[int], weights: Tensor | None, group: int
) -> tuple[Tensor, Tensor, bool]:
    """Memory for the output and the voltages, and whether it is channels_last, as y's is."""
    last = is_channels_last(y) and (y.device.type == "cuda" or in_tiles(y, pool, window))
    rows = -(-sum(lengths) // group) if weights is not None else sum(lengths)
    height, width = pooled_size(y.shape[3], y.shape[4], pool, window)
    out = empty(y, [rows, y.shape[1], y.shape[2], height, width], last)
    return out, empty(y, list(y.shape[1:]), last, accumulation_dtype(y.dtype)), last


def _constants(
    y: Tensor, q: Tensor | None, tau: float, rest: float, threshold: float, hard: bool
) -> tuple[np.floating[Any], ...]:
    """tau or sigmoid(w), rest, threshold, limits of the voltage behind the reset, 1 and 0, in y's dtype."""
    kind = np.float64 if y.dtype == torch.float64 else np.float32
    low, high = (rest, rest) if hard else (-math.inf, math.inf)
    return tuple(kind(v) for v in (float(q) if q is not None else tau, rest, threshold, low, high, 1.0, 0.0))


def _linear(y: Tensor, linear: Tensor | None, decay: float, gain: float) -> np.ndarray:
    """beta and gamma on each drive, [G, 2]."""
    if linear is not None:
        return vector(linear, y)
    return _same_on_all(y.shape[0], decay, gain, y.dtype)


@lru_cache(maxsize=256)
def _same_on_all(drives: int, decay: float, gain: float, dtype: torch.dtype) -> np.ndarray:
    kind = np.float64 if dtype == torch.float64 else np.float32
    return np.full((drives, 2), (decay, gain), kind)


@lru_cache(maxsize=256)
def _steps_of(lengths: tuple[int, ...]) -> np.ndarray:
    return np.array(lengths)


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
) -> tuple[Tensor, Tensor]:
    """BN affine -> neuron steps -> pool -> weighted sums; see ``sj_tac.functional.fire`` for what the arguments mean.

    Args:
        y: [G, N, C, H, W], float32 or float64, as all tensors here; residual: [T, N, C, H, W], added step by step, or None;
            scale, shift: [C]; v0: [N, C, H, W], or None at rest.
        linear: [G, 2], beta and gamma of the step on each drive, or None where they are the numbers ``decay`` and ``gain``.
        q: sigmoid(w) of a PLIF, 0-dim, without gradient.
        weights: [T], one weight for each step, summed in groups of ``group``; None for frames.
        lengths: steps on each drive; mode: as ``host.charge_mode``; pool: NO_POOL, MAX_POOL or AVG_POOL.

    Returns:
        Output and voltages in the memory format of y, but contiguous where ``in_tiles`` is False.
    """
    if residual is not None and not in_tiles(y, pool, window):
        y, scale, shift, linear, lengths, residual = (*spread(y, residual, scale, shift, linear, lengths), None)
    out, v, last = _outputs(y, lengths, pool, window, weights, group)
    constants, steps = _constants(y, q, tau, rest, threshold, hard), _steps_of(tuple(lengths))
    shared = (steps, _linear(y, linear, decay, gain), constants, mode)
    work = y.numel() // y.shape[0] * sum(lengths)
    affine, ws = (vector(scale, y), vector(shift, y)), vector(weights, y)
    if in_tiles(y, pool, window):
        from sj_tac.kernels.cpu import forward as numba_forward
        from sj_tac.kernels.cpu import tiles as numba_tiles

        share(
            numba_forward, "forward", out.numel() // out.shape[0], work, flat(y, last, y), flat(residual, last, y), *affine,
            flat(v0, last, y), *shared, numba_tiles.WINDOWS if pool else numba_tiles.NEURONS, last,
            (y.shape[4], y.shape[2], y.shape[3] * y.shape[4]), ws, group, flat(out, last, y), flat(v, last, y),
        )  # fmt: skip
    else:
        from sj_tac.kernels.cpu import planes as numba_planes

        planes = y.shape[1] * y.shape[2]
        share(
            numba_planes, "forward", planes, work, _planes(y, planes), *affine, _planes(v0, planes, y), *shared,
            constants[0].dtype.type(window[0] * window[1]), pool, tuple(window), (y.shape[4], out.shape[4]), ws, group,
            _planes(out, planes), _planes(v, planes),
        )  # fmt: skip
    RUNS["fire", "numba"] += 1
    return out, v


fire = torch.library.custom_op("sj_tac::fire", fire_now, mutates_args=(), device_types="cpu")


def _planes(x: Tensor | None, planes: int, like: Tensor | None = None) -> np.ndarray:
    """[..., N, C, H, W] as an array [..., N*C, H*W]."""
    if x is None:
        assert like is not None
        return np.empty((0, 0), vector(None, like).dtype)
    array: np.ndarray = x.detach().contiguous().view(*x.shape[:-4], planes, -1).numpy()
    return array


@fire.register_fake
def _(
    y: Tensor, residual: Any, scale: Any, shift: Any, v0: Any, linear: Any, q: Any, weights: Any, lengths: Any, mode: Any,
    tau: Any, decay: Any, gain: Any, rest: Any, threshold: Any, hard: Any, detach: Any, surrogate: Any, alpha: Any,
    pool: int, window: Any, group: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _outputs(y, lengths, pool, window, weights, group)[:2]


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
    need_linear: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients to y, scale, shift, v0, linear and weights; empty for what is None, zero for a linear that needs none."""
    from sj_tac.kernels.cpu import surrogate as numba_surrogate

    tiled = in_tiles(y, pool, window)
    last = tiled and is_channels_last(y)
    gy = empty(y, list(y.shape), last)
    gv0 = y.new_empty(0) if v0 is None else empty(y, list(y.shape[1:]), last)
    constants, steps = _constants(y, q, tau, rest, threshold, hard), _steps_of(tuple(lengths))
    kind = type(constants[0])
    # keep, rest_gain, h_gain: how the voltage behind the reset depends on h and, with the reset in the graph, on the spike.
    resets = (0.0, 0.0 if detach else rest, 0.0 if detach else -1.0) if hard else (1.0, 0.0 if detach else -threshold, 0.0)
    derivative = (
        tuple(kind(r) for r in resets), surrogate, numba_surrogate.constants(alpha, kind)
    )  # fmt: skip
    shared = (steps, _linear(y, linear, decay, gain), constants, mode, *derivative)
    work = 3 * y.numel() // y.shape[0] * sum(lengths)
    affine, ws = (vector(scale, y), vector(shift, y)), vector(weights, y)
    n, c, height, width = y.shape[1:]
    slots = go.numel() // go.shape[0]
    rows = 2 if pool else 1
    # A chunk is whole planes, or whole rows (of windows) of a sample: sums are taken chunk by chunk.
    block = width // rows * c if last else width * height // rows**2
    chunk = block * max(1, 256 // block)
    chunks = -(-slots // chunk) if tiled else n * c
    sums = y.new_zeros(2, chunks * c if last else n * c)
    g_linear, g_weights = y.new_zeros(chunks, len(lengths), 2), y.new_zeros(chunks, sum(lengths) if ws.size else 0)
    partial = (sums[0].numpy(), sums[1].numpy(), g_linear.numpy(), g_weights.numpy(), need_linear)
    if tiled:
        from sj_tac.kernels.cpu import backward as numba_backward
        from sj_tac.kernels.cpu import tiles as numba_tiles

        share(
            numba_backward, "backward", chunks, work, flat(go, last, y), flat(gv, last, y), flat(y, last, y), *affine,
            flat(v0, last, y), *shared, numba_tiles.WINDOWS if pool else numba_tiles.NEURONS, last,
            (width, c, height * width), chunk, ws, group, flat(gy, last, y), vector(None, y) if v0 is None else
            flat(gv0, last, y), *partial,
        )  # fmt: skip
    else:
        from sj_tac.kernels.cpu import planes as numba_planes

        share(
            numba_planes, "backward", chunks, work, _planes(go, chunks), _planes(gv, chunks), _planes(y, chunks), *affine,
            _planes(v0, chunks, y), *shared, kind(window[0] * window[1]), pool, tuple(window), (width, go.shape[4]), ws,
            group, _planes(gy, chunks), _planes(None if v0 is None else gv0, chunks, y), *partial,
        )  # fmt: skip
    RUNS["fire", "numba"] += 1
    by_channel = sums.view(2, -1, c).sum(1)
    none = y.new_empty(0)
    return (
        gy,
        none if scale is None else by_channel[0].clone(),
        none.clone() if shift is None else by_channel[1].clone(),
        gv0,
        none.clone() if linear is None else g_linear.sum(0),
        g_weights.sum(0),
    )


@fire_backward.register_fake
def _(
    go: Tensor, gv: Tensor, y: Tensor, scale: Tensor | None, shift: Tensor | None, v0: Tensor | None, linear: Tensor | None,
    q: Any, weights: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def like(x: Tensor | None) -> Tensor:
        return y.new_empty(0 if x is None else x.shape, dtype=accumulation_dtype(y.dtype))

    last = is_channels_last(y) and (y.device.type == "cuda" or in_tiles(y, rest[11], rest[12]))
    gv0 = like(None) if v0 is None else empty(y, list(y.shape[1:]), last, accumulation_dtype(y.dtype))
    return empty(y, list(y.shape), last), like(scale), like(shift), gv0, like(linear), like(weights)


def fire_on_cuda(launch: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """``fire`` by the CUDA programs; ``launch`` as cuda_fire.Launch."""
    from sj_tac.kernels.gpu import fire as cuda_fire

    return cuda_fire.Fire(*arguments).forward(launch)


def fire_backward_on_cuda(launch: Any, go: Tensor, gv: Tensor, y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """``fire_backward`` by the CUDA programs."""
    from sj_tac.kernels.gpu import fire as cuda_fire

    scale, shift, linear = arguments[0], arguments[1], arguments[3]
    found = cuda_fire.Fire(y, None, *arguments[:-1]).backward(launch, go, gv, arguments[-1])
    gy, g_scale, g_shift, gv0, g_linear, g_weights = found

    def or_none(gradient: Tensor | None, wanted: bool = True) -> Tensor:
        # A tensor of its own in every place, as an operator must return.
        return gradient.clone() if gradient is not None and wanted else y.new_empty(0, dtype=torch.float32)

    if g_linear is None and linear is not None:
        g_linear = torch.zeros_like(linear, memory_format=torch.contiguous_format)
    return (
        gy, or_none(g_scale, scale is not None), or_none(g_shift, shift is not None), gv0 if gv0 is not None else
        or_none(None), or_none(g_linear), or_none(g_weights),
    )  # fmt: skip


@fire.register_kernel("cuda")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    from sj_tac.kernels.gpu import launch as cupy_launch

    RUNS["fire", "cupy"] += 1
    return fire_on_cuda(cupy_launch.launch, *arguments)


@fire_backward.register_kernel("cuda")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    from sj_tac.kernels.gpu import launch as cupy_launch

    RUNS["fire", "cupy"] += 1
    return fire_backward_on_cuda(cupy_launch.launch, *arguments)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Nothing of T frames but the residual, which is there anyway: the steps are run again from y and v0.
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx: Any, go: Tensor, gv: Tensor) -> tuple[Any, ...]:
    y, residual, scale, shift, v0, linear, q, weights = ctx.saved_tensors
    lengths, *options = ctx.options
    inputs = (y, scale, shift, v0, linear, q, weights, lengths)
    if residual is not None:
        drives, _, _, steps_linear, ones = spread(y, residual, scale, shift, linear, lengths)
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
