"""Compiles and launches the CUDA programs by NVRTC and the driver, through cuda-bindings, which torch for Linux depends on.

What is compiled is kept on disk (``SJ_TAC_CACHE``, else the user's cache folder). The programs run in the device's primary
context, which is torch's, on torch's current stream; all memory is torch's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sj_tac.errors import BackendError
from sj_tac.kernels.gpu import program as cuda


def install_line() -> str:
    """The command that installs the cuda-bindings that fit this torch."""
    return f'pip install "cuda-bindings=={(torch.version.cuda or "13").split(".")[0]}.*"'


def _bindings() -> tuple[Any, Any]:
    """The modules ``nvrtc`` and ``driver`` of cuda-bindings."""
    from cuda.bindings import driver, nvrtc

    return nvrtc, driver


def version() -> str:
    """What a message calls this launcher."""
    from importlib.metadata import version as of

    return f"cuda-bindings {of('cuda-bindings')}"


@cache
def problem() -> str:
    """Why NVRTC cannot run the kernels on the current device; empty where it can: a small one is compiled and loaded."""
    try:
        _bindings()
    except Exception as error:  # one for another CUDA, or whose libraries are gone, raises whatever it likes
        return f"the nvrtc kernels need cuda-bindings, whose import says: {type(error).__name__}: {error}; {install_line()}"
    try:
        _kernel(cuda.PROBE, torch.cuda.current_device())
    except Exception as error:  # NVRTC or the driver: whatever it is, the user is to read it
        return f"NVRTC through {version()} could not compile a kernel: {type(error).__name__}: {error}"
    return ""


def _done(found: tuple[Any, ...]) -> Any:
    """What a call of the bindings gave: its status comes first, and 0 is success."""
    status, *values = found
    if int(status):
        raise BackendError(getattr(status, "name", str(status)))
    return values[0] if len(values) == 1 else tuple(values)


def compiled(source: str, architecture: str) -> bytes:
    """The machine code of a program's text for one architecture, from NVRTC.

    Raises:
        BackendError: NVRTC refuses it; with what it says.
    """
    nvrtc, _ = _bindings()
    handle = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"sj_tac.cu", 0, [], []))
    try:
        flags = [flag.encode() for flag in (*cuda.OPTIONS, f"--gpu-architecture={architecture}")]
        try:
            _done(nvrtc.nvrtcCompileProgram(handle, len(flags), flags))
        except BackendError as error:
            log = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(handle)))
            _done(nvrtc.nvrtcGetProgramLog(handle, log))
            raise BackendError(f"{error} for {architecture}: {log.decode(errors='replace').rstrip(chr(0))}") from None
        code = bytearray(_done(nvrtc.nvrtcGetCUBINSize(handle)))
        _done(nvrtc.nvrtcGetCUBIN(handle, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _folder() -> Path:
    chosen = os.environ.get("SJ_TAC_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sj_tac" / "kernels"


def _code(program: cuda.Program, architecture: str) -> bytes:
    """``compiled``, or what an earlier process compiled of the same text by the same NVRTC."""
    nvrtc, _ = _bindings()
    source = program.source()
    key = (source, cuda.OPTIONS, architecture, _done(nvrtc.nvrtcVersion()))
    file = _folder() / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        return file.read_bytes()
    code = compiled(source, architecture)
    with contextlib.suppress(OSError):  # a disk that cannot be written to costs time, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{secrets.token_hex(4)}")  # whole or not at all, whoever else compiles the same
        draft.write_bytes(code)
        os.replace(draft, file)
    return code


@cache
def _context(device: int) -> Any:
    """The primary context of a device, which torch uses too."""
    _, driver = _bindings()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return _done(driver.cuDevicePrimaryCtxRetain(_done(driver.cuDeviceGet(device))))


@contextlib.contextmanager
def _current(device: int) -> Iterator[None]:
    """Inside, the thread's context is the device's: a thread that torch has not set up yet has none."""
    _, driver = _bindings()
    _done(driver.cuCtxPushCurrent(_context(device)))
    try:
        yield
    finally:
        _done(driver.cuCtxPopCurrent())


@cache
def _kernel(program: cuda.Program, device: int) -> Any:
    """The function of a program, loaded on a device."""
    _, driver = _bindings()
    major, minor = torch.cuda.get_device_capability(device)
    code = _code(program, f"sm_{major}{minor}")
    with _current(device):
        return _done(driver.cuModuleGetFunction(_done(driver.cuModuleLoadData(code)), program.kernel.encode()))


def launch(call: cuda.Launch) -> None:
    """Run a program on torch's current stream of its device.

    Raises:
        BackendError: it does not compile, or the device refuses it.
    """
    if not call.blocks:
        return  # an empty batch
    index = call.device.index
    try:
        _, driver = _bindings()
        kernel = _kernel(call.program, index)
        values = [np.asarray(cuda.value(a)) for a in call.arguments]
        # The driver reads every argument where a pointer says, before the call returns.
        pointers = np.array([v.ctypes.data for v in values], np.uint64)
        stream = cuda.stream(index)
        sizes = (call.blocks, 1, 1, call.program.block, 1, 1, call.shared)
        with _current(index):
            _done(driver.cuLaunchKernel(kernel, *sizes, stream, pointers.ctypes.data, 0))
    except Exception as error:
        raise cuda.failed(call, version(), error) from error


def prepared(call: cuda.Launch) -> cuda.Ready:
    """``launch`` but for the addresses; ``call.arguments`` are what comes behind them. Raises BackendError as ``launch``."""
    index = call.device.index
    rest = [np.asarray(cuda.value(a)) for a in call.arguments]
    fixed = [value.ctypes.data for value in rest]
    try:
        _, driver = _bindings()
        kernel, context = _kernel(call.program, index), _context(index)
    except Exception as error:
        raise cuda.failed(call, version(), error) from error
    sizes = (call.blocks, 1, 1, call.program.block, 1, 1, call.shared)

    def run(*addresses: int) -> None:
        values, pointers = cuda.pointing(addresses, fixed, call.together)  # noqa: RUF059 - they are read where the pointers say
        try:
            _done(driver.cuCtxPushCurrent(context))
            try:
                _done(driver.cuLaunchKernel(kernel, *sizes, cuda.stream(index), pointers.buffer_info()[0], 0))
            finally:
                _done(driver.cuCtxPopCurrent())
        except Exception as error:
            raise cuda.failed(call, version(), error) from error

    # The pointers lead there, whoever else forgets the numbers.
    run.__dict__["rest"] = rest
    return run
