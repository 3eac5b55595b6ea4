"""What norms and pools of the host compute, as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from spikingjelly.activation_based import functional
from torch import Tensor, nn

from sj_tac.host import dispatch


def affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Scale and shift [C] of a BatchNorm in eval mode, differentiable in its weight and bias."""
    # Past the module's own look-up, which costs more than the arithmetic; a parametrized weight is in neither.
    weight, bias = (norm._parameters[n] if n in norm._parameters else getattr(norm, n) for n in ("weight", "bias"))
    mean, var = norm._buffers["running_mean"], norm._buffers["running_var"]
    numbers = var.device.type == "cpu" and var.dtype is torch.float32 and dispatch.is_plain(var)
    if numbers and not dispatch.differentiates(weight, bias):
        return _affine_of_numbers(mean, var, norm.eps, weight, bias)
    invstd = 1 / torch.sqrt(var + norm.eps)
    scale = invstd if weight is None else weight * invstd
    shift = -mean * scale
    return scale, shift if bias is None else bias + shift


_ONE = np.float32(1)


def _affine_of_numbers(
    mean: Tensor, var: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``affine`` in NumPy, operation for operation: a call of torch's costs more than the arithmetic of a few channels."""
    scale = np.add(var.numpy(), np.float32(eps))
    np.sqrt(scale, out=scale)
    np.divide(_ONE, scale, out=scale)
    if weight is not None:
        np.multiply(weight.detach().numpy(), scale, out=scale)
    shift = np.multiply(mean.numpy(), scale)
    if bias is None:
        np.negative(shift, out=shift)
    else:
        np.subtract(bias.detach().numpy(), shift, out=shift)  # b - m s is b + (-m) s, to the last bit
    return torch.from_numpy(scale), torch.from_numpy(shift)


def pool_frames(pool: Any, frames: Tensor) -> Tensor:
    """A pool on frames [T, N, C, H, W], by torch's own class, whatever the module has become."""
    kind = nn.MaxPool2d if isinstance(pool, nn.MaxPool2d) else nn.AvgPool2d
    pooled: Tensor = functional.seq_to_ann_forward(frames, lambda x: kind.forward(pool, x))
    return pooled


def pool_window(pool: Any) -> tuple[int, ...] | None:
    """(kh, kw, sh, sw, ph, pw) of a pool that the fused kernels know, else None."""

    def pair(value: Any) -> tuple[int, int]:
        return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))

    plain = not pool.ceil_mode
    if isinstance(pool, nn.MaxPool2d):
        plain = plain and not pool.return_indices and pair(pool.dilation) == (1, 1)
    elif isinstance(pool, nn.AvgPool2d):
        plain = plain and pool.divisor_override is None and (pool.count_include_pad or pair(pool.padding) == (0, 0))
    else:
        return None
    return (*pair(pool.kernel_size), *pair(pool.stride), *pair(pool.padding)) if plain else None
