"""``aggregate`` on a CUDA device: which programs run, on what grids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sj_tac.kernels.gpu import program as cuda
from sj_tac.kernels.layout import empty, is_channels_last

BLOCK = 128


def _prepared(x: Tensor, frames: int) -> tuple[Tensor, Tensor, bool]:
    """x without gaps, memory for ``frames`` frames in the same layout, and whether that is channels_last."""
    last = x.dim() > 3 and is_channels_last(x)
    return cuda.dense(x, last, x.dtype), empty(x, [frames, *x.shape[1:]], last), last


def _macros(x: Tensor, group: int, width: int) -> dict[str, int | bool]:
    return {
        "IO": cuda.IO[x.dtype], "WIDE": cuda.needs_wide(x.numel()), "GROUP": group, "WIDTH_V": width, "BLOCK": BLOCK
    }  # fmt: skip


def forward(launch: cuda.Launcher, x: Tensor, weights: Tensor, group: int) -> Tensor:
    """``out[g] = sum_j weights[g * group + j] x[g * group + j]``: x [T, ...], weights [T]."""
    x, out, _ = _prepared(x, -(-x.shape[0] // group))
    size = x[0].numel()
    width = cuda.widest(16 // x.element_size(), size, size, x, out)
    arguments = (x, cuda.vector(weights), out, np.int32(x.shape[0]), np.int64(size))
    program = cuda.program("aggregate_forward", **_macros(x, group, width))
    launch(cuda.Launch(program, -(-size // (width * BLOCK)), arguments, 0, x.device))
    return out


def backward(
    launch: cuda.Launcher, go: Tensor, x: Tensor, weights: Tensor, group: int, need_x: bool, need_weights: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients to x and weights, where needed."""
    frames = x.shape[0]
    x, gx, last = _prepared(x, frames)
    go = cuda.dense(go, last, x.dtype)
    size = x[0].numel()
    width = cuda.widest(16 // x.element_size(), size, size, x, go, gx)
    rounds = 8 if need_weights else 1
    blocks = -(-size // (width * BLOCK * rounds))
    partial = torch.empty(blocks, frames, dtype=torch.float32, device=x.device) if need_weights else None
    scratch, shared = cuda.tally(BLOCK, frames if need_weights else 0, blocks, x.device)
    arguments = (
        go, x, cuda.vector(weights), gx if need_x else None, partial, scratch, np.int32(frames), np.int64(size),
        np.int32(rounds),
    )  # fmt: skip
    program = cuda.program("aggregate_backward", **_macros(x, group, width))
    launch(cuda.Launch(program, blocks, arguments, shared, x.device))
    return gx if need_x else None, None if partial is None else partial.sum(0)
