"""``fire`` on a CUDA device: which programs run, on what grids. The kernels' story is in src/*.cu."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sj_tac.kernels.gpu import program as cuda
from sj_tac.kernels.layout import empty, is_channels_last
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.pools import AVG_POOL, MAX_POOL, pooled_size


class Fire:
    """One call: shapes, layout and numbers that forward and backward share. Operands as checked.

    The backward takes no residual: its gradient has one frame a step anyway (see spread.py).
    """

    def __init__(self, o: Operands) -> None:
        y, lengths, pool, window = o.y, o.lengths, o.pool, o.window
        self.device, self.last = y.device, is_channels_last(y)
        self.y = cuda.dense(y, self.last, y.dtype)
        self.residual = None if o.residual is None else cuda.dense(o.residual, self.last, y.dtype)
        self.groups, self.n, self.c, self.height, self.width = y.shape
        self.k, self.steps = max(lengths), sum(lengths)
        self.v0 = None if o.v0 is None else cuda.dense(o.v0, self.last, torch.float32)
        self.scale, self.shift, self.linear, self.rate = (cuda.vector(x) for x in (o.scale, o.shift, o.linear, o.q))
        self.weights, self.group = cuda.vector(o.weights), o.group if o.weights is not None else 0
        self.mode, self.surrogate, self.pool, self.window = o.mode, o.surrogate, pool, tuple(window)
        even = self.height % 2 == 0 and self.width % 2 == 0
        self.windows = pool == MAX_POOL and self.window == (2, 2, 2, 2, 0, 0) and even
        self.general = bool(pool) and not self.windows
        self.hard = o.hard
        self.frame = self.n * self.c * self.height * self.width
        out_size = pooled_size(self.height, self.width, pool, window)
        self.out_shape = [-(-self.steps // o.group) if o.weights is not None else self.steps, self.n, self.c, *out_size]
        self.emitted = self.n * self.c * out_size[0] * out_size[1]
        self.words = -(-self.steps // 32)
        pixels = self.height * self.width
        self.call = np.array(
            (o.tau, o.decay, o.gain, o.rest, o.threshold, o.alpha, self.groups, self.steps, o.detach, self.width, self.c,
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

    def neuron_macros(self, windows: bool, width: int) -> dict[str, int | bool]:
        """What the programs with a neuron in them are specialised by."""
        return self.common | {
            "MODE": self.mode, "HARD": self.hard, "AFFINE": self.scale is not None, "WINDOWS": windows, "WIDTH_V": width,
            "K": self.k,
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

    def _steps(self, launch: cuda.Launcher, windows: bool, out: Tensor, v: Tensor) -> None:
        masks, slots = out.dtype == torch.int32, self.frame // (4 if windows else 1)
        half = self.y.element_size() == 2
        limit = (4 if self.last or half else 2) if windows else (8 if half else 4)
        if masks:
            limit = 4
        frames = (self.y, self.residual, self.v0, v, out)
        width = cuda.widest(limit, self.run_length(windows), slots, *frames, pairs=windows and not self.last)
        macros = self.neuron_macros(windows, width) | {"MASKS": masks, "BLOCK": 256, "RESIDUAL": self.residual is not None}
        blocks = -(-slots // (width * 256))
        neuron = (self.scale, self.shift, self.v0, self.linear, self.rate, self.weights)
        arguments = (self.y, self.residual, *neuron, out, v, self.call)
        launch(cuda.Launch(cuda.program("fire_forward", **macros), blocks, arguments, 0, self.device))

    def forward(self, launch: cuda.Launcher) -> tuple[Tensor, Tensor]:
        """Output and last voltages."""
        out = empty(self.y, self.out_shape, self.last)
        v = empty(self.y, list(self.y.shape[1:]), self.last, torch.float32)
        if self.general:
            bits = self.masks(launch, v)
            program = cuda.program("fire_pool", BLOCK=256, WIDTH_V=1, **self.common, **self.pool_macros())
            arguments = (bits, self.weights, out, self.call)
            launch(cuda.Launch(program, -(-self.emitted // 256), arguments, 0, self.device))
        else:
            self._steps(launch, self.windows, out, v)
        return out, v

    def backward(
        self, launch: cuda.Launcher, go: Tensor, gv: Tensor, need_linear: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients to y, scale and shift (both [C], without meaning where there are none), v0, linear and weights."""
        y, device = self.y, self.device
        go, gv = cuda.dense(go, self.last, y.dtype), cuda.dense(gv, self.last, torch.float32)
        gy = empty(y, list(y.shape), self.last)
        gv0 = None if self.v0 is None else empty(y, list(y.shape[1:]), self.last, torch.float32)
        bits, g_weights = None, None
        if self.general:
            bits = self.masks(launch, empty(y, list(y.shape[1:]), self.last, torch.float32))
            g_weights = self._pooled_weights(launch, bits, go)
        corners = 4 if self.windows else 1
        width = 1
        if not self.general and not self.windows:
            width = cuda.widest(4, self.run_length(False), self.frame, y, self.v0, gy, gv, go, gv0)
        sums = (2 * self.groups if need_linear else 0) + (self.steps if self.group and not self.general else 0)
        units = self.frame // corners // self.c if self.last else self.height * self.width // corners // width
        block = 128 if self.last else max(32, cuda.power(units, 128))
        while block > 32 and sums * block * 4 > cuda.SHARED:
            block //= 2
        lanes = cuda.power(self.c // width, 32) if self.last else 1
        rows = block // lanes
        rounds = min(8, -(-units // rows))
        parts = -(-units // (rows * rounds))
        outer = -(-(self.c // width) // lanes) if self.last else self.n * self.c
        blocks = outer * parts
        gps = max(1, 16 // self.k)
        macros = self.neuron_macros(self.windows, width) | {
            "SURROGATE": self.surrogate, "BLOCK": block, "LANES": lanes, "SEGMENTS": -(-self.groups // gps),
            "POOLED": self.general,
        }  # fmt: skip
        if self.general:
            reach = -(-self.window[0] // self.window[2]) * -(-self.window[1] // self.window[3])
            macros |= self.pool_macros() | {"REACH": reach}

        def partial(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        channels = partial(2, parts, self.c) if self.last else partial(2, blocks, width)
        by_linear = partial(blocks, 2 * self.groups) if need_linear else None
        by_weight = partial(blocks, self.steps) if self.group and not self.general else None
        scratch, shared = cuda.tally(block, sums, blocks, device)
        at = cuda.tensors(
            go=go, y=y, gv=gv, scale=self.scale, shift=self.shift, v0=self.v0, linear=self.linear, rate=self.rate,
            weights=self.weights, masks=bits, gy=gy, gv0=gv0, sums_scale=channels[0], sums_shift=channels[1],
            sums_linear=by_linear, sums_weights=by_weight, scratch=scratch,
        )  # fmt: skip
        name = "fire_backward_pooled" if self.general else "fire_backward"
        arguments = (at, self.call, np.int32(rounds), np.int32(parts))
        launch(cuda.Launch(cuda.program(name, **macros), blocks, arguments, shared, device))
        if self.last:
            g_scale, g_shift = channels.sum(1).unbind()
        else:
            g_scale, g_shift = channels.view(2, self.n, self.c, parts * width).sum((1, 3)).unbind()
        if by_weight is not None:
            g_weights = by_weight.sum(0)
        return gy, g_scale, g_shift, gv0, None if by_linear is None else by_linear.sum(0).view(-1, 2), g_weights

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
