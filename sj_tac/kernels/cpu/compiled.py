"""How Numba compiles a kernel: for one thread, and, made from the same function, for all of Numba's threads."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from numba import njit, prange


class Kernel(NamedTuple):
    """``serial(begin, end, *operands)`` over some units, and ``parallel(threads, units, *operands)`` over all of them."""

    serial: Callable[..., None]
    parallel: Callable[..., None]


def _all_units(threads, units, a, b, c, d):  # type: ignore[no-untyped-def]
    for i in prange(threads):
        serial(units * i // threads, units * (i + 1) // threads, a, b, c, d)  # type: ignore[name-defined]  # noqa: F821


def kernel(function: Any) -> Kernel:
    """Compile ``function(begin, end, a, b, c, d)``, whose units do not depend on each other, when it is first called."""
    compiled = njit(cache=True, nogil=True, error_model="numpy")(function)
    # A function of its own name, module and file for each kernel, with the kernel among its globals: Numba's disk cache
    # tells functions apart by these, and would never find again one that closes over another compiled function.
    name = f"{function.__qualname__}_parallel"
    home = function.__code__
    code = _all_units.__code__.replace(co_filename=home.co_filename, co_firstlineno=home.co_firstlineno, co_name=name)
    shared = FunctionType(code, {"prange": prange, "serial": compiled, "__name__": function.__module__}, name)
    shared.__qualname__, shared.__module__ = name, function.__module__
    return Kernel(compiled, njit(cache=True, parallel=True, nogil=True, error_model="numpy")(shared))
