"""How Numba compiles a kernel: once, for one thread; threads call what was compiled by its address.

A parallel loop that calls a kernel by its name would have Numba optimise and emit the kernel a second and a third time,
which took as long as compiling it. The loop here takes addresses of a function and of operands in memory instead: it is the
same for all kernels, and compiled once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

_WHOLE, _INDEX = ir.IntType(64), ir.IntType(32)

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
def _run(_typing, address, begin, end, place):
    """Call a function of three numbers by its address."""

    def codegen(_context, builder, _signature, values):
        function = ir.FunctionType(_WHOLE, [_WHOLE] * 3)
        return builder.call(builder.inttoptr(values[0], function.as_pointer()), values[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@njit(cache=True, parallel=True, nogil=True, error_model="numpy")
def _loop(threads, units, run, place):
    """The loop over threads, the same for all kernels: how many of them failed."""
    failed = 0
    for i in prange(threads):
        failed += _run(run, units * i // threads, units * (i + 1) // threads, place)  # type: ignore[call-arg]
    return failed


_OF_LOOP = (types.int64,) * 4


@intrinsic
def _share_out(_typing, at, over, a, b, c, d):
    """``_loop`` over what Numba compiled for (int64, int64, a, b, c, d): ``at`` are the addresses of both.

    ``over``: threads and units. The operands lie in memory meanwhile, and what each thread runs takes them from there: 1
    where it failed, else 0.
    """
    operands = (a, b, c, d)

    def codegen(context, builder, _signature, values):
        (loop_at, address), (threads, units) = (cgutils.unpack_tuple(builder, x) for x in values[:2])  # type: ignore[no-untyped-call]
        others = values[2:]
        conv, laid = context.call_conv, ir.LiteralStructType([value.type for value in (address, *others)])
        place = cgutils.alloca_once(builder, laid)  # type: ignore[no-untyped-call]
        for i, value in enumerate((address, *others)):
            builder.store(value, builder.gep(place, [_INDEX(0), _INDEX(i)]))
        run = ir.Function(builder.module, ir.FunctionType(_WHOLE, [_WHOLE] * 3), builder.module.get_unique_name("run"))
        run.linkage = "internal"
        inside = ir.IRBuilder(run.append_basic_block())
        begin, end, there = run.args
        there = inside.inttoptr(there, laid.as_pointer())
        address, *others = (inside.load(inside.gep(there, [_INDEX(0), _INDEX(i)])) for i in range(1 + len(others)))
        kinds = (types.int64, types.int64, *operands)
        kernel_at = inside.inttoptr(address, conv.get_function_type(types.none, kinds).as_pointer())
        status, _ = conv.call_function(inside, kernel_at, types.none, kinds, [begin, end, *others])
        inside.ret(inside.zext(status.is_error, _WHOLE))

        loop_at = builder.inttoptr(loop_at, conv.get_function_type(types.int64, _OF_LOOP).as_pointer())
        given = [threads, units, builder.ptrtoint(run, _WHOLE), builder.ptrtoint(place, _WHOLE)]
        status, failed = conv.call_function(builder, loop_at, types.int64, _OF_LOOP, given)
        return builder.select(status.is_error, _WHOLE(1), failed)

    pair = types.UniTuple(types.int64, 2)  # type: ignore[no-untyped-call]
    return types.int64(pair, pair, *operands), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def _on_threads(addresses, threads, units, a, b, c, d):
    """Run the kernel whose address stands behind the identity of the operands' types: how many threads failed.

    -1, with nothing run, where there is none.
    """
    identity = _identity_of(a, b, c, d)  # type: ignore[call-arg,var-annotated]
    for row in range(addresses.shape[0]):
        if addresses[row, 0] == identity:
            at = addresses[row, 2], addresses[row, 1]
            return _share_out(at, (threads, units), a, b, c, d)
    return -1


def _address(function: Any, signature: Any) -> int:
    """Where the function that is compiled for these types lies in memory; it may come from Numba's cache."""
    compiled = function.get_compile_result(signature)
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


class Kernel:
    """``serial(begin, end, *operands)`` over some units, and ``parallel(threads, units, *operands)`` over all of them.

    Attributes:
        addresses: [types, 3] int64: the identity of four operands' types, and where in memory the kernel for them lies, and
            the loop over threads.
    """

    __slots__ = ("addresses", "serial")

    def __init__(self, serial: Any) -> None:
        self.serial: Callable[..., None] = serial
        self.addresses = np.empty((0, 3), np.int64)

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
        of_kernel = types.void(types.int64, types.int64, *kinds)
        row = _identity(kinds), _address(self.serial, of_kernel), _address(_loop, types.int64(*_OF_LOOP))
        with _ADDING:  # a new array: other threads may be reading the old one
            self.addresses = np.concatenate([self.addresses, np.array([row], np.int64)])


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
    # of a kernel lies in other files. The version is read first: what another one kept may name classes that are gone.
    file = getattr(getattr(serial, "_cache", None), "_cache_file", None)  # None where nothing can be kept
    if file is not None:
        file._version = file._version, _sources()
    return Kernel(serial)
