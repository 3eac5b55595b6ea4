"""How frames lie in memory, contiguous or channels_last, and a count of the kernels that ran."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import torch
from torch import Tensor

OptionalTensor = TypeVar("OptionalTensor", Tensor, Tensor | None)

# Calls that really ran, by operator and kernel; what a report says about kernels is read off these.
RUNS: Counter[tuple[str, str]] = Counter()


def is_channels_last(x: Tensor) -> bool:
    """Whether frames [..., C, H, W] lie in memory as [..., H, W, C] and not also as they are."""
    return not x.is_contiguous() and x.movedim(-3, -1).is_contiguous()


def empty(like: Tensor, shape: list[int], last: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor [..., C, H, W], in channels_last or contiguous."""
    if not last:
        return like.new_empty(shape, dtype=dtype)
    # No view: who detaches a neuron's voltage in place must not meet one.
    *ahead, channels, height, width = shape
    strides, size = [1, width * channels, channels], channels * height * width
    for n in reversed(ahead):
        strides.insert(0, size)
        size *= n
    return like.new_empty_strided(shape, strides, dtype=dtype)


def in_memory(x: OptionalTensor) -> OptionalTensor:
    """A tensor whose memory holds its numbers: torch negates the imaginary part of a conjugate when it is read, not before.

    torch's dispatch does this, too; who goes past it has to.
    """
    return x if x is None or not (x.is_neg() or x._is_zerotensor()) else x.clone()


def laid(x: Tensor, last: bool) -> Tensor:
    """Frames [..., C, H, W] without gaps, in channels_last or contiguous; a copy where they are not."""
    return x.movedim(-3, -1).contiguous().movedim(-1, -3) if last else x.contiguous()


def laid_like(x: Tensor, frame: Tensor) -> Tensor:
    """A voltage in the memory format of the drives [..., C, H, W] that it meets.

    What they make follows the voltage, and so does its gradient, which the BatchNorm in front would get. Of one sample
    torch's ``native_batch_norm_backward`` misreads a gradient that is channels_last beside drives that are contiguous.
    """
    if frame.dim() < 4 or frame.dim() != x.dim() or x.stride() == frame.stride():
        return x
    return laid(x, is_channels_last(frame))
