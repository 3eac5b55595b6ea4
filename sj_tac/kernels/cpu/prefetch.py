"""Lines of memory asked for ahead of time: what a tile reads and writes in one step lies far from that of the next."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from sj_tac.kernels.cpu.linked import by_type

# Bytes of a line.
LINE = 64


def prefetch(array: Any, index: Any) -> None:
    """Have the processor fetch the line of ``array[index]``, to be read; nothing follows from it but time."""


def prefetch_to_write(array: Any, index: Any) -> None:
    """The same of a line that will be written."""


def fetch(builder: Any, data: Any, index: Any, writes: bool) -> None:
    """LLVM's own instruction for either, which never fails, wherever it points.

    What will be read comes into the second cache alone: frames of the steps of a tile lie at like places in as many pages,
    for which the first has little room.
    """
    number = ir.IntType(32)
    place = builder.bitcast(builder.gep(data, [index]), ir.IntType(8).as_pointer())
    kinds = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kinds)
    # Behind the place: to be written or not, how near it is kept, data.
    builder.call(function, [place, number(int(writes)), number(3 if writes else 2), number(1)])


def _fetching(writes: bool) -> Any:
    @intrinsic
    def fetching(_typing, array, index):
        def codegen(context, builder, signature, values):
            data = arrayobj.make_array(signature.args[0])(context, builder, values[0]).data  # type: ignore[no-untyped-call]
            fetch(builder, data, values[1], writes)
            return context.get_dummy_value()

        return types.void(array, types.intp), codegen

    return fetching


_read, _write = _fetching(False), _fetching(True)


@by_type(prefetch)
def _prefetch(array, index):
    return lambda array, index: _read(array, index)


@by_type(prefetch_to_write)
def _prefetch_to_write(array, index):
    return lambda array, index: _write(array, index)
