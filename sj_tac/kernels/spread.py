"""A call of ``fire`` with a residual as one without: one drive a step, with affine map and residual in it; and the way back.

What a forward kernel that adds residuals itself need not do; the backward does, because the gradient to a residual has one
frame a step anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sj_tac.kernels.operands import Operands
from sj_tac.kernels.reference import accumulation_dtype, repeat


def spread(o: Operands) -> tuple[Tensor, None, None, Tensor | None, list[int]]:
    """y [T, N, C, H, W] in the accumulation dtype, no scale, no shift, linear [T, 2] or None, and lengths, all 1."""
    assert o.residual is not None
    wide = accumulation_dtype(o.y.dtype)
    drives, linear = o.y.to(wide), o.linear
    if o.scale is not None and o.shift is not None:
        drives = drives * o.scale.view(-1, 1, 1) + o.shift.view(-1, 1, 1)
    drives = repeat(drives, o.lengths) + o.residual.to(wide)
    if linear is not None:
        linear = linear.repeat_interleave(torch.tensor(o.lengths, device=linear.device), 0)
    return drives, None, None, linear, [1] * sum(o.lengths)


def gather(
    g_drives: Tensor, g_linear: Tensor | None, y: Tensor, scale: Tensor | None, lengths: Sequence[int]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients to y, scale, shift and linear from those to every step's drive [T, N, C, H, W] and linear [T, 2]."""
    steps = torch.tensor(lengths, device=y.device)
    index = torch.arange(len(lengths), device=y.device).repeat_interleave(steps)
    by_drive = torch.zeros_like(y, dtype=g_drives.dtype).index_add_(0, index, g_drives)
    if g_linear is not None:
        g_linear = g_linear.new_zeros(len(lengths), 2).index_add_(0, index, g_linear)
    if scale is None:
        return by_drive.to(y.dtype), None, None, g_linear
    dims = (0, 1, 3, 4)
    g_scale, g_shift = (by_drive * y.to(by_drive.dtype)).sum(dims), by_drive.sum(dims)
    return (by_drive * scale.view(-1, 1, 1)).to(y.dtype), g_scale, g_shift, g_linear
