"""Training-mode BatchNorm of drives that stand for different numbers of steps, without repeating them.

Over frames repeated ``l_g`` times the batch statistics are ``mean = sum_g q_g sum x_g`` and ``var = sum_g q_g sum (x_g -
mean)^2`` with ``q_g = l_g / (T N H W)``: the same numbers from G drives instead of T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sj_tac.kernels.reference import constant

# Hooks on what autograd saves, as a checkpoint's; torch 2.6 cannot tell.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def statistics(x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance [C] of drives [G, N, C, ...], drive g counted ``lengths[g]`` times."""
    var, mean = torch.var_mean(x, [1, *range(3, x.dim())], correction=0)
    share = constant([n / sum(lengths) for n in lengths], x.dtype, x.device).unsqueeze(1)
    total = (share * mean).sum(0)
    return total, (share * (var + (mean - total) ** 2)).sum(0)


class _WeightedBatchNorm(torch.autograd.Function):
    """On drives [G * N, C, ...]: a view that a Function returned could not be added to in place, as residual nets do."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, lengths: Sequence[int],
        eps: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, var)
        ctx.lengths, ctx.eps = lengths, eps
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        # What a call that does not train saves of a batch is empty; CUDA insists that it is there.
        none = x.new_empty(0, dtype=mean.dtype)
        given, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, var, none, none, False, ctx.eps, [True, True, True]
        )
        # What is left is the statistics' own part: grad_x -= q_g * scale * (sum grad + x_hat * sum(grad * x_hat)).
        invstd = torch.rsqrt(var + ctx.eps)
        scale = invstd if weight is None else invstd * weight
        groups = len(ctx.lengths)
        count = sum(ctx.lengths) * (x.numel() // groups // x.shape[1])
        share = constant([n / count for n in ctx.lengths], x.dtype, x.device).unsqueeze(1)
        slope = share * (scale * invstd * by_weight)
        offset = share * (scale * by_bias) - slope * mean
        shape = [groups, 1, -1, *[1] * (x.dim() - 2)]
        drives = given.unflatten(0, (groups, -1)), x.unflatten(0, (groups, -1))
        through = drives[0].addcmul_(drives[1], slope.view(shape), value=-1).sub_(offset.view(shape)).flatten(0, 1)
        needs = ctx.needs_input_grad
        return through, by_weight if needs[1] else None, by_bias if needs[2] else None, None, None, None, None


def shared_batch_norm(
    y: Tensor, running: tuple[Any, Any], affine: tuple[Any, Any], momentum: float, eps: float, k: int, steps: int
) -> Tensor:
    """``F.batch_norm(expand(y), training=True)`` without its frames: [G * N, C, ...] -> [G * N, C, ...].

    Statistics are the batch's over T * N frames, each of y's counted as often as the expand repeats it; running statistics
    move as F.batch_norm moves them. Gradients of first order where groups have different lengths.

    Args:
        running: mean and variance, or None. affine: weight and bias, or None.
    """
    (running_mean, running_var), (weight, bias) = running, affine
    lengths = [k] * (steps // k) + ([steps % k] if steps % k else [])
    # The recomputation of a checkpoint stops in the middle of what saves its last tensor: statistics must move before that.
    stops = _top_hooks is None or _top_hooks(True) is not None
    if len(set(lengths)) > 1 or stops:
        with torch.no_grad():
            mean, var = statistics(y.view(len(lengths), -1, *y.shape[1:]), lengths)
            if running_mean is not None and running_var is not None:
                count = sum(lengths) * (y.numel() // y.shape[1] // len(lengths))
                running_mean.data.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.data.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        return _WeightedBatchNorm.apply(y, weight, bias, mean, var, tuple(lengths), eps)  # type: ignore[no-any-return]
    before = None if running_var is None else running_var.clone()
    made = torch.nn.functional.batch_norm(y, running_mean, running_var, weight, bias, True, momentum, eps)
    if before is not None and running_var is not None:
        # The variance of frames is the batch's own times n / (n - 1), with n as often that of y as a frame is repeated.
        n = y.numel() // y.shape[1]
        more = (n - 1) / n * (lengths[0] * n) / (lengths[0] * n - 1)
        with torch.no_grad():
            running_var.data.add_((running_var - before * (1 - momentum)) * (more - 1))
    return made
