"""A neuron's steps in registers, for Numba: voltages and sums stay in them for as many steps as share a drive.

Drives come straight from where they lie. Several registers step side by side, because a neuron's step waits for the one
before it. The order of operations is steps.py's, by which numbers step where nothing is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from sj_tac.kernels.cpu.arguments import Neuron, Neurons
from sj_tac.kernels.cpu.geometry import PITCH, TILE
from sj_tac.kernels.cpu.halves import lower_half_cut, narrowed, upper_half, widened
from sj_tac.kernels.cpu.linked import by_type
from sj_tac.kernels.cpu.prefetch import fetch
from sj_tac.kernels.cpu.registers import LANES, WIDE
from sj_tac.kernels.cpu.steps import AS_LIF, AS_LIF_DECAY, AS_MERGED, AS_PLIF, AS_PLIF_DECAY, after, charged

# Where voltages and sums lie in a tile's buffer (forward.py).
V, SUM = np.intp(PITCH), np.intp(2 * PITCH)
# Registers of neurons, and of windows, of four corners each, that step side by side. More of them do not fit in all.
NEURONS, WINDOWS = 2 * WIDE, max(1, WIDE // 2)
_WHOLE, _INDEX = ir.IntType(64), ir.IntType(32)
# What LLVM calls them.
_SHORT = {ir.IntType(16): "i16", ir.FloatType(): "f32", ir.DoubleType(): "f64"}
_INDICES = ir.VectorType(_INDEX, LANES)


def _constant(number: Any) -> Any:
    return ir.Constant(_WHOLE, int(number))


class Lanes:
    """Registers' loads and stores: of ``some`` numbers of each, from the first on, where not of all."""

    def __init__(self, builder: Any, some: Any = None) -> None:
        self.builder, self.mask = builder, None
        if some is not None:
            numbers = ir.Constant(_INDICES, list(range(LANES)))
            self.mask = builder.icmp_signed("<", numbers, self.spread(builder.trunc(some, _INDEX)))

    def spread(self, value: Any) -> Any:
        """A number in all lanes."""
        undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        one = self.builder.insert_element(undefined, value, _INDEX(0))
        return self.builder.shuffle_vector(one, undefined, ir.Constant(_INDICES, [0] * LANES))

    def _there(self, data: Any, at: Any) -> tuple[Any, Any]:
        """The type of the register that begins at ``data[at]``, and the place."""
        kind = ir.VectorType(data.type.pointee, LANES)
        return kind, self.builder.bitcast(self.builder.gep(data, [at]), kind.as_pointer())

    def _some(self, name: str, kind: Any, result: Any, arguments: list[Any]) -> Any:
        # LLVM corrects the name where it has another one for pointers.
        name = f"llvm.masked.{name}.v{LANES}{_SHORT[kind.element]}.p0"
        declared = ir.FunctionType(result, [x.type for x in arguments]), name
        function = cgutils.get_or_insert_function(self.builder.module, *declared)  # type: ignore[no-untyped-call]
        return self.builder.call(function, arguments)

    def load(self, data: Any, at: Any) -> Any:
        """The numbers from ``data[at]`` on, from bfloat16 where they are of that."""
        kind, place = self._there(data, at)
        is_half = kind.element == ir.IntType(16)
        if self.mask is None:
            found = self.builder.load(place, align=2)
        else:
            zeros = ir.Constant(kind, [0 if is_half else 0.0] * LANES)
            found = self._some("load", kind, kind, [place, _INDEX(2), self.mask, zeros])
        return lower_half_cut(self.builder, found) if is_half else found

    def store(self, value: Any, data: Any, at: Any) -> None:
        """Numbers to ``data[at]`` and on, as bfloat16 where those are of that."""
        kind, place = self._there(data, at)
        if kind.element == ir.IntType(16):
            value = self.builder.trunc(upper_half(self.builder, value), kind)
        if self.mask is None:
            self.builder.store(value, place, align=2)
        else:
            self._some("store", kind, ir.VoidType(), [value, place, _INDEX(2), self.mask])


def charge(builder: Any, x: Any, v: Any, mode: Any, of: dict[str, Any]) -> Any:
    """``steps.charged`` of a register."""
    add, sub, mul, div = builder.fadd, builder.fsub, builder.fmul, builder.fdiv
    rest, tau = of.get("rest"), of["tau"]
    above = v if rest is None else sub(v, rest)
    if mode == AS_LIF_DECAY:
        return add(v, div(sub(x, above), tau))
    if mode == AS_LIF:
        return add(sub(v, div(above, tau)), x)
    if mode == AS_PLIF_DECAY:
        return add(v, mul(sub(x, above), tau))
    if mode == AS_PLIF:
        return add(sub(v, mul(above, tau)), x)
    if mode == AS_MERGED:
        kept = mul(of["decay"], above)
        return add(kept if rest is None else add(rest, kept), mul(of["gain"], x))
    return add(v, x)


def reset(builder: Any, h: Any, fired: Any, of: dict[str, Any]) -> Any:
    """``steps.after`` of a register."""
    low, high = of["low"], of.get("high")
    if high is None:
        return builder.select(fired, low, h)
    behind = builder.fsub(h, of["threshold"])
    behind = builder.select(builder.fcmp_ordered(">", behind, low), behind, low)
    behind = builder.select(builder.fcmp_ordered("<", behind, high), behind, high)
    return builder.select(fired, behind, h)


class _Block(NamedTuple):
    """Some registers that step side by side.

    Attributes:
        lanes: which numbers of a register are meant. xs, vs: drives and voltages of each, of a window's corners; sums.
        in_buffer, in_source, in_out, of_affine: where each one's first number lies.
    """

    lanes: Lanes
    xs: list[list[Any]]
    vs: list[list[Any]]
    sums: list[Any]
    in_buffer: list[Any]
    in_source: list[Any]
    in_out: list[Any]
    of_affine: list[Any]


class _Emitter:
    """What ``stepped`` is compiled to: its operands as LLVM's values, and the code for a block."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        names = "b", "at", "read", "affine", "out", "span", "of"
        of = dict(zip(names, zip(kinds, values, strict=True), strict=True))

        def array(kind: Any, value: Any) -> Any:
            return arrayobj.make_array(kind)(context, builder, value)  # type: ignore[no-untyped-call]

        def item(name: str, i: int) -> tuple[Any, Any]:
            return of[name][0][i], builder.extract_value(of[name][1], i)

        def whole(name: str, i: int) -> Any:
            kind, value = item(name, i)
            return context.cast(builder, value, kind, types.int64)

        def is_given(x: Any) -> Any:
            return builder.icmp_signed("!=", x, _constant(0))

        self.builder, self.every = builder, Lanes(builder)
        (of_neuron, neuron), (layout, _) = item("of", 0), item("of", 1)
        self.in_windows = len(layout) > len(Neurons._fields)
        self.mode = of_neuron.instance_class.as_type
        self.buffer, self.out = array(*of["b"]).data, array(*of["out"]).data
        self.place, self.put, self.next_put = (whole("at", i) for i in range(3))
        self.source = array(*item("read", 0)).data
        self.start, right, below, self.count, self.many, self.apart, self.next_one = (whole("read", i) for i in range(1, 8))
        self.corners = [_constant(0), right, below, builder.add(right, below)] if self.in_windows else [_constant(0)]
        scale, shift = (array(*item("affine", i)) for i in range(2))
        self.scale, self.shift, self.channel, self.along = scale.data, shift.data, whole("affine", 2), whole("affine", 3)
        weights, first, self.steps, begins, ends = array(*item("span", 0)), *(whole("span", i) for i in range(1, 5))
        self.is_mapped, self.begins, self.ends = (is_given(x) for x in (scale.nitems, begins, ends))
        self.asks, self.asks_out = is_given(self.next_one), is_given(self.next_put)
        self.numbers = {}
        for i, name in enumerate(Neuron._fields):
            if name != "mode" and not isinstance(of_neuron[i], types.NoneType):
                self.numbers[name] = self.every.spread(builder.extract_value(neuron, i))
        for i, name in enumerate(("decay", "gain"), 5):
            self.numbers[name] = self.every.spread(item("span", i)[1])
        # The weights of all steps, or one for each.
        number = builder.extract_value(neuron, Neuron._fields.index("one"))
        one = cgutils.alloca_once_value(builder, number)  # type: ignore[no-untyped-call]
        self.weights = builder.select(is_given(weights.nitems), builder.gep(weights.data, [first]), one)
        self.to_next_weight = builder.zext(is_given(weights.nitems), _WHOLE)

    def _block(self, run: Any, j: Any, registers: int, some: Any) -> _Block:
        """Registers from the ``j``th number of a run on; ``some``: numbers of the only one, where it is not full."""
        builder, kind = self.builder, self.numbers["zero"].type

        def variable() -> Any:
            return cgutils.alloca_once(builder, kind)  # type: ignore[no-untyped-call]

        def of_each(make: Any) -> list[Any]:
            return [make(builder.add(j, _constant(r * LANES))) for r in range(registers)]

        in_run, there = builder.mul(run, self.count), builder.add(self.start, builder.mul(run, self.apart))
        return _Block(
            Lanes(builder, some),
            [[variable() for _ in self.corners] for _ in range(registers)],
            [[variable() for _ in self.corners] for _ in range(registers)],
            [variable() for _ in range(registers)],
            of_each(lambda at: builder.add(builder.add(self.place, in_run), at)),
            of_each(lambda at: builder.add(there, at)),
            of_each(lambda at: builder.add(builder.add(self.put, in_run), at)),
            of_each(lambda at: builder.add(self.channel, builder.mul(at, self.along))),
        )

    def _ask(self, block: _Block) -> None:
        """Have memory bring what is read and written next."""
        builder = self.builder
        with builder.if_then(self.asks):
            for at in block.in_source:
                for corner in self.corners:
                    fetch(builder, self.source, builder.add(builder.add(at, self.next_one), corner), False)
        with builder.if_then(self.asks_out):
            for at in block.in_out:
                fetch(builder, self.out, builder.add(at, self.next_put), True)

    def _load(self, block: _Block) -> None:
        builder, load = self.builder, block.lanes.load
        for xs, vs, at, there in zip(block.xs, block.vs, block.in_source, block.in_buffer, strict=True):
            for i, corner in enumerate(self.corners):
                builder.store(load(self.source, builder.add(at, corner)), xs[i])
                builder.store(load(self.buffer, builder.add(there, _constant(V + i * TILE))), vs[i])
        with builder.if_then(self.is_mapped):
            for xs, at in zip(block.xs, block.of_affine, strict=True):
                factor, more = load(self.scale, at), load(self.shift, at)
                for x in xs:
                    builder.store(builder.fadd(builder.fmul(builder.load(x), factor), more), x)
        with builder.if_else(self.begins) as (new, old):
            with new:
                for total in block.sums:
                    builder.store(self.numbers["zero"], total)
            with old:
                for total, at in zip(block.sums, block.in_buffer, strict=True):
                    builder.store(load(self.buffer, builder.add(at, _constant(SUM))), total)

    def _step(self, block: _Block) -> None:
        builder, numbers = self.builder, self.numbers
        with cgutils.for_range(builder, self.steps) as step:
            at = builder.mul(step.index, self.to_next_weight)
            w = self.every.spread(builder.load(builder.gep(self.weights, [at])))
            for xs, vs, total in zip(block.xs, block.vs, block.sums, strict=True):
                any_fired = None
                for x, v in zip(xs, vs, strict=True):
                    h = charge(builder, builder.load(x), builder.load(v), self.mode, numbers)
                    fired = builder.fcmp_ordered(">=", h, numbers["threshold"])
                    builder.store(reset(builder, h, fired, numbers), v)
                    any_fired = fired if any_fired is None else builder.or_(any_fired, fired)
                so_far = builder.load(total)
                builder.store(builder.select(any_fired, builder.fadd(so_far, w), so_far), total)

    def _store(self, block: _Block) -> None:
        builder, store = self.builder, block.lanes.store
        for vs, at in zip(block.vs, block.in_buffer, strict=True):
            for i, v in enumerate(vs):
                store(builder.load(v), self.buffer, builder.add(at, _constant(V + i * TILE)))
        with builder.if_else(self.ends) as (done, going_on):
            with done:
                for total, at in zip(block.sums, block.in_out, strict=True):
                    store(builder.load(total), self.out, at)
            with going_on:
                for total, at in zip(block.sums, block.in_buffer, strict=True):
                    store(builder.load(total), self.buffer, builder.add(at, _constant(SUM)))

    def _emit(self, run: Any, j: Any, registers: int, some: Any = None) -> None:
        block = self._block(run, j, registers, some)
        for part in self._ask, self._load, self._step, self._store:
            part(block)

    def emit(self) -> None:
        """All numbers of all runs: in blocks, single registers, and one that is not full."""
        builder, most = self.builder, WINDOWS if self.in_windows else NEURONS
        if self.buffer.type.pointee == ir.DoubleType():
            most = max(1, most // 2)
        with cgutils.for_range(builder, self.many) as outer:
            done = _constant(0)
            for registers in sorted({most, 1}, reverse=True):
                size = _constant(registers * LANES)
                times = builder.sdiv(builder.sub(self.count, done), size)
                with cgutils.for_range(builder, times) as loop:
                    self._emit(outer.index, builder.add(done, builder.mul(loop.index, size)), registers)
                done = builder.add(done, builder.mul(times, size))
            with builder.if_then(builder.icmp_signed("<", done, self.count)):
                self._emit(outer.index, done, 1, builder.sub(self.count, done))


@intrinsic
def _stepping(_typing, b, at, read, affine, out, span, of):
    def codegen(context, builder, signature, values):
        _Emitter(context, builder, signature.args, values).emit()
        return context.get_dummy_value()

    return types.void(b, at, read, affine, out, span, of), codegen


def stepped(b: Any, at: Any, read: Any, affine: Any, out: Any, span: Any, of: Any) -> None:
    """Some steps of neurons, or windows, on one drive.

    Args:
        b: the buffer, with their voltages, corners TILE apart, and sums.
        at: where the first is in the buffer's regions, and where sums go in ``out``; how far behind that the place is that
            will be written next, or 0.
        read: where drives are: an array, the first one's place in it, from there to a window's right and lower corner; how
            many neurons or windows lie side by side, how many such runs there are, and from one to the next; how far behind
            each drive the one is that will be read next, or 0.
        affine: a BatchNorm's scale and shift, or empty ones, of which place, and numbers from a neuron's to the next one's.
        out: what sums are put into as they end.
        span: weights of all steps, or none; the first step, and how many; whether sums begin, and end, with these; decay
            and gain of the drive.
        of: one of ``NEURONS_OF_TILES``; and Neurons, Windows or OddWindows.
    """
    (place, out_place, _), (source, start, right, below, count, many, apart, _) = at, read
    (scale, shift, channel, along), (weights, first, steps, begins, ends, decay, gain) = affine, span
    neuron, layout = of
    mode = type(neuron).as_type
    corners = (0, right, below, right + below) if len(layout) > len(Neurons._fields) else (0,)
    for run, j in np.ndindex(int(many), int(count)):
        here = place + run * count + j
        total = neuron.zero if begins else b[SUM + here]
        for t in range(int(steps)):
            fires = False
            for i, corner in enumerate(corners):
                x = widened(source[int(start + run * apart + corner + j)])
                x = x * scale[channel + j * along] + shift[channel + j * along] if scale.size else x
                h = charged(x, b[V + i * TILE + here], mode, neuron.tau, neuron.rest, decay, gain)
                b[V + i * TILE + here] = after(h, neuron.threshold, neuron.low, neuron.high)
                fires = fires or h >= neuron.threshold
            total = total + (weights[first + t] if weights.size else neuron.one) if fires else total
        if ends:
            out[out_place + run * count + j] = narrowed(total, out)
        else:
            b[SUM + here] = total


@by_type(stepped)
def _stepped(b, at, read, affine, out, span, of):
    return lambda b, at, read, affine, out, span, of: _stepping(b, at, read, affine, out, span, of)  # type: ignore[call-arg]
