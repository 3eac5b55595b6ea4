"""A first layer's convolution for Numba on contiguous maps: windows of a 2 x 2 MaxPool in a row are convolved side by side.

Sums are in the order of rows, columns and channels of a filter, as oneDNN's of contiguous frames are. A register holds one
corner of ``LANES`` windows. The four corners of several registers' windows are computed at once: what a corner reads for a
tap, the right one reads for the tap before and the lower one for the tap above, so that each number is read once for all.
Even and odd columns of a frame lie apart, so that what a register reads lies side by side (laying.py). Strides are 1.
Pairs of bfloat16 count as one channel, as in convolving.py.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from sj_tac.kernels.cpu.geometry import TILE
from sj_tac.kernels.cpu.halves import adding_products, nearest
from sj_tac.kernels.cpu.linked import lean
from sj_tac.kernels.cpu.registers import LANES

# Registers of windows that are computed at once: all sums, four each, stay in registers.
MANY = LANES // 4
_WHOLE, _INDEX = ir.IntType(64), ir.IntType(32)
_KIND, _INDICES = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INDEX, LANES)


def _constant(number: int) -> Any:
    return ir.Constant(_WHOLE, number)


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    """A number in all lanes."""
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, value, _INDEX(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_INDICES, [0] * LANES))


def _registers(builder: Any, slots: Any, first: Any, to_row: Any) -> tuple[Any, ...]:
    """Where registers begin to read, their first slot and how many they have; and behind them slot, row and column.

    A register without slots reads where the map begins.
    """
    row, column, wanted, columns = slots
    starts, offsets, counts, done = [], [], [], _constant(0)
    for _ in range(MANY):
        count = _constant(LANES)
        for most in (builder.sub(wanted, done), builder.sub(columns, column)):
            count = builder.select(builder.icmp_signed("<", most, count), most, count)
        there = builder.add(first, builder.add(builder.mul(row, to_row), column))
        starts.append(builder.select(builder.icmp_signed("==", count, _constant(0)), first, there))
        offsets.append(done)
        counts.append(count)
        done, column = builder.add(done, count), builder.add(column, count)
        ends = builder.icmp_signed("==", column, columns)
        column = builder.select(ends, _constant(0), column)
        row = builder.select(ends, builder.add(row, _constant(1)), row)
    return starts, offsets, counts, (done, row, column)


def _add_taps(builder: Any, read: Any, sums: Any, sizes: Any) -> None:
    """All taps' products into the sums of four corners: upper left, upper right, lower left, lower right.

    Args:
        read: gives the numbers of all registers at a row, column and input of what windows read; the weight of a tap; and
            what a sum is with a product added.
        sums: where they are, corner by corner, of each register.
        sizes: rows, columns and inputs of the filter.
    """
    high, wide, inputs = sizes
    numbers, weight, added = read
    edges = {"first": (True, False), "middle": (True, True), "last": (False, True)}

    def add(row: Any, column: Any, row_at: str, column_at: str) -> None:
        with cgutils.for_range(builder, inputs) as at:
            xs = numbers(row, column, at.index)
            for lower in (0, 1):
                for right in (0, 1):
                    if edges[row_at][lower] and edges[column_at][right]:
                        tap = builder.sub(row, _constant(lower)), builder.sub(column, _constant(right))
                        w = weight(*tap, at.index)
                        for x, held in zip(xs, sums, strict=True):
                            total = held[2 * lower + right]
                            builder.store(added(x, w, builder.load(total)), total)

    def along(row: Any, row_at: str) -> None:
        add(row, _constant(0), row_at, "first")
        with cgutils.for_range(builder, builder.sub(wide, _constant(1))) as at:
            add(row, builder.add(at.index, _constant(1)), row_at, "middle")
        add(row, wide, row_at, "last")

    along(_constant(0), "first")
    with cgutils.for_range(builder, builder.sub(high, _constant(1))) as at:
        along(builder.add(at.index, _constant(1)), "middle")
    along(high, "last")


@intrinsic
def _windows(_typing, b, put, frames, begin, weights, slots, window):
    """Drives of up to ``MANY * LANES`` windows of one map.

    Args:
        b, put: the buffer, and where drives of first corners go in it, the others' TILE apart.
        frames, begin: and where the map's first window begins in them.
        weights: filters, bias, scale and shift (each of the latter may be empty), and the channel.
        slots: row and column of the first window, how many are wanted, and columns of a row.
        window: of ``Slid`` to_row, high, wide, inputs, of_input, line, apart.

    Returns:
        How many were computed, and row and column of the next one.
    """

    def codegen(context, builder, signature, values):
        names = "b", "put", "frames", "begin", "weights", "slots", "window"
        of = dict(zip(names, zip(signature.args, values, strict=True), strict=True))

        def array(kind_of: Any, value: Any) -> Any:
            return arrayobj.make_array(kind_of)(context, builder, value)  # type: ignore[no-untyped-call]

        def item(name: str, i: int) -> tuple[Any, Any]:
            return of[name][0][i], builder.extract_value(of[name][1], i)

        def whole(kind_of: Any, value: Any) -> Any:
            return context.cast(builder, value, kind_of, types.int64)

        def vector(data: Any, at: Any, kind: Any = _KIND) -> Any:
            return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())

        filters, bias, scale, shift = (array(*item("weights", i)) for i in range(4))
        channel = whole(*item("weights", 4))
        to_row, high, wide, inputs, of_input, line, apart = (whole(*item("window", i)) for i in range(7))
        data, target = array(*of["frames"]).data, array(*of["b"]).data
        wanted = [whole(*item("slots", i)) for i in range(4)]
        starts, offsets, counts, behind = _registers(builder, wanted, whole(*of["begin"]), to_row)

        of_pairs = of["frames"][0].dtype == types.int32
        kind = _INDICES if of_pairs else _KIND
        zeros = ir.Constant(_KIND, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(4)] for _ in starts]  # type: ignore[no-untyped-call]
        before = builder.mul(channel, builder.mul(builder.mul(high, wide), inputs))

        def numbers(row: Any, column: Any, of_channel: Any) -> list[Any]:
            half, odd = builder.lshr(column, _constant(1)), builder.and_(column, _constant(1))
            there = builder.add(builder.mul(of_channel, of_input), builder.mul(row, line))
            there = builder.add(there, builder.add(builder.mul(odd, apart), half))
            return [builder.load(vector(data, builder.add(start, there), kind), align=4) for start in starts]

        def weight(row: Any, column: Any, of_channel: Any) -> Any:
            tap = builder.add(builder.mul(builder.add(builder.mul(row, wide), column), inputs), of_channel)
            return _spread(builder, builder.load(builder.gep(filters.data, [builder.add(before, tap)])), kind)

        _add_taps(builder, (numbers, weight, adding_products(builder, of_pairs, LANES)), sums, (high, wide, inputs))

        def for_all(change: Any) -> None:
            for held in sums:
                for total in held:
                    builder.store(change(builder.load(total)), total)

        def of_channel(some: Any) -> Any:
            return _spread(builder, builder.load(builder.gep(some.data, [channel])), _KIND)

        def is_given(some: Any) -> Any:
            return builder.icmp_unsigned("!=", some.nitems, _constant(0))

        with builder.if_then(is_given(bias)):
            more = of_channel(bias)
            for_all(lambda total: builder.fadd(total, more))
        if of_pairs:
            for_all(lambda total: nearest(builder, total))
        with builder.if_then(is_given(scale)):
            factor, offset = of_channel(scale), of_channel(shift)
            for_all(lambda total: builder.fadd(builder.fmul(total, factor), offset))
        put_at, lane = whole(*of["put"]), ir.Constant(_INDICES, list(range(LANES)))
        for offset, count, held in zip(offsets, counts, sums, strict=True):
            lanes = builder.icmp_signed("<", lane, _spread(builder, builder.trunc(count, _INDEX), _INDICES))
            for corner, total in enumerate(held):
                place = vector(target, builder.add(builder.add(put_at, offset), _constant(corner * TILE)))
                drives = builder.select(lanes, builder.load(total), builder.load(place, align=4))
                builder.store(drives, place, align=4)
        return context.make_tuple(builder, signature.return_type, behind)

    three: Any = types.UniTuple(types.int64, 3)  # type: ignore[no-untyped-call]
    return three(b, put, frames, begin, weights, slots, window), codegen


@lean(forceinline=True)
def _clear_edge(b, at, slots, layout):
    """Zeros for the corners that windows at the edge of an odd map do not have; ``slots``: as ``_sliding`` takes them."""
    row, column, n, columns = slots
    for i in range(n):
        if 2 * row + 1 == layout.height:
            b[at + 2 * TILE + i] = 0
            b[at + 3 * TILE + i] = 0
        if 2 * column + 1 == layout.width:
            b[at + TILE + i] = 0
            b[at + 3 * TILE + i] = 0
        column += 1
        if column == columns:
            row, column = row + 1, 0


@lean(forceinline=True)
def slide(source, offset, begin, end, b, at, affine, layout):
    """As ``tiles.load``, of drives that are made here. Contiguous windows."""
    height, width, channels = layout.height, layout.width, layout.channels
    rows, columns = (height + 1) // 2, (width + 1) // 2
    plane = rows * columns
    window = source.to_row, source.high, source.wide, source.inputs, source.of_input, source.line, source.apart
    slot = begin
    while slot < end:
        map_, place = slot // plane, slot % plane
        channel, sample = map_ % channels, offset // (height * width * channels) + map_ // channels
        weights = source.filters, source.bias, affine[0], affine[1], channel
        stop = min(end, (map_ + 1) * plane)
        row, column = place // columns, place % columns
        z, first = at + slot - begin, sample * source.of_frame
        edge = z, (row, column, stop - slot, columns)
        while slot < stop:
            slots = row, column, stop - slot, columns
            done, row, column = _windows(b, z, source.frames, first, weights, slots, window)  # type: ignore[call-arg,var-annotated]
            slot, z = slot + done, z + done
        if height % 2 or width % 2:
            _clear_edge(b, edge[0], edge[1], layout)
