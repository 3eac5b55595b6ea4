"""What launches the CUDA sources: CuPy, or NVRTC and the driver through cuda-bindings; imported when first asked."""

from __future__ import annotations

from types import ModuleType

import torch

from sj_tac.errors import BackendError
from sj_tac.kernels.gpu import program as cuda

CUPY, NVRTC = "cupy", "nvrtc"
# In the order in which they are tried.
NAMES = (CUPY, NVRTC)


def _module(name: str) -> ModuleType:
    if name == CUPY:
        from sj_tac.kernels.gpu import cupy_launch

        return cupy_launch
    from sj_tac.kernels.gpu import nvrtc_launch

    return nvrtc_launch


def problem(name: str) -> str:
    """Why this launcher cannot run kernels on this machine; empty where it can."""
    if not torch.cuda.is_available():
        return f"the {name} kernels need a CUDA device, and torch.cuda.is_available() is False"
    found: str = _module(name).problem()
    return found


def first() -> tuple[str, str]:
    """The first launcher that works, and "", or the first of all, and why none does."""
    problems = {}
    for name in NAMES:
        problems[name] = problem(name)
        if not problems[name]:
            return name, ""
        if not torch.cuda.is_available():
            break
    return NAMES[0], "; ".join(problems.values())


def named(name: str) -> tuple[str, cuda.Launcher]:
    """A launcher by its name, or the first that works for "", and what it is called.

    Raises:
        BackendError: there is no such launcher, or none works.
    """
    if not name:
        name, why = first()
        if why:
            raise BackendError(f'{why}; backend="reference" runs without them')
    if name not in NAMES:
        raise BackendError(f"there is no launcher {name!r} for the CUDA kernels, only {list(NAMES)}")
    launch: cuda.Launcher = _module(name).launch
    return name, launch


def prepared(name: str, call: cuda.Launch) -> cuda.Ready:
    """A launch by the launcher of this name, but for the addresses. Raises BackendError where the kernel cannot be had."""
    if not call.blocks:
        return _nothing  # an empty batch
    ready: cuda.Ready = _module(name).prepared(call)
    return ready


def _nothing(*addresses: int) -> None:
    pass
