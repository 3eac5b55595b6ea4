"""``aggregate`` by backend: the same call for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sj_tac.errors import BackendError
from sj_tac.host import dispatch
from sj_tac.kernels import aggregate_op, backends, reference
from sj_tac.kernels.checks import INSTEAD, refuse_tangents

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
    whole = reference.as_number(frames.shape[0]) - len(tail)
    flat = [*weights] * (whole // len(weights)) + [*tail]
    group = len(weights) if whole else len(tail)
    if any(isinstance(w, Tensor) for w in flat):
        return torch.stack([reference.tensor_of(w, wide, frames.device) for w in flat]), group
    return reference.constant([float(w) for w in flat], wide, frames.device), group


def run_numba(frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor] = ()) -> Tensor:
    """The compiled kernel, through the torch operator ``sj_tac::aggregate`` where that has something to do."""
    chosen, group = _flat(frames, weights, tail)
    wide = frames.to(chosen.dtype) if frames.dtype is torch.float16 else frames
    if dispatch.is_plain(frames) and not dispatch.differentiates(frames, chosen):
        return aggregate_op.aggregate_now(wide, chosen, group).to(frames.dtype)
    return _by_operator(wide, chosen, group).to(frames.dtype)


def _run_cuda(launcher: str) -> Runner:
    def run(frames: Tensor, weights: Sequence[float | Tensor], tail: Sequence[float | Tensor] = ()) -> Tensor:
        """The CUDA kernel, which reads and writes half itself; through the torch operator where that has something to do."""
        chosen, group = _flat(frames, weights, tail)
        if dispatch.is_plain(frames) and not dispatch.differentiates(frames, chosen):
            return aggregate_op.on_cuda(frames, chosen, group, launcher)
        return _by_operator(frames, chosen, group, launcher)

    return run


def _by_operator(frames: Tensor, weights: Tensor, group: int, launcher: str = "") -> Tensor:
    backends.refuse_onnx("aggregate")
    refuse_tangents("aggregate", frames, weights, advice=INSTEAD)
    summed: Tensor = aggregate_op.aggregate(frames, weights, group, launcher)
    return summed


Runner = Callable[..., Tensor]
RUNNERS: dict[str, Runner] = {reference.NAME: run_reference, backends.NUMBA: run_numba}
RUNNERS |= {name: _run_cuda(name) for name in backends.ON_CUDA}
