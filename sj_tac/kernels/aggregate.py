"""``aggregate`` by backend: the same call for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sj_tac.errors import BackendError
from sj_tac.host import dispatch
from sj_tac.kernels import aggregate_op, backends, reference
from sj_tac.kernels.checks import INSTEAD, refuse_tangents

# What comes to the CPU's kernel there; who asks has little time.
_ON_CPU = ("auto", backends.CPP)


def choose(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that runs. Raises BackendError where a named one cannot."""
    if device.type == "cpu" and backend in _ON_CPU and not backends.cpu_problem():
        return backends.CPP
    if backends.choose(backend) == reference.NAME:
        return reference.NAME
    kernel, problem = backends.fastest(backend, device, dtype)
    if problem and backend != "auto":
        raise BackendError(f"backend={backend!r}: {problem}; use backend=\"auto\", which falls back to 'reference'")
    return reference.NAME if problem else kernel


def _flat(frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor]) -> tuple[Tensor, int]:
    """One weight for each frame, [T], and how many are summed."""
    wide = reference.accumulation_dtype(frames.dtype)
    whole = reference.as_number(frames.shape[0]) - len(tail)
    flat = [*weights] * (whole // len(weights)) + [*tail]
    group = len(weights) if whole else len(tail)
    if any(isinstance(w, Tensor) for w in flat):
        return torch.stack([reference.tensor_of(w, wide, frames.device) for w in flat]), group
    return reference.constant([float(w) for w in flat], wide, frames.device), group


def run(kernel: str, frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor] = ()) -> Tensor:
    """``reference.aggregate`` by the kernel of that name."""
    if kernel == reference.NAME:
        return reference.aggregate(frames, weights, tail)
    return run_compiled(kernel, frames, *_flat(frames, weights, tail))


def run_compiled(kernel: str, frames: Tensor, weights: Tensor, group: int) -> Tensor:
    """The sums of ``group`` frames each by a compiled kernel; through the torch operator where that has something to do.

    Args:
        weights: one for each frame, [T], of the dtype that sums of ``frames`` have.
    """
    straight = dispatch.is_plain(frames) and not dispatch.differentiates(frames, weights)
    if kernel != backends.CPP:
        if straight:
            return aggregate_op.on_cuda(frames, weights, group, kernel)
        return _by_operator(frames, weights, group, kernel)
    return (aggregate_op.aggregate_now if straight else _by_operator)(frames, weights, group)


def _by_operator(frames: Tensor, weights: Tensor, group: int, launcher: str = "") -> Tensor:
    backends.refuse_onnx("aggregate")
    refuse_tangents("aggregate", frames, weights, advice=INSTEAD)
    summed: Tensor = aggregate_op.aggregate(frames, weights, group, launcher)
    return summed
