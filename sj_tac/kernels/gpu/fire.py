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
    """One call: shapes, layout and numbers that forward and backward share. Operands as checked.

    Attributes:
        shared: bytes of shared memory that a block of the program with the steps takes.
    """

    shared = 0

    def __init__(self, o: Operands) -> None:
        y, lengths, pool, window = o.y, o.lengths, o.pool, o.window
        self.groups, self.n, self.c, self.height, self.width = y.shape
        out_size = pooled_size(self.height, self.width, pool, window)
        # Maps of one pixel lie in memory as channels_last does: by its kernels, whose threads go along the channels.
        self.device, self.format = y.device, is_channels_last(y)
        self.last = self.format or (self.height == self.width == 1 and out_size == (1, 1))
        self.y = self.drives(y)
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

    def drives(self, y: Tensor) -> Tensor:
        """The drives as the kernels read them."""
        return cuda.dense(y, self.last, y.dtype)

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

    def masks(self, launch: cuda.Launcher, v: Tensor) -> Tensor:
        """All spikes as bits, [T / 32, frame], of all neurons; the last voltages into v."""
        bits = torch.empty(self.words, self.frame, dtype=torch.int32, device=self.device)
        self._steps(launch, False, bits, v)
        return bits

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

    def _steps(self, launch: cuda.Launcher, windows: bool, out: Tensor, v: Tensor) -> None:
        program, blocks = self.stepping(windows, out, v)
        neuron = (self.scale, self.shift, self.v0, self.linear, self.rate, self.weights)
        launch(cuda.Launch(program, blocks, (self.y, self.residual, *neuron, out, v, self.call), 0, self.device))

    def memory(self) -> tuple[Tensor, Tensor]:
        """Room for the output and the last voltages."""
        return empty(self.y, self.out_shape, self.format), self._voltages()

    def forward(self, launch: cuda.Launcher) -> tuple[Tensor, Tensor]:
        """Output and last voltages."""
        out, v = self.memory()
        if self.general:
            bits, (program, blocks) = self.masks(launch, v), self.pooling()
            launch(cuda.Launch(program, blocks, (bits, self.weights, out, self.call), 0, self.device))
        else:
            self._steps(launch, self.windows, out, v)
        return out, v

    def _voltages(self) -> Tensor:
        return empty(self.y, list(self.y.shape[1:]), self.format, torch.float32)

    def backward(
        self, launch: cuda.Launcher, go: Tensor, gv: Tensor | None, need_linear: bool, need_weights: bool
    ) -> tuple[Tensor, ...]:
        """Gradients to y, residual, scale and shift, v0, linear and weights; empty where there is none or none is wanted."""
        y, device = self.y, self.device
        go, gv = cuda.dense(go, self.last, y.dtype), None if gv is None else cuda.dense(gv, self.last, torch.float32)
        gy = empty(y, list(y.shape), self.format)
        g_residual = None if self.residual is None else empty(y, list(self.residual.shape), self.format)
        gv0 = None if self.v0 is None else self._voltages()
        bits, g_weights, need_weights = None, None, need_weights and self.group > 0
        if self.general:
            bits = self.masks(launch, self._voltages())
            g_weights = self._pooled_weights(launch, bits, go) if need_weights else None
        tally = (2 * self.groups if need_linear else 0) + (self.steps if need_weights and not self.general else 0)
        grid = self._grid(tally, (y, self.residual, self.v0, gy, g_residual, gv, go, gv0))
        macros = self.neuron_macros(self.windows, grid.width, grid.segment) | {
            "SURROGATE": self.surrogate, "BLOCK": grid.block, "LANES": grid.lanes, "GROUPS_OF_SEGMENT": grid.segment,
            "SEGMENTS": -(-self.groups // grid.segment), "RESIDENT": cuda.RESIDENT, "POOLED": self.general,
            "REST0": self.rests_at_zero, "DETACH": self.detach, "LINEAR": self.linear is not None,
            "LINEAR_SUMS": need_linear, "WEIGHT_SUMS": need_weights and not self.general,
        }  # fmt: skip
        if self.general:
            reach = -(-self.window[0] // self.window[2]) * -(-self.window[1] // self.window[3])
            macros |= self.pool_macros() | {"REACH": reach}

        def partial(wanted: bool, *shape: int) -> Tensor | None:
            return torch.empty(shape, dtype=torch.float32, device=device) if wanted else None

        affine = self.scale is not None
        # By part of the map and channel, or by sample, channel and part.
        shape = (grid.parts, self.c) if self.last else (self.n, self.c, grid.parts)
        by_scale, by_shift = partial(affine, *shape), partial(affine, *shape)
        by_linear = partial(need_linear, grid.blocks, 2 * self.groups)
        by_weight = partial(need_weights and not self.general, grid.blocks, self.steps)
        scratch, shared = cuda.tally(grid.block, tally, grid.blocks, device)
        at = cuda.tensors(
            go=go, y=y, y_again=y, residual=self.residual, gv=gv, scale=self.scale, shift=self.shift, v0=self.v0,
            linear=self.linear, rate=self.rate, weights=self.weights, masks=bits, gy=gy, g_residual=g_residual, gv0=gv0,
            sums_scale=by_scale, sums_shift=by_shift, sums_linear=by_linear, sums_weights=by_weight, scratch=scratch,
        )  # fmt: skip
        name = "fire_backward_pooled" if self.general else "fire_backward"
        arguments = (at, self.call, np.int32(grid.rounds), np.int32(grid.parts))
        launch(cuda.Launch(cuda.program(name, **macros), grid.blocks, arguments, shared, device))
        over = (0,) if self.last else (0, 2)
        g_scale, g_shift = (None if x is None else x.sum(over) for x in (by_scale, by_shift))
        g_linear = None if by_linear is None else by_linear.sum(0).view(-1, 2)
        if by_weight is not None:
            g_weights = by_weight.sum(0)
        found = (g_residual, g_scale, g_shift, gv0, g_linear, g_weights)
        none = [y.new_empty(0, dtype=torch.float32) if x is None else x for x in found]
        if g_residual is None:
            none[0] = y.new_empty(0)
        return gy, *none

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

    def _pooled_weights(self, launch: cuda.Launcher, bits: Tensor, go: Tensor) -> Tensor | None:
        """Gradient to the weights behind a general pool."""
        if not self.group:
            return None
        block = 128
        while block > 32 and self.steps * block * 4 > cuda.SHARED:
            block //= 2
        rounds = max(1, min(8, -(-self.emitted // block)))
        blocks = -(-self.emitted // (block * rounds))
        partial = torch.empty(blocks, self.steps, dtype=torch.float32, device=self.device)
        program = cuda.program("fire_pool_weights", BLOCK=block, WIDTH_V=1, **self.common, **self.pool_macros())
        scratch, shared = cuda.tally(block, self.steps, blocks, self.device)
        arguments = (bits, go, partial, scratch, self.call, np.int32(rounds))
        launch(cuda.Launch(program, blocks, arguments, shared, self.device))
        return partial.sum(0)
