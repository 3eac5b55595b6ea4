"""``sj_tac::fire`` and its backward as torch operators: fake kernels and autograd here, the CPU kernel from Numba.

Numba is imported, and compiles, when an operator first runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Calls that really ran, by kernel name; what a report says about kernels is read off these.
RUNS: dict[str, int] = {"numba": 0}


def pooled_size(height: int, width: int, pool: int, window: Sequence[int]) -> tuple[int, int]:
    """Height and width behind the pool; window is (kh, kw, sh, sw, ph, pw)."""
    if not pool:
        return height, width
    kh, kw, sh, sw, ph, pw = window
    return (height + 2 * ph - kh) // sh + 1, (width + 2 * pw - kw) // sw + 1


def _shapes(
    y: Tensor, lengths: Sequence[int], pool: int, window: Sequence[int], weighted: bool, group: int
) -> tuple[list[int], int]:
    steps = sum(lengths)
    rows = -(-steps // group) if weighted else steps
    height, width = pooled_size(y.shape[3], y.shape[4], pool, window)
    return [rows, y.shape[1], y.shape[2], height, width], steps


def _planes(x: Tensor) -> np.ndarray:
    """[..., N, C, H, W] as an array [..., N*C, H*W]."""
    lead = x.shape[:-4]
    planes: np.ndarray = x.detach().contiguous().view(*lead, x.shape[-4] * x.shape[-3], -1).numpy()
    return planes


def _constants(
    y: Tensor, q: Tensor | None, tau: float, rest: float, threshold: float, area: float
) -> tuple[np.floating[Any], ...]:
    kind = np.float64 if y.dtype == torch.float64 else np.float32
    rate = float(q) if q is not None else tau
    return tuple(kind(v) for v in (rate, rest, threshold, 1.0, 0.0, area))


def _optional(x: Tensor | None, like: Tensor) -> np.ndarray:
    array: np.ndarray = (like.new_empty(0) if x is None else x.detach().to(like.dtype)).contiguous().numpy()
    return array


# The process that started Numba's threads; a forked child must not touch them.
_STARTED_IN: list[int] = []


def _threads_are_safe() -> bool:
    """Whether Numba's threads may be used: not by a forked child (OpenMP), nor where Numba has only its own work queue.

    Both would end the process: the one when a forked worker enters, the other when two Python threads do.
    """
    from numba.np.ufunc import parallel

    if not _STARTED_IN:
        parallel._launch_threads()  # type: ignore[no-untyped-call]
        _STARTED_IN.append(os.getpid())
    layer = parallel.threading_layer()  # type: ignore[no-untyped-call]
    return _STARTED_IN[0] == os.getpid() and layer != "workqueue"


def _share(kernel: str, planes: int, *arguments: Any) -> None:
    """The kernel over all planes, on as many threads as torch uses. A plane's result does not depend on their number."""
    import numba

    from sj_tac.kernels import numba_cpu

    limit: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    threads = min(torch.get_num_threads(), planes, limit)
    if threads > 1 and _threads_are_safe():
        numba.set_num_threads(threads)
        getattr(numba_cpu, f"{kernel}_parallel")(threads, planes, *arguments)
    else:
        getattr(numba_cpu, kernel)(0, planes, *arguments)


@torch.library.custom_op("sj_tac::fire", mutates_args=(), device_types="cpu")
def fire(
    y: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    v0: Tensor,
    linear: Tensor,
    q: Tensor | None,
    weights: Tensor | None,
    lengths: Sequence[int],
    mode: int,
    tau: float,
    rest: float,
    threshold: float,
    hard: bool,
    detach: bool,
    surrogate: int,
    alpha: float,
    pool: int,
    window: Sequence[int],
    area: float,
    group: int,
) -> tuple[Tensor, Tensor]:
    """BN affine -> neuron steps -> pool -> weighted sums; see ``sj_tac.functional.fire`` for what the arguments mean.

    Args:
        y: [G, N, C, H, W], float32 or float64, as all tensors here; scale, shift: [C] or None; v0: [N, C, H, W].
        linear: [G, 2], beta and gamma of the step on each drive; q: sigmoid(w) of a PLIF, 0-dim, without gradient.
        weights: [T], one weight for each step, summed in groups of ``group``; None for frames.
        lengths: steps on each drive.
    """
    shape, _ = _shapes(y, lengths, pool, window, weights is not None, group)
    out = y.new_empty(shape)
    v = torch.empty_like(v0, memory_format=torch.contiguous_format)
    _share(
        "forward", y.shape[1] * y.shape[2], _planes(y), _optional(scale, y), _optional(shift, y), _planes(v0),
        np.array(lengths), _optional(linear, y),
        _constants(y, q, tau, rest, threshold, area), mode, hard, pool, tuple(window), (y.shape[4], shape[4]),
        _optional(weights, y), group, _planes(out), _planes(v),
    )  # fmt: skip
    RUNS["numba"] += 1
    return out, v


@fire.register_fake
def _(
    y: Tensor, scale: Any, shift: Any, v0: Tensor, linear: Any, q: Any, weights: Any, lengths: Any, mode: Any, tau: Any,
    rest: Any, threshold: Any, hard: Any, detach: Any, surrogate: Any, alpha: Any, pool: int, window: Any, area: Any,
    group: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape, _ = _shapes(y, lengths, pool, window, weights is not None, group)
    return y.new_empty(shape), torch.empty_like(v0, memory_format=torch.contiguous_format)


@torch.library.custom_op("sj_tac::fire_backward", mutates_args=(), device_types="cpu")
def fire_backward(
    go: Tensor,
    gv: Tensor,
    y: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    v0: Tensor,
    linear: Tensor,
    q: Tensor | None,
    weights: Tensor | None,
    lengths: Sequence[int],
    mode: int,
    tau: float,
    rest: float,
    threshold: float,
    hard: bool,
    detach: bool,
    surrogate: int,
    alpha: float,
    pool: int,
    window: Sequence[int],
    area: float,
    group: int,
    need_linear: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients to y, scale, shift, v0, linear (zero where not needed) and weights (empty, as all of what is missing)."""
    from sj_tac.kernels import numba_surrogate

    steps, planes = sum(lengths), y.shape[1] * y.shape[2]
    gy = torch.empty_like(y, memory_format=torch.contiguous_format)
    gv0 = torch.empty_like(v0, memory_format=torch.contiguous_format)
    g_scale, g_shift = y.new_empty(planes), y.new_empty(planes)
    g_linear = y.new_zeros(planes, len(lengths), 2)
    g_weights = y.new_empty(planes, steps if weights is not None else 0)
    constants = _constants(y, q, tau, rest, threshold, area)
    _share(
        "backward", planes, _planes(go), _planes(gv), _planes(y), _optional(scale, y), _optional(shift, y), _planes(v0),
        np.array(lengths),
        _optional(linear, y), constants, mode, hard, detach, surrogate,
        numba_surrogate.constants(alpha, type(constants[0])), pool, tuple(window), (y.shape[4], go.shape[4]),
        _optional(weights, y), group, _planes(gy), _planes(gv0), g_scale.numpy(), g_shift.numpy(), g_linear.numpy(),
        g_weights.numpy(), need_linear,
    )  # fmt: skip
    RUNS["numba"] += 1
    channels = (y.shape[1], y.shape[2])
    none = y.new_empty(0)
    return (
        gy,
        none if scale is None else g_scale.view(channels).sum(0),
        none.clone() if shift is None else g_shift.view(channels).sum(0),
        gv0,
        g_linear.sum(0),
        g_weights.sum(0),
    )


@fire_backward.register_fake
def _(
    go: Tensor, gv: Tensor, y: Tensor, scale: Tensor | None, shift: Tensor | None, v0: Tensor, linear: Tensor, q: Any,
    weights: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def like(x: Tensor | None) -> Tensor:
        return y.new_empty(0 if x is None else x.shape)

    v = torch.empty_like(v0, memory_format=torch.contiguous_format)
    g = torch.empty_like(y, memory_format=torch.contiguous_format)
    return g, like(scale), like(shift), v, like(linear), like(weights)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Nothing of T frames: the steps are run again from y and v0.
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _backward(ctx: Any, go: Tensor, gv: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    gy, g_scale, g_shift, gv0, g_linear, g_weights = fire_backward(go, gv, *saved, *ctx.options, ctx.needs_input_grad[4])
    _, scale, shift, _, _, _, weights = saved
    return (
        gy,
        None if scale is None else g_scale,
        None if shift is None else g_shift,
        gv0,
        g_linear,
        None,
        None if weights is None else g_weights,
        *[None] * len(ctx.options),
    )


fire.register_autograd(_backward, setup_context=_setup)
