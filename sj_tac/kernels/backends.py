"""Which kernels run where: ``auto`` chooses, a name is a contract."""

from __future__ import annotations

import warnings

import torch

from sj_tac.errors import BackendError, BackendFallbackWarning
from sj_tac.kernels import reference
from sj_tac.kernels.cpu import call
from sj_tac.kernels.gpu import launchers
from sj_tac.kernels.gpu.launchers import CUPY, NVRTC

CPP = "cpp"
# Reasons for falling back that the user has been told.
_SAID: set[str] = set()
ON_CUDA = (CUPY, NVRTC)
COMPILED = (CPP, *ON_CUDA)
AVAILABLE = (reference.NAME, *COMPILED)


def choose(backend: str, fuse: bool = True) -> str:
    """``backend`` itself, "auto" or a name that there is.

    Raises:
        BackendError: there is no such backend, or it is a compiled one and nothing is to be fused.
    """
    if not fuse and backend in COMPILED:
        raise BackendError(
            f"backend={backend!r} with fuse=False: the {backend} kernels run fused chains, unfused ones are plain PyTorch; "
            'leave fuse=True, or take backend="reference"'
        )
    if backend == "auto" or backend in AVAILABLE:
        return backend
    raise BackendError(f"backend={backend!r} is unknown; choose one of {['auto', *AVAILABLE]}")


def fastest(backend: str, device: torch.device | None, dtype: torch.dtype) -> tuple[str, str]:
    """The compiled kernels for a device (None: any), and why they, or those that ``backend`` names, cannot run there."""
    kind = device.type if device is not None else "cuda" if backend in ON_CUDA else "cpu"
    if backend in ON_CUDA and kind != "cuda":
        return backend, f"the {backend} kernels run on CUDA devices, not on {device}"
    if backend == CPP and kind != "cpu":
        return CPP, f"the cpp kernels run on the CPU, not on {device}"
    if kind == "cpu":
        return CPP, _said(cpu_problem(), backend)
    if kind == "cuda":
        kernel, problem = cuda_kernels(backend, dtype)
        return kernel, _said(problem, backend)
    return CUPY, f"there are no compiled kernels for {device}"


def _said(problem: str, backend: str) -> str:
    """The same problem, of which the user is told once where ``auto`` falls back for it."""
    if problem and backend == "auto" and problem not in _SAID and not torch.compiler.is_compiling():
        _SAID.add(problem)
        warnings.warn(f"{problem}. Until then backend=\"auto\" takes 'reference'", BackendFallbackWarning, stacklevel=4)
    return problem


def refuse_onnx(operator: str) -> None:
    """Raise BackendError under the ONNX exporter that traces: it cannot write down a compiled kernel."""
    if torch.compiler.is_compiling():
        return
    if torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export():
        raise BackendError(
            f"the tracing ONNX exporter (dynamo=False) has no operator sj_tac::{operator}; torch.export.export takes the "
            "net with it, and sj_tac.export_onnx writes a converted net as ONNX"
        )


def cpu_problem() -> str:
    """Why the CPU's kernels cannot run; empty where they can."""
    return _constant_problem() if torch.compiler.is_compiling() else call.problem()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_problem() -> str:
    return call.problem()


def cuda_kernels(backend: str, dtype: torch.dtype) -> tuple[str, str]:
    """By what the CUDA kernels run ("auto": the first that works), and why they cannot; empty where they can."""
    named = backend if backend in ON_CUDA else ""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return named or CUPY, f"the {named or 'CUDA'} kernels compute in float32, not in {str(dtype).removeprefix('torch.')}"
    return _constant_kernels(named) if torch.compiler.is_compiling() else _kernels(named)


def _kernels(named: str) -> tuple[str, str]:
    return (named, launchers.problem(named)) if named else launchers.first()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_kernels(named: str) -> tuple[str, str]:
    """For torch.compile, which is not to look into how it is found out."""
    return _kernels(named)
