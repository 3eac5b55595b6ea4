"""bfloat16 for Numba, which has no such type: its bits as int16, widened to float32 as they are read, rounded as written.

A bfloat16 is the upper half of a float32. Rounding is to the nearest, ties to even, as torch's: by integers, because the
processors' own instruction makes zeros of the smallest numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sj_tac.kernels.cpu.linked import by_type

# Half of what is cut off, and the bits of "not a number".
_HALF, _NAN = 0x7FFF, 0x7FC0


def widened(x: Any) -> Any:
    """The number that ``x`` stands for: of an int16, the bfloat16 of these bits as a float32; others are what they are."""
    if isinstance(x, np.int16):
        return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x


def narrowed(x: Any, out: Any) -> Any:
    """``x`` as array ``out`` holds it: bits of a bfloat16 where that is of int16."""
    if out.dtype != np.int16:
        return x
    bits = np.float32(x).view(np.uint32)
    rounded = (int(bits) + _HALF + (int(bits) >> 16 & 1)) >> 16
    return np.uint16(_NAN if np.isnan(x) else rounded).view(np.int16)


@intrinsic
def _of_bits(_typing, bits):
    def codegen(_context, builder, _signature, values):
        whole = builder.zext(values[0], ir.IntType(32))
        return builder.bitcast(builder.shl(whole, ir.Constant(whole.type, 16)), ir.FloatType())

    return types.float32(bits), codegen


def upper_half(builder: Any, value: Any) -> Any:
    """The bits of the bfloat16 nearest to a float32, or to each in a register of them, as integers of 32 bits."""
    lanes = getattr(value.type, "count", 0)
    kind: Any = ir.VectorType(ir.IntType(32), lanes) if lanes else ir.IntType(32)

    def constant(number: int) -> Any:
        return ir.Constant(kind, [number] * lanes if lanes else number)

    bits = builder.bitcast(value, kind)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(builder.add(bits, odd), constant(_HALF)), constant(16))
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(_NAN), rounded)


def lower_half_cut(builder: Any, bits: Any) -> Any:
    """The float32 that a register of bfloat16 stand for, as int16."""
    lanes = bits.type.count
    whole = builder.zext(bits, ir.VectorType(ir.IntType(32), lanes))
    return builder.bitcast(builder.shl(whole, ir.Constant(whole.type, [16] * lanes)), ir.VectorType(ir.FloatType(), lanes))


@intrinsic
def _bits_of(_typing, number):
    def codegen(_context, builder, _signature, values):
        return builder.trunc(upper_half(builder, values[0]), ir.IntType(16))

    return types.int16(number), codegen


@by_type(widened)
def _widened(x):
    if x == types.int16:
        return lambda x: _of_bits(x)  # type: ignore[call-arg]
    return lambda x: x


@by_type(narrowed)
def _narrowed(x, out):
    if out.dtype == types.int16:
        return lambda x, out: _bits_of(x)  # type: ignore[call-arg]
    return lambda x, out: x
