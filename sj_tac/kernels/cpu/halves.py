"""bfloat16 for Numba, which has no such type: its bits as int16, widened to float32 as they are read, rounded as written.

A bfloat16 is the upper half of a float32. Rounding is to the nearest, ties to even, as torch's: by integers, because the
processors' own instruction makes zeros of the smallest numbers, as torch does of the drives of convolutions alone.

A convolution in bfloat16 takes two input channels at a time, as processors that compute in it do: both numbers in an int32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sj_tac.kernels.cpu.linked import by_type

# The names by which LLVM knows that a processor computes so, in registers of 16 numbers.
_NEEDS = "avx512f", "avx512bf16"
# Half of what is cut off, the bits of "not a number", and those of the smallest float32 with all of its precision.
_HALF, _NAN, _SMALLEST = 0x7FFF, 0x7FC0, 0x00800000


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


def nearest(builder: Any, value: Any) -> Any:
    """The bfloat16 nearest to a register of float32, each as the float32 that it is: of the smallest numbers, a zero.

    As the processor's own instruction has them, by which convolutions round.
    """
    bits = upper_half(builder, value)

    def constant(number: int) -> Any:
        return ir.Constant(bits.type, [number] * bits.type.count)

    whole = builder.bitcast(value, bits.type)
    small = builder.icmp_unsigned("<", builder.and_(whole, constant(0x7FFFFFFF)), constant(_SMALLEST))
    zero = builder.and_(whole, constant(0x80000000))
    return builder.bitcast(builder.select(small, zero, builder.shl(bits, constant(16))), value.type)


def lower_half_cut(builder: Any, bits: Any) -> Any:
    """The float32 that a register of bfloat16 stand for, as int16."""
    lanes = bits.type.count
    whole = builder.zext(bits, ir.VectorType(ir.IntType(32), lanes))
    return builder.bitcast(builder.shl(whole, ir.Constant(whole.type, [16] * lanes)), ir.VectorType(ir.FloatType(), lanes))


@cache
def can_multiply_pairs() -> bool:
    """Whether this processor multiplies pairs of bfloat16."""
    try:
        return all(binding.get_host_cpu_features().get(name, False) for name in _NEEDS)
    except RuntimeError:  # not known of this kind of processor
        return False


def adding_products(builder: Any, of_pairs: bool, lanes: int) -> Any:
    """What emits ``total + x * w`` for registers of float32; ``of_pairs``: x and w hold two bfloat16 in each int32.

    Of these the processor adds the second one's product first.
    """
    kind: Any = ir.VectorType(ir.FloatType(), lanes)
    if not of_pairs:
        declared = ir.FunctionType(kind, [kind] * 3), f"llvm.fma.v{lanes}f32"
        fma = cgutils.get_or_insert_function(builder.module, *declared)  # type: ignore[no-untyped-call]
        return lambda x, w, total: builder.call(fma, [x, w, total])
    pairs: Any = ir.VectorType(ir.IntType(32), lanes)
    # With the types that LLVM first had for it, which later versions understand.
    declared = ir.FunctionType(kind, [kind, pairs, pairs]), f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    instruction = cgutils.get_or_insert_function(builder.module, *declared)  # type: ignore[no-untyped-call]
    return lambda x, w, total: builder.call(instruction, [total, x, w])


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
