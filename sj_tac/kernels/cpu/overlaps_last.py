"""``fire`` on the CPU for MaxPool of 3x3 windows, stride 2, padding 1, in channels_last: cells of 2x2 neurons in registers.

A cell's voltages stay in registers for all steps. Window (o, q) has cell (o, q), the right column of the cell to its left,
the lower row of the one above, and the last corner of the one above that to its left. What of these has fired is noted for
the windows to come, a bit for each channel, step by step. The order of operations is steps.py's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from sj_tac.kernels.cpu.arguments import Inputs, Neuron
from sj_tac.kernels.cpu.compiled import kernel
from sj_tac.kernels.cpu.halves import narrowed, widened
from sj_tac.kernels.cpu.linked import by_type, lean
from sj_tac.kernels.cpu.registers import LANES
from sj_tac.kernels.cpu.sheets import cells, locate
from sj_tac.kernels.cpu.stepping import WINDOWS, Lanes, charge, reset
from sj_tac.kernels.cpu.steps import AS_MERGED, after, charged, resting

# Channels that step side by side, a bit for each of a register's channels, and notes of a step: two for each register.
AT_ONCE, BITS, NOTES = WINDOWS * LANES, np.uint16 if LANES == 16 else np.uint8, 2 * WINDOWS
_WHOLE, _INDEX, _BITS = ir.IntType(64), ir.IntType(32), ir.IntType(LANES)


def _constant(number: int) -> Any:
    return ir.Constant(_WHOLE, number)


class _Emitter:
    """What ``stepped_cell`` is compiled to: its operands as LLVM's values, and the code for some registers."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        names = "inputs", "at", "outputs", "notes", "channels", "steps", "neuron"
        of = dict(zip(names, zip(kinds, values, strict=True), strict=True))

        def item(name: str, i: int) -> tuple[Any, Any]:
            return of[name][0][i], builder.extract_value(of[name][1], i)

        def array(name: str, i: int) -> Any:
            kind, value = item(name, i)
            return arrayobj.make_array(kind)(context, builder, value)  # type: ignore[no-untyped-call]

        def whole(name: str, i: int) -> Any:
            kind, value = item(name, i)
            return context.cast(builder, value, kind, types.int64)

        self.builder, self.every = builder, Lanes(builder)
        read = {name: array("inputs", i) for i, name in enumerate(Inputs._fields) if name not in ("residual", "group")}
        self.read, self.group = {name: x.data for name, x in read.items()}, whole("inputs", Inputs._fields.index("group"))
        self.has = {name: builder.icmp_signed("!=", x.nitems, _constant(0)) for name, x in read.items()}
        self.drives = read["lengths"].nitems
        self.start, right, below, self.put = (whole("at", i) for i in range(4))
        self.corners = [_constant(0), right, below, builder.add(right, below)]
        self.out, self.last = (array("outputs", i).data for i in range(2))
        self.notes = [(array("notes", i).data, whole("notes", 2 + i)) for i in range(2)]
        self.channel, self.some = (whole("channels", i) for i in range(2))
        self.size, self.emitted, self.steps = (whole("steps", i) for i in range(3))
        kind, neuron = of["neuron"]
        self.mode, self.numbers = kind.instance_class.as_type, {}
        self.one = builder.extract_value(neuron, Neuron._fields.index("one"))
        for i, name in enumerate(Neuron._fields):
            if name != "mode" and not isinstance(kind[i], types.NoneType):
                self.numbers[name] = self.every.spread(builder.extract_value(neuron, i))

    def _variables(self, many: int, kind: Any) -> list[Any]:
        return [cgutils.alloca_once(self.builder, kind) for _ in range(many)]  # type: ignore[no-untyped-call]

    def emit(self) -> None:
        """All steps of the registers: as many as step side by side, or one that need not be full."""
        builder = self.builder
        is_whole = builder.icmp_signed("==", self.some, _constant(AT_ONCE))
        with builder.if_else(is_whole) as (whole, part):
            with whole:
                self._emit(self.every, WINDOWS)
            with part:
                self._emit(Lanes(builder, self.some), 1)

    def _emit(self, lanes: Lanes, registers: int) -> None:
        builder, kind, corners = self.builder, self.numbers["zero"].type, self.corners
        xs, vs = ([self._variables(4, kind) for _ in range(registers)] for _ in range(2))
        sums = self._variables(registers, kind)
        step, in_group, put = self._variables(3, _WHOLE)
        places = [
            [builder.add(builder.add(self.start, _constant(r * LANES)), corner) for corner in corners]
            for r in range(registers)
        ]
        for r in range(registers):
            builder.store(self.numbers["zero"], sums[r])
            for v in vs[r]:
                builder.store(self.numbers.get("rest", self.numbers["zero"]), v)
        with builder.if_then(self.has["v0"]):
            for r in range(registers):
                for v, at in zip(vs[r], places[r], strict=True):
                    builder.store(lanes.load(self.read["v0"], at), v)
        for variable, value in ((step, _constant(0)), (in_group, _constant(0)), (put, self.put)):
            builder.store(value, variable)
        with cgutils.for_range(builder, self.drives) as drive:
            self._load(lanes, xs, places, drive.index)
            with cgutils.for_range(builder, builder.load(builder.gep(self.read["lengths"], [drive.index]))):
                self._step(xs, vs, sums, builder.load(step))
                builder.store(builder.add(builder.load(step), _constant(1)), step)
                builder.store(builder.add(builder.load(in_group), _constant(1)), in_group)
                ends = builder.icmp_signed("==", builder.load(in_group), self.group)
                ends = builder.or_(ends, builder.icmp_signed("==", builder.load(step), self.steps))
                with builder.if_then(ends):
                    for r, total in enumerate(sums):
                        lanes.store(builder.load(total), self.out, builder.add(builder.load(put), _constant(r * LANES)))
                        builder.store(self.numbers["zero"], total)
                    builder.store(_constant(0), in_group)
                    builder.store(builder.add(builder.load(put), self.emitted), put)
        # Corners that a map does not have are others once more, with the same numbers.
        for r in range(registers):
            for v, at in zip(vs[r], places[r], strict=True):
                lanes.store(builder.load(v), self.last, at)

    def _load(self, lanes: Lanes, xs: Any, places: Any, drive: Any) -> None:
        """The drives of a group of steps."""
        builder, numbers = self.builder, self.numbers
        frame = builder.mul(drive, self.size)
        for of_register, there in zip(xs, places, strict=True):
            for x, at in zip(of_register, there, strict=True):
                builder.store(lanes.load(self.read["y"], builder.add(frame, at)), x)
        with builder.if_then(self.has["scale"]):
            for r, of_register in enumerate(xs):
                at = builder.add(self.channel, _constant(r * LANES))
                factor, more = (lanes.load(self.read[name], at) for name in ("scale", "shift"))
                for x in of_register:
                    builder.store(builder.fadd(builder.fmul(builder.load(x), factor), more), x)
        if self.mode == AS_MERGED:
            for i, name in enumerate(("decay", "gain")):
                at = builder.add(builder.mul(drive, _constant(2)), _constant(i))
                numbers[name] = self.every.spread(builder.load(builder.gep(self.read["linear"], [at])))

    def _step(self, xs: Any, vs: Any, sums: Any, step: Any) -> None:
        builder, numbers = self.builder, self.numbers
        weight = cgutils.alloca_once_value(builder, self.one)  # type: ignore[no-untyped-call]
        with builder.if_then(self.has["weights"]):
            builder.store(builder.load(builder.gep(self.read["weights"], [step])), weight)
        w = self.every.spread(builder.load(weight))
        for r, total in enumerate(sums):
            fired = []
            for x, v in zip(xs[r], vs[r], strict=True):
                h = charge(builder, builder.load(x), builder.load(v), self.mode, numbers)
                fired.append(builder.fcmp_ordered(">=", h, numbers["threshold"]))
                builder.store(reset(builder, h, fired[-1], numbers), v)
            here, right, lower, across = (builder.bitcast(bits, _BITS) for bits in fired)
            either = builder.or_(lower, across)
            note = builder.add(builder.mul(step, _constant(NOTES)), _constant(2 * r))
            above, above_left = self._exchange(0, note, (either, across))
            left, before = self._exchange(1, note, (builder.or_(right, across), above_left))
            bits = here
            for more in right, either, above, left, before:
                bits = builder.or_(bits, more)
            so_far = builder.load(total)
            fires = builder.bitcast(bits, fired[0].type)
            builder.store(builder.select(fires, builder.fadd(so_far, w), so_far), total)

    def _exchange(self, which: int, note: Any, bits: Any) -> list[Any]:
        """The two notes that stood there, for which these are put."""
        builder, (notes, first) = self.builder, self.notes[which]
        before: list[Any] = []
        for i, new in enumerate(bits):
            place = builder.gep(notes, [builder.add(builder.add(first, note), _constant(i))])
            before.append(builder.load(place))
            builder.store(new, place)
        return before


@intrinsic
def _cell(_typing, inputs, at, outputs, notes, channels, steps, neuron):
    def codegen(context, builder, signature, values):
        _Emitter(context, builder, signature.args, values).emit()
        return context.get_dummy_value()

    return types.void(inputs, at, outputs, notes, channels, steps, neuron), codegen


def stepped_cell(inputs: Any, at: Any, outputs: Any, notes: Any, channels: Any, steps: Any, neuron: Any) -> None:
    """All steps of a cell's neurons of some channels, and what its window puts out.

    Args:
        inputs, outputs, neuron: as ``forward``'s.
        at: where in a frame the first neuron is, from there to its right and its lower one, 0 where the map ends, and where
            the window's first number is in the output's.
        notes: what the cells of the row above have fired, and what those to the left have; and where these channels' begin.
            Of each step and register: of the lower row, and of its last corner; of the right column, and of the last corner
            above that.
        channels: the first one, and how many: ``AT_ONCE``, or no more than a register has.
        steps: numbers of a frame, before and behind the pool, and steps in all.
    """
    (start, right, below, place), (above, beside, first_above, first_beside) = at, notes
    (channel, some), (size, emitted, last_step), (out, v_out) = channels, steps, outputs
    mode, corners = type(neuron).as_type, (0, right, below, right + below)
    for j in range(int(some)):
        bit = BITS(1 << j % LANES)
        vs = [widened(inputs.v0[start + c + j]) if inputs.v0.size else resting(neuron.rest, neuron.zero) for c in corners]
        total, t, put = neuron.zero, 0, place + j
        for g in range(inputs.lengths.size):
            xs = [widened(inputs.y[g * size + start + c + j]) for c in corners]
            if inputs.scale.size:
                xs = [x * inputs.scale[channel + j] + inputs.shift[channel + j] for x in xs]
            for _ in range(inputs.lengths[g]):
                hs = [charged(x, v, mode, neuron.tau, neuron.rest, *inputs.linear[g]) for x, v in zip(xs, vs, strict=True)]
                here, to_right, lower, across = (bool(h >= neuron.threshold) for h in hs)
                vs = [after(h, neuron.threshold, neuron.low, neuron.high) for h in hs]
                note = t * NOTES + j // LANES * 2
                new: list[bool] = [lower or across, across]
                before: list[bool] = []
                for some_notes, first in ((above, first_above), (beside, first_beside)):
                    old = [bool(some_notes[first + note + i] & bit) for i in range(2)]
                    for i, fired in enumerate(new):
                        known = some_notes[first + note + i] & ~bit
                        some_notes[first + note + i] = known | bit if fired else known
                    new, before = [to_right or across, old[1]], [*before, *old]
                # The last corner above belongs to the window to come.
                if here or to_right or lower or across or before[0] or before[2] or before[3]:
                    total = total + (inputs.weights[t] if inputs.weights.size else neuron.one)
                t += 1
                if t % inputs.group == 0 or t == last_step:
                    out[put] = narrowed(total, out)
                    total, put = neuron.zero, put + emitted
        for c, v in zip(corners, vs, strict=True):
            v_out[start + c + j] = v


@by_type(stepped_cell)
def _stepped_cell(inputs, at, outputs, notes, channels, steps, neuron):
    return lambda inputs, at, outputs, notes, channels, steps, neuron: _cell(  # type: ignore[call-arg]
        inputs, at, outputs, notes, channels, steps, neuron
    )


@lean()
def _sheet(sheet, inputs, neuron, layout, outputs, above, beside):
    """All cells of a sheet, row by row."""
    steps = 0
    for g in range(inputs.lengths.size):
        steps += inputs.lengths[g]
    (rows, columns), (sample, first, many) = cells(layout), locate(sheet, layout)
    height, width, channels = layout.height, layout.width, layout.channels
    sizes = outputs.v.size, outputs.out.size // (-(-steps // inputs.group)), steps
    above[:] = 0
    for o in range(rows):
        below = width * channels if 2 * o + 1 < height else 0
        beside[:] = 0
        note = 0
        for q in range(columns):
            right = channels if 2 * q + 1 < width else 0
            start, put = (
                ((sample * height + 2 * o) * width + 2 * q) * channels,
                ((sample * rows + o) * columns + q) * channels,
            )
            channel, left, of_channels = first, many, 0
            while left:
                some = AT_ONCE if left >= AT_ONCE else min(left, LANES)
                at = start + channel, right, below, put + channel
                notes = above, beside, note, of_channels
                stepped_cell(inputs, at, outputs, notes, (channel, some), sizes, neuron)
                channel, left = channel + some, left - some
                note, of_channels = note + steps * NOTES, of_channels + steps * NOTES


@kernel
def forward(begin, end, inputs, neuron, layout, outputs):
    """All steps of the sheets ``begin`` to ``end``, as frames or as weighted sums of ``group`` steps.

    Args:
        inputs, neuron, layout, outputs: Inputs, without a residual, one of ``NEURONS_OF_TILES``, Sheets and Outputs (see
            arguments.py).
    """
    steps = 0
    for g in range(inputs.lengths.size):
        steps += inputs.lengths[g]
    _, columns = cells(layout)
    # Of whole registers, and of what is left over, one by one.
    most = steps * NOTES * (layout.block // AT_ONCE + WINDOWS)
    above, beside = np.empty(columns * most, BITS), np.empty(most, BITS)
    for sheet in range(begin, end):
        _sheet(sheet, inputs, neuron, layout, outputs, above, beside)
