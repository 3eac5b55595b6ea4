"""Compiles and launches the CUDA programs through CuPy, on torch's current stream and the tensors' device.

CuPy compiles with NVRTC and keeps what it compiled on disk (``CUPY_CACHE_DIR``). It allocates nothing here: all memory is
torch's. CuPy is imported when a CUDA device first asks for its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sj_tac.errors import BackendError
from sj_tac.kernels.gpu import program as cuda

OLDEST = (13, 4)


def install_line() -> str:
    """The command that installs the CuPy that fits this torch."""
    major = (torch.version.cuda or "13").split(".")[0]
    return f"pip install cupy-cuda{major}x"


@cache
def problem() -> str:
    """Why the CUDA kernels cannot run on this machine; empty where they can. A small one is compiled and loaded to know."""
    if not torch.cuda.is_available():
        return "the cupy kernels need a CUDA device, and torch.cuda.is_available() is False"
    try:
        import cupy
    except ImportError as error:
        return f"the cupy kernels need CuPy, whose import says: {error}; {install_line()}"
    found = tuple(int(part) for part in cupy.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(str(part) for part in OLDEST)
        return f"the cupy kernels need CuPy {oldest} or later, not {cupy.__version__}; {install_line()}"
    probe = cuda.program("aggregate_forward", IO=0, WIDE=0, GROUP=2, WIDTH_V=1, BLOCK=32)
    try:
        _kernel(probe, torch.cuda.current_device())
    except Exception as error:  # NVRTC, the driver or the disk: whatever it is, the user is to read it
        return f"CuPy {cupy.__version__} could not compile a kernel: {type(error).__name__}: {error}"
    return ""


@cache
def _module(program: cuda.Program) -> Any:
    """The compiled module; CuPy loads it on each device when it is first used there."""
    import cupy

    return cupy.RawModule(code=program.source(), options=cuda.OPTIONS)


@cache
def _kernel(program: cuda.Program, device: int) -> Any:
    return _module(program).get_function(program.kernel)


def _value(argument: cuda.Argument) -> Any:
    """Addresses and numbers as numpy scalars, structs as arrays of size one: CuPy passes both by value."""
    if argument is None or isinstance(argument, Tensor):
        return np.uint64(cuda.address(argument))
    return argument


class _CurrentStream:
    """torch's current stream, in the protocol by which CUDA libraries hand streams to one another."""

    def __init__(self, device: int) -> None:
        self.handle = torch.cuda.current_stream(device).cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _stream(cupy: Any, device: int) -> Any:
    current = _CurrentStream(device)
    # CuPy 14 deprecates ExternalStream, which is all that 13 has.
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(current)
    return cupy.cuda.ExternalStream(current.handle, device_id=device)


def launch(program: cuda.Program, blocks: int, arguments: Sequence[cuda.Argument], shared: int) -> None:
    """Run a program on torch's current stream of the device where its tensors are.

    Raises:
        BackendError: it does not compile, or the device refuses it.
    """
    if not blocks:
        return  # an empty batch
    import cupy

    index = next(a.device.index for a in arguments if isinstance(a, Tensor))
    values = tuple(_value(a) for a in arguments)
    try:
        with cupy.cuda.Device(index), _stream(cupy, index):
            _kernel(program, index)((blocks,), (program.block,), values, shared_mem=shared)
    except Exception as error:
        raise BackendError(
            f"the CUDA kernel {program.kernel} failed on cuda:{index} with CuPy {cupy.__version__} "
            f'({dict(program.macros)}): {type(error).__name__}: {error}; backend="reference" runs without it'
        ) from error
