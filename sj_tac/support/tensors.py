"""Tensors that share memory, and how they lie in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac.errors import CheckpointError


def aliases(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, bool]]:
    """Of tensors that are all of an earlier one's memory: that one's key, and whether they are the same object."""
    first: dict[Any, str] = {}
    found = {}
    for key, tensor in tensors.items():
        place: Any = id(tensor)
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        if place in first:
            found[key] = first[place], tensor is tensors[first[place]]
        else:
            first[place] = key
    return found


def apart(here: Mapping[str, tuple[str, bool]], there: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Two keys that are one tensor here and two there; empty where there are none."""
    for key, (first, _) in here.items():
        roots = [there.get(name, (name, True))[0] for name in (key, first)]
        if roots[0] != roots[1]:
            return [first, key]
    return []


def _usual(shape: Sequence[int]) -> list[int]:
    """The strides of a tensor whose last dimension is the innermost, as a new one has them."""
    return [math.prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape))]


def _is_dense(shape: Sequence[int], by: Sequence[int]) -> bool:
    """True where these strides put the elements one beside the other, each once."""
    if len(shape) != len(by) or any(stride < 1 for stride in by) or not all(shape):
        return False
    wanted = 1
    for stride, size in sorted((stride, size) for stride, size in zip(by, shape, strict=True) if size > 1):
        if stride != wanted:
            return False
        wanted *= size
    return max(by, default=1) <= wanted


def strides(tensor: Tensor) -> list[int] | None:
    """The strides of a dense tensor whose last dimension is not simply the innermost one; else None."""
    found = list(tensor.stride())
    return found if found != _usual(tensor.shape) and _is_dense(tensor.shape, found) else None


def restride(tensor: Tensor, wanted: Sequence[int] | None) -> None:
    """Lay a tensor out by these strides (None: as a new one is), in place; its values stay."""
    by = list(wanted) if wanted is not None and _is_dense(tensor.shape, wanted) else _usual(tensor.shape)
    if list(tensor.stride()) != by and _is_dense(tensor.shape, tensor.stride()):
        made = torch.empty_strided(tuple(tensor.shape), tuple(by), dtype=tensor.dtype, device=tensor.device)
        tensor.data = made.copy_(tensor.detach())


def tie(net: nn.Module, key: str, to: Tensor, same: bool) -> None:
    """Make the parameter or buffer of this key ``to`` itself, or one of its memory.

    Raises:
        CheckpointError: there is no such parameter or buffer.
    """
    path, _, name = key.rpartition(".")
    try:
        owner = net.get_submodule(path)
    except AttributeError:
        owner = nn.Module()
    every: list[Any] = [owner._parameters, owner._buffers]
    for held in every:
        own = held.get(name)
        if own is to:
            return
        if own is not None and same:
            held[name] = to
            return
        if own is not None:
            own.data = to.data
            return
    raise CheckpointError(f"load: {key!r} was one tensor with another, and the model has no such parameter to tie")
