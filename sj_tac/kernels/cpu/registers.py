"""The processor's registers for Numba: how many numbers one holds, and numbers that lie side by side moved by whole ones.

A loop over a few channels that the compiler makes of registers first looks whether its arrays overlap, each time that it is
entered, and has a second loop for what is left over: for 16 to 64 channels that takes longer than the numbers themselves.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from sj_tac.kernels.cpu.halves import lower_half_cut, narrowed, upper_half, widened
from sj_tac.kernels.cpu.linked import by_type
from sj_tac.kernels.cpu.prefetch import LINE


def _has_wide_registers() -> bool:
    """Whether the processor has registers of 16 numbers, 32 of them."""
    try:
        return bool(binding.get_host_cpu_features().get("avx512f", False))
    except RuntimeError:  # not known of this kind of processor
        return False


# Numbers of a register, and an eighth of all registers.
LANES, WIDE = (16, 4) if _has_wide_registers() else (8, 2)
_WHOLE = ir.IntType(64)
_BYTES = {ir.IntType(16): 2, ir.FloatType(): 4, ir.DoubleType(): 8}


def _moving(is_mapped: bool, streams: bool = False) -> Any:
    """What Numba compiles ``move`` or ``move_mapped`` to: the last register of a run may move what the one before it did.

    ``streams``: whole registers go past the caches.
    """

    @intrinsic
    def moving(_typing, source, start, out, at, affine, channel, runs):
        def codegen(context, builder, signature, values):
            names = "source", "start", "out", "at", "affine", "channel", "runs"
            of = dict(zip(names, zip(signature.args, values, strict=True), strict=True))

            def data(kind: Any, value: Any) -> Any:
                return arrayobj.make_array(kind)(context, builder, value).data  # type: ignore[no-untyped-call]

            def whole(kind: Any, value: Any) -> Any:
                return context.cast(builder, value, kind, types.int64)

            def item(name: str, i: int) -> tuple[Any, Any]:
                return of[name][0][i], builder.extract_value(of[name][1], i)

            read, written, factors, terms = (
                data(*x) for x in (of["source"], of["out"], item("affine", 0), item("affine", 1))
            )
            of_read, of_written, of_factors = (context.get_value_type(kind.dtype) for kind in (source, out, affine[0]))
            first, to, place = (whole(*of[name]) for name in ("start", "at", "channel"))
            count, times, apart, out_apart = (whole(*item("runs", i)) for i in range(4))

            def emit(here: Any, there: Any, begin: Any, lanes: int) -> None:
                """Move so many numbers that lie side by side."""

                def vector(base: Any, offset: Any, kind: Any) -> Any:
                    there = builder.gep(base, [builder.add(offset, begin)])
                    return builder.bitcast(there, ir.VectorType(kind, lanes).as_pointer())

                x = builder.load(vector(read, here, of_read), align=2)
                x = lower_half_cut(builder, x) if of_read == ir.IntType(16) else x
                if is_mapped:
                    x = builder.fmul(x, builder.load(vector(factors, place, of_factors), align=2))
                    x = builder.fadd(x, builder.load(vector(terms, place, of_factors), align=2))
                if of_written == ir.IntType(16):
                    x = builder.trunc(upper_half(builder, x), ir.VectorType(ir.IntType(16), lanes))
                put = vector(written, there, of_written)
                if not streams or lanes < LANES:
                    builder.store(x, put, align=2)
                    return
                size = min(LINE, lanes * _BYTES[of_written])
                bits = builder.and_(builder.ptrtoint(put, _WHOLE), ir.Constant(_WHOLE, size - 1))
                with builder.if_else(builder.icmp_unsigned("==", bits, ir.Constant(_WHOLE, 0))) as (aligned, other):
                    with aligned:
                        stored = builder.store(x, put, align=size)
                        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                        stored.set_metadata("nontemporal", one)
                    with other:
                        builder.store(x, put, align=2)

            lanes = ir.Constant(_WHOLE, LANES)
            most, registers = builder.sub(count, lanes), builder.add(count, ir.Constant(_WHOLE, LANES - 1))
            registers = builder.udiv(registers, lanes)
            with cgutils.for_range(builder, times) as outer:
                here = builder.add(first, builder.mul(outer.index, apart))
                there = builder.add(to, builder.mul(outer.index, out_apart))
                with builder.if_else(builder.icmp_signed(">=", most, ir.Constant(_WHOLE, 0))) as (many, few):
                    with many, cgutils.for_range(builder, registers) as inner:
                        begin = builder.mul(inner.index, lanes)
                        emit(here, there, builder.select(builder.icmp_signed("<", begin, most), begin, most), LANES)
                    with few:
                        # In halves, quarters and so on: a loop over numbers would be made one of registers.
                        begin, half = ir.Constant(_WHOLE, 0), LANES // 2
                        while half:
                            part = builder.and_(count, ir.Constant(_WHOLE, half))
                            with builder.if_then(builder.icmp_unsigned("!=", part, ir.Constant(_WHOLE, 0))):
                                emit(here, there, begin, half)
                            begin, half = builder.add(begin, part), half // 2
            return context.get_dummy_value()

        return types.void(source, start, out, at, affine, channel, runs), codegen

    return moving


_move, _move_mapped, _stream = _moving(False), _moving(True), _moving(False, True)


def move(source: Any, start: Any, out: Any, at: Any, affine: Any, channel: Any, runs: Any) -> None:
    """Runs of numbers of ``source`` from ``start`` on, to ``out`` from ``at`` on; the arrays do not overlap.

    Args:
        runs: numbers of each, how many there are, and how far it is from one to the next in ``source`` and in ``out``.
        affine, channel: as ``move_mapped``'s, and not read. bfloat16 as in halves.py.
    """
    _one_by_one(lambda x, _: x, (source, start), (out, at), runs)


def settle() -> None:
    """Have what was stored past the caches be in memory before whatever is stored from now on."""


def stream(source: Any, start: Any, out: Any, at: Any, affine: Any, channel: Any, runs: Any) -> None:
    """``move`` of what nobody reads soon: past the caches, which keep what they have."""
    _one_by_one(lambda x, _: x, (source, start), (out, at), runs)


def move_mapped(source: Any, start: Any, out: Any, at: Any, affine: Any, channel: Any, runs: Any) -> None:
    """``move``, by a scale and a shift for each number of a run, from ``channel`` on."""
    scale, shift = affine
    _one_by_one(lambda x, j: x * scale[channel + j] + shift[channel + j], (source, start), (out, at), runs)


def _one_by_one(changed: Any, of: Any, to: Any, runs: Any) -> None:
    """What is not compiled."""
    n, many, apart, out_apart = (int(x) for x in runs)
    (source, start), (out, at) = of, to
    for run in range(many):
        for j in range(n):
            x = widened(source[int(start) + run * apart + j])
            out[int(at) + run * out_apart + j] = narrowed(changed(x, j), out)


@by_type(move)
def _moves(source, start, out, at, affine, channel, runs):
    return lambda source, start, out, at, affine, channel, runs: _move(source, start, out, at, affine, channel, runs)


@intrinsic
def _fence(_typing):
    def codegen(context, builder, _signature, _values):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@by_type(settle)
def _settle():
    return lambda: _fence()  # type: ignore[call-arg]


@by_type(stream)
def _streams(source, start, out, at, affine, channel, runs):
    return lambda source, start, out, at, affine, channel, runs: _stream(source, start, out, at, affine, channel, runs)


@by_type(move_mapped)
def _moves_mapped(source, start, out, at, affine, channel, runs):
    return lambda source, start, out, at, affine, channel, runs: _move_mapped(source, start, out, at, affine, channel, runs)
