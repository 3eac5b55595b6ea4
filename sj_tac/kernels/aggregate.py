"""``aggregate`` by backend: the same call for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sj_tac.errors import BackendError
from sj_tac.host import dispatch
from sj_tac.kernels import aggregate_op, backends, reference

run_reference = reference.aggregate


def choose(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that runs. Raises BackendError where a named one cannot."""
    if backends.choose(backend) == reference.NAME:
        return reference.NAME
    kernel, problem = backends.fastest(backend, device, dtype)
    if problem and backend != "auto":
        raise BackendError(f"backend={backend!r}: {problem}; use backend=\"auto\", which falls back to 'reference'")
    return reference.NAME if problem else kernel


def _flat(frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor]) -> tuple[Tensor, int]:
    """One weight for each frame, [T], and how many are summed."""
    wide = reference.accumulation_dtype(frames.dtype)
    flat = [*weights] * ((frames.shape[0] - len(tail)) // len(weights)) + [*tail]
    group = len(weights) if frames.shape[0] > len(tail) else len(tail)
    if any(isinstance(w, Tensor) for w in flat):
        return torch.stack([torch.as_tensor(w, dtype=wide, device=frames.device) for w in flat]), group
    return reference.constant([float(w) for w in flat], wide, frames.device), group


def run_numba(frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor] = ()) -> Tensor:
    """The compiled kernel, through the torch operator ``sj_tac::aggregate`` where that has something to do."""
    chosen, group = _flat(frames, weights, tail)
    straight = dispatch.is_plain(frames) and not dispatch.differentiates(frames, chosen)
    run = aggregate_op.aggregate_now if straight else aggregate_op.aggregate
    summed: Tensor = run(frames.to(chosen.dtype), chosen, group)
    return summed.to(frames.dtype)


def run_cupy(frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor] = ()) -> Tensor:
    """The CUDA kernel, which reads and writes half itself."""
    summed: Tensor = aggregate_op.aggregate(frames, *_flat(frames, weights, tail))
    return summed


RUNNERS = {reference.NAME: run_reference, backends.NUMBA: run_numba, backends.CUPY: run_cupy}
