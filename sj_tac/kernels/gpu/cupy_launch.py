"""Compiles and launches the CUDA programs through CuPy, on torch's current stream of a launch's device.

CuPy compiles with NVRTC and keeps what it compiled on disk (``CUPY_CACHE_DIR``). It allocates nothing here: all memory is
torch's. CuPy is imported when a CUDA device first asks for its kernels.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from sj_tac.kernels.gpu import program as cuda

OLDEST = (13, 4)


def install_line() -> str:
    """The command that installs the CuPy that fits this torch."""
    major = (torch.version.cuda or "13").split(".")[0]
    return f"pip install cupy-cuda{major}x"


@cache
def problem() -> str:
    """Why CuPy cannot run the kernels on the current device; empty where it can: a small one is compiled and loaded."""
    try:
        import cupy
    except Exception as error:  # a CuPy for another CUDA, or one whose libraries are gone, raises whatever it likes
        return f"the cupy kernels need CuPy, whose import says: {type(error).__name__}: {error}; {install_line()}"
    found = tuple(int(part) for part in cupy.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(str(part) for part in OLDEST)
        return f"the cupy kernels need CuPy {oldest} or later, not {cupy.__version__}; {install_line()}"
    try:
        _kernel(cuda.PROBE, torch.cuda.current_device())
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


class _Foreign:
    """A stream of torch's, in the protocol by which CUDA libraries hand streams to one another."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@lru_cache(maxsize=64)
def _external(device: int, handle: int) -> Any:
    """CuPy's object for a stream of torch's: nothing but its handle, so that a later stream may have it too."""
    import cupy

    # CuPy 14 deprecates ExternalStream, which is all that 13 has.
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Foreign(handle))
    return cupy.cuda.ExternalStream(handle, device_id=device)


def _stream(device: int) -> Any:
    """torch's current stream of a device."""
    return _external(device, cuda.stream(device))


def launch(call: cuda.Launch) -> None:
    """Run a program on torch's current stream of its device.

    Raises:
        BackendError: it does not compile, or the device refuses it.
    """
    if not call.blocks:
        return  # an empty batch
    import cupy

    program, index = call.program, call.device.index
    values = tuple(cuda.value(a) for a in call.arguments)
    try:
        with cupy.cuda.Device(index), _stream(index):
            _kernel(program, index)((call.blocks,), (program.block,), values, shared_mem=call.shared)
    except Exception as error:
        raise cuda.failed(call, f"CuPy {cupy.__version__}", error) from error


def prepared(call: cuda.Launch) -> cuda.Ready:
    """``launch`` but for the addresses; ``call.arguments`` are what comes behind them. Raises BackendError as ``launch``.

    It goes to the driver by CuPy's own call of it: on its way through CuPy's kernel objects a struct alone takes as long as
    all else of a launch.
    """
    import cupy

    index, driver = call.device.index, cupy.cuda.driver
    rest = [np.asarray(cuda.value(a)) for a in call.arguments]
    fixed = [value.ctypes.data for value in rest]
    by = f"CuPy {cupy.__version__}"
    try:
        with cupy.cuda.Device(index):
            function = _kernel(call.program, index).kernel  # loaded on the device that is current
            if not driver.ctxGetCurrent():  # a thread that torch has not set up yet
                cupy.cuda.runtime.free(0)
            context = driver.ctxGetCurrent()
    except Exception as error:
        raise cuda.failed(call, by, error) from error
    sizes = (call.blocks, 1, 1, call.program.block, 1, 1, call.shared)

    def run(*addresses: int) -> None:
        values, pointers = cuda.pointing(addresses, fixed, call.together)  # noqa: RUF059 - they are read where the pointers say
        at = pointers.buffer_info()[0]
        try:
            current = driver.ctxGetCurrent()
            if current != context:  # another device's, or none
                driver.ctxSetCurrent(context)
            try:
                driver.launchKernel(function.ptr, *sizes, cuda.stream(index), at, 0)
            finally:
                if current != context:
                    driver.ctxSetCurrent(current)
        except Exception as error:
            raise cuda.failed(call, by, error) from error

    # The pointers lead there, whoever else forgets the numbers.
    run.__dict__["rest"] = rest
    return run
