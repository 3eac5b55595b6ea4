"""What the compiled kernels are called with, and the library that they lie in."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch

from sj_tac.kernels.cpu import compiling

POINTERS = (
    "y", "residual", "scale", "shift", "v0", "linear", "weights", "joined", "convolution", "out", "v", "go", "gv", "gy",
    "g_residual", "gv0", "g_scale", "g_shift", "g_linear", "g_weights", "lengths",
)  # fmt: skip
NUMBERS = (
    "drives", "steps", "group", "samples", "channels", "height", "width", "last", "pool", "kh", "kw", "sh", "sw", "ph", "pw",
    "out_height", "out_width", "dtype", "emits", "mode", "hard", "surrogate", "threads", "pieces",
)  # fmt: skip
FLOATS = ("tau", "rest", "threshold", "decay", "gain", "keep", "rest_gain", "h_gain", "alpha")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4}
# Nanoseconds of work below which a second thread costs more than it saves: its start takes 20 us in a loop, and 50 to 100
# in a net, whose convolutions have filled the caches since the last one.
ALONE = 50_000
# Why a call has one thread, if it must.
_ONE_THREAD: list[str] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _ONE_THREAD.append("the threads of torch's OpenMP are the parent process's"))


class Convolution(ctypes.Structure):
    """``Convolution`` of src/call.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias")),
        *((name, ctypes.c_int64) for name in ("channels", "height", "width", "kh", "kw", "sh", "sw", "dh", "dw")),
    ]


class Call(ctypes.Structure):
    """``Call`` of src/call.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in NUMBERS),
        *((name, ctypes.c_double) for name in FLOATS),
    ]


def level() -> str:
    """Return the level of kernels that this processor runs; ATEN_CPU_CAPABILITY lowers it as it lowers torch's own."""
    capability = torch.backends.cpu.get_cpu_capability()
    lowest = compiling.levels_here()[-1]
    return "v4" if capability.startswith("AVX512") else "v3" if capability == "AVX2" else lowest


@cache
def _find() -> tuple[Any, str]:
    known = compiling.levels_here()
    found = [file for file in map(compiling.library, known[known.index(level()) :]) if file.exists()]
    if not found:
        return None, (
            f"sj_tac's kernels for this processor are not compiled in {compiling.HERE}; install sj_tac anew where there is "
            "a C++ compiler (g++ or clang++, or `pip install ziglang`): `pip install -e .` in a checkout"
        )
    try:
        lib = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return None, f"{found[0]} does not load: {error}; remove it, and install sj_tac anew"
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.backward_pieces.restype = lib.aggregate_pieces.restype = whole
    lib.aggregate_pieces.argtypes = [whole]
    lib.aggregate_forward.argtypes = [pointer] * 3 + [whole] * 5
    lib.aggregate_backward.argtypes = [pointer] * 5 + [whole] * 5
    lib.fire_forward.argtypes = lib.fire_backward.argtypes = lib.backward_pieces.argtypes = [ctypes.POINTER(Call)]
    lib.fire_forward.restype = lib.fire_backward.restype = None
    lib.aggregate_forward.restype = lib.aggregate_backward.restype = None
    try:
        # The soname of what torch has loaded: its threads, not a second pool of them.
        gomp = ctypes.CDLL("libgomp.so.1")
        lib.use_threads(ctypes.cast(gomp.GOMP_parallel, ctypes.c_void_p))
    except (OSError, AttributeError) as error:
        _ONE_THREAD.append(f"no libgomp: {error}")
    return lib, ""


def problem() -> str:
    """Return why there are no compiled kernels; empty where there are."""
    return _find()[1]


def library() -> Any:
    """Return the kernels."""
    found, why = _find()
    assert found is not None, why
    return found


def threads(nanoseconds: float) -> int:
    """Return how many threads share so much work: as many as torch uses, or one."""
    return 1 if nanoseconds < ALONE or _ONE_THREAD else torch.get_num_threads()


def pointer(x: torch.Tensor | None) -> int | None:
    """Return where a tensor's numbers lie. Raises RuntimeError where its memory was freed, which would end the process."""
    if x is None:
        return None
    at = x.data_ptr()
    if not at and x.numel():
        raise RuntimeError(
            f"a tensor {list(x.shape)} of {x.dtype} has no memory: its storage was freed, as sharding and offloading do "
            "outside of a module's forward; bring it back before the call"
        )
    return at
