"""``fire`` and its backward on the CPU: which compiled kernel runs, and what it is called with."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sj_tac.host.neurons import ChargeMode
from sj_tac.kernels.checks import WIDE, emitted_shape
from sj_tac.kernels.cpu import (
    backward as tile_backward,
    costs,
    forward as tile_forward,
    overlaps as sheet_forward,
    overlaps_backward as sheet_backward,
    overlaps_last as cell_forward,
    planes as plane_kernels,
    surrogate,
)
from sj_tac.kernels.cpu.arguments import (
    NEURONS_OF_TILES,
    Arriving,
    Gradients,
    Inputs,
    Neuron,
    Neurons,
    OddWindows,
    Outputs,
    Pool,
    Sheets,
    Slopes,
    Windows,
)
from sj_tac.kernels.cpu.threads import flat, frames_or_none, share, vector
from sj_tac.kernels.layout import empty, is_channels_last
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import in_registers, in_tiles, overlap
from sj_tac.kernels.spread import spread

# Channels that the kernels of 3x3 windows take at a time in channels_last, forward and backward, where a whole map's
# voltages of all steps are kept: fewer channels, but no less than 8, where they are more numbers than that.
BLOCK, BACKWARD_BLOCK, KEPT = 64, 32, 2**21


@lru_cache(maxsize=256)
def _neuron(mode: int, tau: float, rest: float, threshold: float, hard: bool, dtype: torch.dtype) -> Neuron:
    kind: Any = np.float64 if dtype == torch.float64 else np.float32
    low, high = (rest, rest) if hard else (-math.inf, math.inf)
    return Neuron(int(mode), *(kind(v) for v in (tau, rest, threshold, low, high, 1.0, 0.0)))


def _neuron_of(o: Operands) -> Neuron:
    tau = o.tau if o.q is None else float(o.q)
    return _neuron(o.mode, tau, o.rest, o.threshold, o.hard, o.y.dtype)


def neuron_of_tiles(o: Operands) -> Neuron:
    """The neuron for the tile kernels' forward: one that resets hard to 0, as most do, has a type of its own."""
    neuron = _neuron_of(o)
    plain = o.hard and o.mode != ChargeMode.MERGED and o.rest == 0 and math.copysign(1.0, o.rest) > 0
    none: Any = None
    of_tiles: Neuron = NEURONS_OF_TILES[neuron.mode](*(neuron._replace(rest=none, high=none) if plain else neuron))
    return of_tiles


def _slopes(o: Operands) -> Slopes:
    """The neuron, and how the voltage behind the reset depends on h and, with the reset in the graph, on the spike."""
    neuron = _neuron_of(o)
    kind = type(neuron.one)
    resets = (0.0, o.rest, -1.0) if o.hard else (1.0, -o.threshold, 0.0)
    keep, rest_gain, h_gain = (resets[0], 0.0, 0.0) if o.detach else resets
    numbers = surrogate.numbers(o.alpha, kind)
    return Slopes(*neuron, kind(keep), kind(rest_gain), kind(h_gain), o.surrogate, *numbers)


def _linear(o: Operands) -> np.ndarray:
    """beta and gamma on each drive, [G, 2]."""
    return vector(o.linear, o.y) if o.linear is not None else _same_on_all(o.y.shape[0], o.decay, o.gain, o.y.dtype)


@lru_cache(maxsize=256)
def _same_on_all(drives: int, decay: float, gain: float, dtype: torch.dtype) -> np.ndarray:
    kind = np.float64 if dtype == torch.float64 else np.float32
    return np.full((drives, 2), (decay, gain), kind)


@lru_cache(maxsize=256)
def _steps_of(lengths: tuple[int, ...]) -> np.ndarray:
    return np.array(lengths)


def _planes(x: Tensor | None, planes: int, like: Tensor) -> np.ndarray:
    """[..., N, C, H, W] as an array [..., N*C, H*W]."""
    if x is None:
        return np.empty((0, 0), vector(None, like).dtype)
    array: np.ndarray = x.detach().contiguous().view(*x.shape[:-4], planes, -1).numpy()
    return array


def _tiles(o: Operands, last: bool) -> tuple[int, Neurons | Windows | OddWindows]:
    """How many slots a frame has, and how they lie."""
    _, n, c, height, width = o.y.shape
    if not o.pool:
        return n * c * height * width, Neurons(last, height, width, c)
    slots = n * c * -(-height // 2) * -(-width // 2)
    return slots, (OddWindows if height % 2 or width % 2 else Windows)(last, height, width, c)


def _sheets(o: Operands, last: bool, most: int) -> tuple[int, Sheets]:
    """How many sheets of 3x3 windows a frame has, and how they lie; at most so many channels each."""
    _, n, c, height, width = o.y.shape
    block = max(1, min(c, most)) if last else 1
    return n * -(-c // block), Sheets(last, height, width, c, block)


def _pool(o: Operands, out_width: int, kind: Any) -> Pool:
    kh, kw, sh, sw, ph, pw = o.window
    return Pool(o.pool, kh, kw, sh, sw, ph, pw, kind(kh * kw), o.y.shape[4], out_width)


def _fit(read: Inputs | Arriving, frame: int, channels: int, steps: int) -> None:
    """The sizes of what a kernel reads without looking: what check_fire has seen, once more in the arrays themselves."""
    drives, affine = read.lengths.size, read.scale.size
    fits = (
        read.y.size == drives * frame
        and read.linear.size == 2 * drives
        and affine == read.shift.size
        and affine in (0, channels)
        and read.v0.size in (0, frame)
        and read.weights.size in (0, steps)
    )
    assert fits, (frame, channels, steps, {name: np.shape(x) for name, x in read._asdict().items()})


def _wide(o: Operands, back: bool) -> Operands | None:
    """The call on float32 frames where the kernel that would run it, or its backward, does not read these; else None."""
    reads = in_registers(o.y, o.pool, o.window, o.residual) and not (back and overlap(o.pool, o.window))
    if o.y.dtype is WIDE[o.y.dtype] or reads:
        return None
    wide = WIDE[o.y.dtype]
    return o._replace(y=o.y.to(wide), residual=None if o.residual is None else o.residual.to(wide))


def forward(o: Operands) -> tuple[Tensor, Tensor]:
    """Output and voltages in the memory format of y, but contiguous where ``in_tiles`` is False."""
    if (wide := _wide(o, False)) is not None:
        found, voltages = forward(wide)
        return found.to(o.y.dtype), voltages
    tiled, sheets = in_tiles(o.pool, o.window), overlap(o.pool, o.window)
    last = tiled and is_channels_last(o.y)
    if o.residual is not None and (sheets or not tiled):
        o = spread(o)
    y = o.y
    out, v = empty(y, list(emitted_shape(o)), last), empty(y, list(y.shape[1:]), last, WIDE[y.dtype])
    frame, channels, steps = v.numel(), y.shape[2], sum(o.lengths)
    if not frame:
        return out, v
    neuron = _neuron_of(o)
    affine, shared = (vector(o.scale, y), vector(o.shift, y)), (_steps_of(tuple(o.lengths)), _linear(o))
    ws = vector(o.weights, y)
    if tiled:
        read = Inputs(
            flat(y, last, y), frames_or_none(o.residual, last, y), *affine, flat(o.v0, last, y), *shared, ws, o.group
        )  # fmt: skip
        _fit(read, frame, channels, steps)
        written = Outputs(flat(out, last, y), flat(v, last, y))
    if sheets:
        units, sheet = _sheets(o, last, BLOCK)
        run, of_sheets = (cell_forward.forward, neuron_of_tiles(o)) if last else (sheet_forward.forward, neuron)
        share(run, units, costs.forward(frame * steps, sheet), read, of_sheets, sheet, written)
    elif tiled:
        units, tile = _tiles(o, last)
        share(tile_forward.forward, units, costs.forward(frame * steps, tile), read, neuron_of_tiles(o), tile, written)
    else:
        planes = y.shape[1] * channels
        read = Inputs(_planes(y, planes, y), vector(None, y), *affine, _planes(o.v0, planes, y), *shared, ws, o.group)
        _fit(read, frame, channels, steps)
        written = Outputs(_planes(out, planes, y), _planes(v, planes, y))
        pool = _pool(o, out.shape[4], type(neuron.one))
        share(plane_kernels.forward, planes, costs.forward(frame * steps, None), read, neuron, pool, written)
    return out, v


def backward(go: Tensor, gv: Tensor, o: Operands, need_linear: bool) -> tuple[Tensor, ...]:
    """Gradients to y, scale, shift, v0, linear and weights; empty for what is None, zero for a linear that needs none."""
    if (whole := _wide(o, True)) is not None:
        gy, *others = backward(go.to(whole.y.dtype), gv, whole, need_linear)
        return gy.to(o.y.dtype), *others
    y, steps, wide = o.y, sum(o.lengths), WIDE[o.y.dtype]
    tiled, sheets = in_tiles(o.pool, o.window), overlap(o.pool, o.window)
    last = tiled and is_channels_last(y)
    gy = empty(y, list(y.shape), last)
    gv0 = y.new_empty(0, dtype=wide) if o.v0 is None else empty(y, list(y.shape[1:]), last, wide)
    n, c, height, width = y.shape[1:]
    frame = n * c * height * width
    slots, tile = _tiles(o, last)
    # A chunk is whole planes, or whole rows (of windows) of a sample: sums are taken chunk by chunk.
    at_once = 2 if o.pool else 1
    block = max(1, -(-width // at_once) * (c if last else -(-height // at_once)))
    chunk = block * max(1, 256 // block)
    chunks = -(-slots // chunk) if tiled else n * c
    if sheets:
        chunks, sheet = _sheets(o, last, min(BACKWARD_BLOCK, max(8, KEPT // (steps * height * width + 1))))
    sums = y.new_zeros(2, chunks * c if last and not sheets else n * c, dtype=wide)
    g_linear = y.new_zeros(chunks, len(o.lengths), 2, dtype=wide)
    g_weights = y.new_zeros(chunks, 0 if o.weights is None else steps, dtype=wide)
    partial = (sums[0].numpy(), sums[1].numpy(), g_linear.numpy(), g_weights.numpy(), need_linear)
    affine, shared = (vector(o.scale, y), vector(o.shift, y)), (_steps_of(tuple(o.lengths)), _linear(o))
    ws, slopes = vector(o.weights, y), _slopes(o)
    if not frame:
        pass
    elif tiled:
        read = Arriving(
            flat(go, last, y), flat(gv, last, y), flat(y, last, y), *affine, flat(o.v0, last, y), *shared, ws, o.group
        )  # fmt: skip
        _fit(read, frame, c, steps)
        written = Gradients(flat(gy, last, y), vector(None, y) if o.v0 is None else flat(gv0, last, y), *partial, chunk)
        if sheets:
            share(sheet_backward.backward, chunks, costs.backward(frame * steps, sheet), read, slopes, sheet, written)
        else:
            share(tile_backward.backward, chunks, costs.backward(frame * steps, tile), read, slopes, tile, written)
    else:
        read = Arriving(
            _planes(go, chunks, y), _planes(gv, chunks, y), _planes(y, chunks, y), *affine, _planes(o.v0, chunks, y),
            *shared, ws, o.group,
        )  # fmt: skip
        _fit(read, frame, c, steps)
        written = Gradients(_planes(gy, chunks, y), _planes(None if o.v0 is None else gv0, chunks, y), *partial, 1)
        pool = _pool(o, go.shape[4], type(slopes.one))
        share(plane_kernels.backward, chunks, costs.backward(frame * steps, None), read, slopes, pool, written)
    by_channel = sums.view(2, -1, c).sum(1) if c else sums
    none = y.new_empty(0, dtype=wide)
    return (
        gy,
        none if o.scale is None else by_channel[0].clone(),
        none.clone() if o.shift is None else by_channel[1].clone(),
        gv0,
        none.clone() if o.linear is None else g_linear.sum(0),
        g_weights.sum(0),
    )
