"""``aggregate`` by backend: the same call for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sj_tac.errors import BackendError
from sj_tac.kernels import reference, registry

run_reference = reference.aggregate


def choose(backend: str, device: torch.device) -> str:
    """The kernel that runs. Raises BackendError where a named one cannot."""
    if registry.choose(backend) == reference.NAME:
        return reference.NAME
    if device.type == "cpu":
        return registry.NUMBA
    if backend == registry.NUMBA:
        raise BackendError(f"backend='numba': the numba kernel runs on the CPU, not on {device}; use backend=\"auto\"")
    return reference.NAME


def run_numba(frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor] = ()) -> Tensor:
    """The compiled kernel, through the torch operator ``sj_tac::aggregate``. Arguments as ``reference.aggregate``."""
    from sj_tac.kernels import ops_aggregate

    wide = reference.accumulation_dtype(frames.dtype)
    flat = [*weights] * ((frames.shape[0] - len(tail)) // len(weights)) + [*tail]
    if any(isinstance(w, Tensor) for w in flat):
        chosen = torch.stack([torch.as_tensor(w, dtype=wide) for w in flat])
    else:
        chosen = torch.tensor(flat, dtype=wide)
    group = len(weights) if frames.shape[0] > len(tail) else len(tail)
    summed: Tensor = ops_aggregate.aggregate(frames.to(wide), chosen, group)
    return summed.to(frames.dtype)


RUNNERS = {reference.NAME: run_reference, registry.NUMBA: run_numba}
