"""The operators' arithmetic in plain PyTorch: any device, any dtype, differentiable by autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sj_tac import host
from sj_tac.host import dispatch

NAME = "reference"


accumulation_dtype = host.wide_dtype


@lru_cache(maxsize=256)
def _held(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)


def constant(numbers: Iterable[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor of numbers, made once: on a GPU a copy from the host waits, and cannot go into a CUDA graph."""
    if torch.compiler.is_compiling() or dispatch.is_transformed():  # what is made now must not outlive what made it so
        return torch.tensor(list(numbers), dtype=dtype, device=device)
    return _held(tuple(float(n) for n in numbers), dtype, device)


def tensor_of(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-dim tensor, without a copy from the host in every call; a tensor in this dtype."""
    return value.to(device, dtype) if isinstance(value, Tensor) else constant([value], dtype, device).view(())


def as_number(size: int | Tensor) -> int:
    """A size of a tensor as a number: while torch.jit traces, it is a tensor itself."""
    return int(size) if isinstance(size, Tensor) else size


def weighted_sum(frames: Tensor, weights: Sequence[float | Tensor]) -> Tensor:
    """``sum_j weights[j] * frames[:, j]`` of frames [G, K, ...], in the order of j, in the accumulation dtype.

    Multiply and add one frame at a time: einsum and tensordot reorder the sum and, under autocast, drop to bfloat16.
    """
    wide = frames.to(accumulation_dtype(frames.dtype))
    total = wide[:, 0] * weights[0]
    for j in range(1, len(weights)):
        total.add_(wide[:, j] * weights[j])
    return total.to(frames.dtype)


def aggregate(frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor] = ()) -> Tensor:
    """One frame for each group of ``len(weights)`` frames, and one more for the last ``len(tail)``.

    Args:
        frames: [T, ...] with ``(T - len(tail)) % len(weights) == 0``.
        weights, tail: the weight of each frame of a whole group and of the last, different one.

    Returns:
        [G, ...] of the dtype of ``frames``.
    """
    whole = as_number(frames.shape[0]) - len(tail)
    sums = []
    if whole:
        grouped = frames[:whole].reshape(whole // len(weights), len(weights), *frames.shape[1:])
        sums.append(weighted_sum(grouped, weights))
    if len(tail):
        sums.append(weighted_sum(frames[whole:].unsqueeze(0), tail))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def repeat(frames: Tensor, lengths: Sequence[int]) -> Tensor:
    """Frame g of [G, ...] ``lengths[g]`` times: [sum(lengths), ...]."""
    if all(length == 1 for length in lengths):
        return frames
    if lengths[-1] > lengths[0] or any(length != lengths[0] for length in lengths[1:-1]):
        return torch.cat([repeat(frames[i : i + 1], lengths[i : i + 1]) for i in range(len(lengths))])
    found = frames.unsqueeze(1).expand(-1, lengths[0], *frames.shape[1:]).flatten(0, 1)
    if len(lengths) == 1:
        # One frame repeated is a view of it, which nobody could write into.
        return found.clone()
    return found if lengths[-1] == lengths[0] else found[: sum(lengths)]
