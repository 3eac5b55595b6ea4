"""A call of ``fire`` with a residual as one without: one drive a step, with affine map and residual in it; and the way back.

For the CPU's backward, and its kernels of general pools. The CUDA kernels read residuals themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sj_tac.kernels.operands import Operands
from sj_tac.kernels.reference import accumulation_dtype, repeat


def spread(o: Operands) -> Operands:
    """The call on drives [T, N, C, H, W] in the accumulation dtype: no residual, scale and shift, and lengths all 1."""
    assert o.residual is not None
    wide = accumulation_dtype(o.y.dtype)
    drives, linear = o.y.to(wide), o.linear
    if o.scale is not None and o.shift is not None:
        drives = drives * o.scale.view(-1, 1, 1) + o.shift.view(-1, 1, 1)
    drives = repeat(drives, o.lengths) + o.residual.to(wide)
    if linear is not None:
        linear = repeat(linear, o.lengths)
    ones = [1] * sum(o.lengths)
    return o._replace(y=drives, residual=None, scale=None, shift=None, linear=linear, lengths=ones)


def _sums(steps: Tensor, lengths: Sequence[int]) -> Tensor:
    """What [T, ...] sums to over the steps of each drive, in their order; all lengths but the last are equal."""
    if all(length == 1 for length in lengths):
        return steps
    k, ragged = lengths[0], lengths[-1] != lengths[0]
    whole = len(lengths) - ragged
    parts = [steps[: whole * k].reshape(whole, k, *steps.shape[1:]).sum(1)] if whole else []
    if ragged:
        parts.append(steps[whole * k :].sum(0, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gather(g_drives: Tensor, g_linear: Tensor, o: Operands) -> list[Tensor]:
    """Gradients to y, residual, scale, shift and linear, from those to every step's drive [T, N, C, H, W] and linear [T, 2].

    Each is a tensor of its own, as an operator must return; empty for what is None.
    """
    assert o.residual is not None
    y, none = o.y, o.y.new_empty(0, dtype=g_drives.dtype)
    by_drive, by_linear = _sums(g_drives, o.lengths), none if o.linear is None else _sums(g_linear, o.lengths)
    g_residual = g_drives.to(o.residual.dtype)
    if o.scale is None:
        by_drive = by_drive.to(y.dtype, copy=by_drive is g_drives)
        return [by_drive, g_residual, none, none.clone(), by_linear.clone()]
    dims = (0, 1, 3, 4)
    g_scale, g_shift = (by_drive * y.to(by_drive.dtype)).sum(dims), by_drive.sum(dims)
    return [(by_drive * o.scale.view(-1, 1, 1)).to(y.dtype), g_residual, g_scale, g_shift, by_linear.clone()]
