"""A first layer's convolution for Numba, made tile by tile in front of the steps: its output is never written.

It is the sum that oneDNN's convolution takes, in the same order (rows, columns, channels of a window; of one channel,
columns and rows) and with the same fused multiplications, so that drives are the same to the last bit; conv_launches.py
checks whether they are. Four pixels are made at once, so that each weight is read once for all of them, and their sums
stay in registers. Pairs of bfloat16 (halves.py) count as one channel; drives of them are rounded behind the bias.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from sj_tac.kernels.cpu.geometry import TILE, in_windows
from sj_tac.kernels.cpu.halves import adding_products, nearest
from sj_tac.kernels.cpu.linked import lean
from sj_tac.kernels.cpu.registers import LANES, WIDE

_WHOLE, _INDEX = ir.IntType(64), ir.IntType(32)


def _constant(number: int) -> Any:
    return ir.Constant(_WHOLE, number)


def _summing(pixels: int, vectors: int, masked: bool = False) -> Any:
    """What Numba compiles: drives of ``vectors * LANES`` channels of one pixel, or of four at once.

    What is compiled takes the buffer and where drives go in it: the first pixel's, from there to a pixel's right and to its
    lower neighbour; frames, and where windows begin in them: the first pixel's, and as before; weights, bias, scale and
    shift (each of the latter may be empty); and how a window lies in frames and weights: lines, line, taps and tap of
    ``Convolved``, channels, the first channel, and how many are wanted where ``masked``: no others are written.
    """
    floats = ir.VectorType(ir.FloatType(), LANES)
    indices = ir.VectorType(_INDEX, LANES)

    @intrinsic
    def summing(_typing, b, put, frames, taken, weights, window):
        def codegen(context, builder, signature, values):
            names = "b", "put", "frames", "taken", "weights", "window"
            of = dict(zip(names, zip(signature.args, values, strict=True), strict=True))

            def array(kind_of: Any, value: Any) -> Any:
                return arrayobj.make_array(kind_of)(context, builder, value)  # type: ignore[no-untyped-call]

            def number(name: str, i: int) -> Any:
                kinds, value = of[name]
                return context.cast(builder, builder.extract_value(value, i), kinds[i], types.int64)

            def vector(data: Any, at: Any, kind: Any = floats) -> Any:
                return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())

            def places(name: str) -> list[Any]:
                """Of the pixels, the right ones and the lower ones behind the first."""
                first, right, below = (number(name, i) for i in range(3))
                found = [first, builder.add(first, right)]
                return [*found, *(builder.add(x, below) for x in found)][:pixels]

            rows, bias, scale, shift = (
                array(of["weights"][0][i], builder.extract_value(of["weights"][1], i)) for i in range(4)
            )
            lines, line, taps, tap, channels, channel, wanted = (number("window", i) for i in range(7))
            parts = [builder.add(channel, _constant(i * LANES)) for i in range(vectors)]
            data, starts = array(*of["frames"]).data, places("taken")
            of_pairs = of["frames"][0].dtype == types.int32
            kind, add = indices if of_pairs else floats, adding_products(builder, of_pairs, LANES)
            zeros = ir.Constant(floats, [0.0] * LANES)
            sums = [[cgutils.alloca_once_value(builder, zeros) for _ in parts] for _ in starts]  # type: ignore[no-untyped-call]
            nothing, first_lane = ir.Constant(kind, ir.Undefined), ir.Constant(indices, [0] * LANES)
            with cgutils.for_range(builder, lines) as outer:
                begin, before = builder.mul(outer.index, line), builder.mul(outer.index, taps)
                with cgutils.for_range(builder, taps) as inner:
                    of_input = builder.mul(builder.add(before, inner.index), channels)
                    there = builder.add(begin, builder.mul(inner.index, tap))
                    read = [builder.load(vector(rows.data, builder.add(of_input, part), kind), align=4) for part in parts]
                    for start, held in zip(starts, sums, strict=True):
                        at = builder.add(start, there)
                        one = builder.insert_element(nothing, builder.load(builder.gep(data, [at])), ir.Constant(_INDEX, 0))
                        x = builder.shuffle_vector(one, nothing, first_lane)
                        for w, total in zip(read, held, strict=True):
                            builder.store(add(x, w, builder.load(total)), total)

            def is_given(some: Any) -> Any:
                return builder.icmp_unsigned("!=", some.nitems, _constant(0))

            with builder.if_then(is_given(bias)):
                for i, part in enumerate(parts):
                    more = builder.load(vector(bias.data, part), align=4)
                    for held in sums:
                        builder.store(builder.fadd(builder.load(held[i]), more), held[i])
            if of_pairs:
                for held in sums:
                    for total in held:
                        builder.store(nearest(builder, builder.load(total)), total)
            with builder.if_then(is_given(scale)):
                for i, part in enumerate(parts):
                    factor, more = (builder.load(vector(some.data, part), align=4) for some in (scale, shift))
                    for held in sums:
                        builder.store(builder.fadd(builder.fmul(builder.load(held[i]), factor), more), held[i])
            target = array(*of["b"]).data
            if masked:
                numbers = ir.Constant(indices, list(range(LANES)))
                most = builder.insert_element(ir.Constant(indices, ir.Undefined), builder.trunc(wanted, _INDEX), _INDEX(0))
                lanes = builder.icmp_signed("<", numbers, builder.shuffle_vector(most, most, first_lane))
            for at, held in zip(places("put"), sums, strict=True):
                for i, total in enumerate(held):
                    place, drives = vector(target, builder.add(at, _constant(i * LANES))), builder.load(total)
                    if masked:
                        drives = builder.select(lanes, drives, builder.load(place, align=4))
                    builder.store(drives, place, align=4)
            return context.get_dummy_value()

        return types.void(b, put, frames, taken, weights, window), codegen

    return summing


_four_wide, _four_double, _four_any = _summing(4, WIDE), _summing(4, 2), _summing(4, 1, masked=True)
_one_wide, _one_double, _one_any = _summing(1, WIDE), _summing(1, 2), _summing(1, 1, masked=True)


@lean(forceinline=True)
def _at(place, channels):
    return place[0] + channels, place[1], place[2]


@lean(forceinline=True)
def _window(source, channels, channel, wanted):
    return source.lines, source.line, source.taps, source.tap, channels, channel, wanted


@lean(forceinline=True)
def _four(b, put, source, taken, weights, channels, first, n):
    """The drives of ``n`` channels from ``first`` on, of four pixels: sums, bias, affine map; see ``_summing``."""
    c, frames = 0, source.frames
    while c + WIDE * LANES <= n:
        _four_wide(b, _at(put, c), frames, taken, weights, _window(source, channels, first + c, n - c))
        c += WIDE * LANES
    while c + 2 * LANES <= n:
        _four_double(b, _at(put, c), frames, taken, weights, _window(source, channels, first + c, n - c))
        c += 2 * LANES
    while c < n:
        _four_any(b, _at(put, c), frames, taken, weights, _window(source, channels, first + c, n - c))
        c += LANES


@lean(forceinline=True)
def _one(b, put, source, taken, weights, channels, first, n):
    """``_four``, of one pixel."""
    c, frames = 0, source.frames
    while c + WIDE * LANES <= n:
        _one_wide(b, _at(put, c), frames, taken, weights, _window(source, channels, first + c, n - c))
        c += WIDE * LANES
    while c + 2 * LANES <= n:
        _one_double(b, _at(put, c), frames, taken, weights, _window(source, channels, first + c, n - c))
        c += 2 * LANES
    while c < n:
        _one_any(b, _at(put, c), frames, taken, weights, _window(source, channels, first + c, n - c))
        c += LANES


@lean(forceinline=True)
def convolve(source, offset, begin, end, b, at, affine, layout):
    """As ``tiles.load``, of drives that are made here. Channels_last."""
    height, width, channels = layout.height, layout.width, layout.channels
    size = 2 if in_windows(layout) else 1
    rows, columns = (height + size - 1) // size, (width + size - 1) // size
    unit, place = begin // channels, begin % channels
    column, line = unit % columns, unit // columns
    sample, row = offset // (height * width * channels) + line // rows, line % rows
    # Numbers from a window to its right one and its lower one.
    right, below = source.along * source.inputs, source.down * source.width * source.inputs
    weights = source.rows, source.bias, affine[0], affine[1]
    slot = begin
    while slot < end:
        n, z = min(channels - place, end - slot), at + slot - begin
        start = sample * source.height * source.width * source.inputs + size * (row * below + column * right)
        if in_windows(layout):
            _four(b, (z, TILE, 2 * TILE), source, (start, right, below), weights, channels, place, n)
            if 2 * row + 1 == height:
                b[z + 2 * TILE : z + 2 * TILE + n] = 0
                b[z + 3 * TILE : z + 3 * TILE + n] = 0
            if 2 * column + 1 == width:
                b[z + TILE : z + TILE + n] = 0
                b[z + 3 * TILE : z + 3 * TILE + n] = 0
        elif place == 0 and column + 4 <= columns and slot + 4 * channels <= end:
            _four(b, (z, channels, 2 * channels), source, (start, right, 2 * right), weights, channels, place, n)
            n, column = 4 * n, column + 3
        else:
            _one(b, (z, channels, channels), source, (start, right, right), weights, channels, place, n)
        slot, place, column = slot + n, 0, column + 1
        if column == columns:
            column, row = 0, row + 1
            if row == rows:
                row, sample = 0, sample + 1
