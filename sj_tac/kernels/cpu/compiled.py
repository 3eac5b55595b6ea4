"""How Numba compiles a kernel: once, for one thread; threads call what was compiled by its address.

A parallel loop that calls a kernel by its name would have Numba optimise and emit the kernel a second and a third time,
which took as long as compiling it. The loop here takes an address instead, and is the same for all kernels.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, prange, typeof, types
from numba.extending import intrinsic

# Whoever adds to a kernel's addresses.
_ADDING = threading.Lock()


def _identity(operands: Any) -> int:
    """A number for the types of a kernel's operands, by which an address of a kernel for just these is found."""
    return int.from_bytes(hashlib.sha256(repr(tuple(operands)).encode()).digest()[:8], "little", signed=True)


@intrinsic
def _identity_of(_typing, a, b, c, d):
    """``_identity`` of the types of four operands: a constant of what is compiled."""

    def codegen(context, _builder, _signature, _values):
        return context.get_constant(types.int64, _identity((a, b, c, d)))

    return types.int64(a, b, c, d), codegen


@intrinsic
def _call(_typing, address, begin, end, a, b, c, d):
    """Call what Numba compiled for (int64, int64, a, b, c, d) by its address: 1 where it failed, else 0."""
    operands = (types.int64, types.int64, a, b, c, d)

    def codegen(context, builder, _signature, values):
        function = context.call_conv.get_function_type(types.none, operands)
        pointer = builder.inttoptr(values[0], function.as_pointer())
        status, _ = context.call_conv.call_function(builder, pointer, types.none, operands, values[1:])
        return builder.zext(status.is_error, context.get_value_type(types.int64))

    return types.int64(types.int64, types.int64, types.int64, a, b, c, d), codegen


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def _on_threads(addresses, threads, units, a, b, c, d):
    """Run the kernel whose address stands behind the identity of the operands' types: how many threads failed.

    -1, with nothing run, where there is none.
    """
    identity = _identity_of(a, b, c, d)  # type: ignore[call-arg,var-annotated]
    address = 0
    for row in range(addresses.shape[0]):
        if addresses[row, 0] == identity:
            address = addresses[row, 1]
    if address == 0:
        return -1
    failed = 0
    for i in prange(threads):
        failed += _call(address, units * i // threads, units * (i + 1) // threads, a, b, c, d)
    return failed


class Kernel:
    """``serial(begin, end, *operands)`` over some units, and ``parallel(threads, units, *operands)`` over all of them.

    Attributes:
        addresses: [types, 2] int64: the identity of four operands' types, and where the kernel for them lies in memory.
    """

    __slots__ = ("addresses", "serial")

    def __init__(self, serial: Any) -> None:
        self.serial: Callable[..., None] = serial
        self.addresses = np.empty((0, 2), np.int64)

    def parallel(self, threads: int, units: int, *operands: Any) -> None:
        """Raises MemoryError where a thread could not make its buffer: what the kernel writes is then unknown."""
        failed = _on_threads(self.addresses, threads, units, *operands)
        if failed == -1:
            self._add(operands)
            failed = _on_threads(self.addresses, threads, units, *operands)
        assert failed != -1
        if failed:
            raise MemoryError(f"{failed} of {threads} threads of {self.serial.__name__} had no memory for their buffers")

    def _add(self, operands: tuple[Any, ...]) -> None:
        """Compile the kernel for operands of these types, or take it from Numba's cache, and note its address."""
        kinds = tuple(typeof(operand) for operand in operands)  # type: ignore[no-untyped-call]
        compiled = self.serial.get_compile_result(types.void(types.int64, types.int64, *kinds))  # type: ignore[attr-defined]
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        with _ADDING:  # a new array: other threads may be reading the old one
            self.addresses = np.concatenate([self.addresses, np.array([[_identity(kinds), address]], np.int64)])


@cache
def _sources() -> bytes:
    """A digest of all files that kernels are compiled from."""
    own = Path(__file__).parent
    found = hashlib.sha256()
    for file in sorted([*own.glob("*.py"), *own.parent.glob("*.py")]):
        found.update(file.read_bytes())
    return found.digest()


def kernel(function: Any) -> Kernel:
    """Compile ``function(begin, end, a, b, c, d)``, whose units do not depend on each other, when it is first called."""
    serial: Any = njit(cache=True, nogil=True, error_model="numpy")(function)
    # Numba takes what it has kept as long as the function's own file is the same, which an upgrade may leave as it was. Most
    # of a kernel lies in other files.
    file = getattr(getattr(serial, "_cache", None), "_cache_file", None)  # None where nothing can be kept
    if file is not None:
        file._source_stamp = file._source_stamp, _sources()
    return Kernel(serial)
