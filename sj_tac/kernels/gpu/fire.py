"""``fire`` on a CUDA device: which programs run, on what grids. The kernels' story is in src/*.cu."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sj_tac.kernels.gpu import program as cuda
from sj_tac.kernels.layout import empty, is_channels_last
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import AVG_POOL, pooled_size


class Grid(NamedTuple):
    """How a backward lies over the device.

    Attributes:
        width: slots of a thread. segment: drives, of whose steps it keeps voltages in registers. block: threads; lanes: of
            them, side by side along the channels, or planes in a block. rounds: turns of a thread. parts: blocks of one map.
    """

    width: int
    segment: int
    block: int
    lanes: int
    rounds: int
    parts: int
    blocks: int


class Fire:
    """One call: shapes, layout and numbers that forward and backward share. Operands as checked."""

    def __init__(self, o: Operands) -> None:
        y, lengths, pool, window = o.y, o.lengths, o.pool, o.window
        self.groups, self.n, self.c, self.height, self.width = y.shape
        out_size = pooled_size(self.height, self.width, pool, window)
        # Maps of one pixel lie in memory as channels_last does: by its kernels, whose threads go along the channels.
        self.device, self.format = y.device, is_channels_last(y)
        self.last = self.format or (self.height == self.width == 1 and out_size == (1, 1))
        self.y = cuda.dense(y, self.last, y.dtype)
        self.residual = None if o.residual is None else cuda.dense(o.residual, self.last, y.dtype)
        self.k, self.steps = max(lengths), sum(lengths)
        self.v0 = None if o.v0 is None else cuda.dense(o.v0, self.last, torch.float32)
        self.scale, self.shift, self.linear, self.rate = (cuda.vector(x) for x in (o.scale, o.shift, o.linear, o.q))
        self.weights, self.group = cuda.vector(o.weights), o.group if o.weights is not None else 0
        self.mode, self.surrogate, self.detach, self.pool, self.window = o.mode, o.surrogate, o.detach, pool, tuple(window)
        even = self.height % 2 == 0 and self.width % 2 == 0
        self.windows = bool(pool) and self.window == (2, 2, 2, 2, 0, 0) and even
        self.general = bool(pool) and not self.windows
        self.hard, self.rests_at_zero = o.hard, o.rest == 0 and math.copysign(1.0, o.rest) > 0
        if any(length != self.k for length in lengths[:-1]):
            raise ValueError(f"the CUDA kernels of fire take as many steps on each drive, fewer on the last; got {lengths}")
        self.frame = self.n * self.c * self.height * self.width
        self.out_shape = [-(-self.steps // o.group) if o.weights is not None else self.steps, self.n, self.c, *out_size]
        self.emitted = self.n * self.c * out_size[0] * out_size[1]
        self.words = -(-self.steps // 32)
        pixels = self.height * self.width
        self.call = np.array(
            (o.tau, o.decay, o.gain, o.rest, o.threshold, o.alpha, o.threshold, self.groups, self.steps, self.width, self.c,
             pixels, self.frame, self.emitted),
            cuda.CALL,
        )  # fmt: skip
        wide = cuda.needs_wide(self.steps * self.frame, self.out_shape[0] * self.emitted, self.words * self.frame)
        self.common = {"IO": cuda.IO[y.dtype], "WIDE": wide, "LAST": self.last, "GROUP": self.group}

    def run_length(self, windows: bool) -> int:
        """Slots of one channel, or of neighbouring channels, side by side in memory."""
        if self.last:
            return self.c
        return self.width // 2 if windows else self.height * self.width

    def neuron_macros(self, windows: bool, width: int, groups_at_once: int = 1) -> dict[str, int | bool]:
        """What the programs with a neuron in them are specialised by; WHOLE: no last drive or group of drives is shorter."""
        whole = self.steps == self.groups * self.k and self.groups % groups_at_once == 0
        return self.common | {
            "MODE": self.mode, "HARD": self.hard, "AFFINE": self.scale is not None, "WINDOWS": windows, "WIDTH_V": width,
            "K": self.k, "MEAN": windows and self.pool == AVG_POOL, "RESIDUAL": self.residual is not None, "WHOLE": whole,
        }  # fmt: skip

    def pool_macros(self) -> dict[str, int | bool]:
        """What the programs with a general pool in them are specialised by."""
        names = ("KH", "KW", "SH", "SW", "PH", "PW")
        return dict(zip(names, self.window, strict=True)) | {"MEAN": self.pool == AVG_POOL, "WORDS": self.words}

    def stepping(self, windows: bool, out: Tensor, v: Tensor) -> tuple[cuda.Program, int]:
        """The program that takes the steps, into outputs, or bits, and voltages as these; and its blocks."""
        masks, slots = out.dtype == torch.int32, self.frame // (4 if windows else 1)
        half = self.y.element_size() == 2
        limit = (4 if self.last or half else 2) if windows else (8 if half else 4)
        if masks:
            limit = 4
        frames = (self.y, self.residual, self.v0, v, out)
        width = cuda.widest(limit, self.run_length(windows), slots, *frames, pairs=windows and not self.last)
        macros = self.neuron_macros(windows, width) | {"MASKS": masks, "BLOCK": 256, "REST0": self.rests_at_zero}
        if masks:
            macros["GROUP"] = 0  # bits are the same whatever is summed of them later
        return cuda.program("fire_forward", **macros), -(-slots // (width * 256))

    def pooling(self) -> tuple[cuda.Program, int]:
        """The program that pools bits, and its blocks."""
        return cuda.program("fire_pool", BLOCK=256, WIDTH_V=1, **self.common, **self.pool_macros()), -(-self.emitted // 256)

    def memory(self) -> tuple[Tensor, Tensor]:
        """Room for the output and the last voltages."""
        v = empty(self.y, list(self.y.shape[1:]), self.format, torch.float32)
        return empty(self.y, self.out_shape, self.format), v

    def walking_back(self, need_linear: bool, need_weights: bool) -> tuple[cuda.Program, Grid, int]:
        """The backward's program, how it lies over the device, and how many sums each of its threads keeps."""
        need_weights = need_weights and not self.general
        tally = (2 * self.groups if need_linear else 0) + (self.steps if need_weights else 0)
        grid = self._grid(tally, (self.y, self.residual, self.v0))
        macros = self.neuron_macros(self.windows, grid.width, grid.segment) | {
            "SURROGATE": self.surrogate, "BLOCK": grid.block, "LANES": grid.lanes, "GROUPS_OF_SEGMENT": grid.segment,
            "SEGMENTS": -(-self.groups // grid.segment), "RESIDENT": cuda.RESIDENT, "POOLED": self.general,
            "REST0": self.rests_at_zero, "DETACH": self.detach, "LINEAR": self.linear is not None,
            "LINEAR_SUMS": need_linear, "WEIGHT_SUMS": need_weights,
        }  # fmt: skip
        if self.general:
            reach = -(-self.window[0] // self.window[2]) * -(-self.window[1] // self.window[3])
            macros |= self.pool_macros() | {"REACH": reach}
        name = "fire_backward_pooled" if self.general else "fire_backward"
        return cuda.program(name, **macros), grid, tally

    def _grid(self, tally: int, frames: tuple[Tensor | None, ...]) -> Grid:
        """How the backward's threads lie over the slots; tally: how many sums each keeps."""
        width, corners = 1, 4 if self.windows else 1
        if not self.general and not self.windows:
            width = cuda.widest(4, self.run_length(False), self.frame, *frames)
        segment = cuda.segment(width * corners, self.k, self.groups)
        units = self.frame // corners // self.c if self.last else self.height * self.width // corners // width
        block = 128
        while block > 32 and tally * block * 4 > cuda.SHARED:
            block //= 2
        # Along the channels, or whole planes, where a plane is smaller than a block.
        along = min(block, max(32, 128 // (width * self.y.element_size())))  # whole lines of memory
        lanes = cuda.power(self.c // width, along) if self.last else block // cuda.power(units, block)
        rows = block // lanes
        rounds = min(8, -(-units // rows))
        parts = -(-units // (rows * rounds))
        outer = -(-(self.c // width if self.last else self.n * self.c) // lanes)
        return Grid(width, segment, block, lanes, rounds, parts, outer * parts)

    def weighing(self) -> tuple[cuda.Program, int, int]:
        """The program that sums the gradient to the weights behind a general pool, its blocks, and turns of a thread."""
        block = 128
        while block > 32 and self.steps * block * 4 > cuda.SHARED:
            block //= 2
        rounds = max(1, min(8, -(-self.emitted // block)))
        program = cuda.program("fire_pool_weights", BLOCK=block, WIDTH_V=1, **self.common, **self.pool_macros())
        return program, -(-self.emitted // (block * rounds)), rounds
