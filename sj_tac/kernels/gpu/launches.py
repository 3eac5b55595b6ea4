"""``fire`` on CUDA, prepared once for drives of one shape and one neuron: a call makes memory and launches.

Numbers in tensors are never looked at, because a look waits for the device: the sums' weights and a PLIF's w are read by the
kernel, from the tensors of each call. Launches are kept here, by all that they were made of: ``forward`` and ``backward``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from sj_tac.kernels.checks import check_fire, check_fire_backward, refuse_dtype
from sj_tac.kernels.fire_op import ON_CUDA
from sj_tac.kernels.gpu import launchers, program as cuda
from sj_tac.kernels.gpu.fire import Fire
from sj_tac.kernels.layout import RUNS, empty
from sj_tac.kernels.operands import Operands

# Bytes: no thread reads more at once, so that what begins at a multiple of it fits a vector of any width.
ALIGNED = 32


def _by_channel(x: Tensor | None) -> Tensor | None:
    """``program.vector``, which makes a view even where there is nothing to do."""
    return x if x is None or (x.dtype is torch.float32 and x.is_contiguous()) else cuda.vector(x)


def _lying(x: Tensor, stride: tuple[int, ...], last: bool) -> Tensor:
    """Frames as the kernels read them; a copy where they lie otherwise, or begin where no vector may."""
    if x.stride() != stride:
        x = cuda.dense(x, last, x.dtype)
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


def _added(call: Fire) -> tuple[int, ...] | None:
    """Strides of a residual, whose frames lie as drives do; None where there is none."""
    return None if call.residual is None else (call.frame, *call.y.stride()[1:])


class Launch:
    """The forward of ``fire`` for operands like those it was made of, by one launcher.

    Attributes:
        kernel: the launcher's name. shape: of the output.
    """

    # fmt: off
    __slots__ = (
        "added", "affine", "bits", "device", "dtype", "kernel", "last", "lies", "out", "pool", "rate", "shape", "steps", "v",
        "weights",
    )
    # fmt: on

    def __init__(self, o: Operands, kernel: str) -> None:
        """Raises ValueError where the operands do not fit each other, BackendError where the kernels cannot be had."""
        refuse_dtype("fire", o.y, ON_CUDA)
        check_fire(o)
        call = Fire(o)
        self.kernel, self.device, self.dtype, self.last = kernel, o.y.device, o.y.dtype, call.last
        out, v = call.memory()
        self.shape, self.out, self.v = tuple(out.shape), out.stride(), (tuple(v.shape), v.stride())
        self.lies = call.y.stride()
        self.added = _added(call)
        self.affine, self.rate = call.scale is not None, call.rate is not None
        self.weights = 0 if o.weights is None else call.steps
        self.bits, self.pool = None, None
        if call.general:
            self.bits = call.words, call.frame
            program, blocks = call.pooling()
            self.pool = launchers.prepared(kernel, cuda.Launch(program, blocks, (call.call,), 0, self.device))
            out = torch.empty(self.bits, dtype=torch.int32, device=self.device)
        program, blocks = call.stepping(call.windows, out, v)
        self.steps = launchers.prepared(kernel, cuda.Launch(program, blocks, (call.call,), 0, self.device))

    def __call__(
        self,
        y: Tensor,
        v0: Tensor | None,
        residual: Tensor | None,
        affine: tuple[Tensor | None, Tensor | None],
        weights: Tensor | None,
        numbers: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Return output and last voltages.

        Args:
            affine: scale and shift. weights: [T], in float32. numbers: beta and gamma of each drive's step [G, 2], and the
                sigmoid of a PLIF's w.
        """
        y = _lying(y, self.lies, self.last)
        if residual is not None and self.added is not None:
            residual = _lying(residual, self.added, self.last)
        # The kernel reads without looking.
        assert (residual is not None) == (self.added is not None)
        device, (v_shape, v_stride) = self.device, self.v
        out = torch.empty_strided(self.shape, self.out, dtype=self.dtype, device=device)
        v = torch.empty_strided(v_shape, v_stride, dtype=torch.float32, device=device)
        scale, shift = _by_channel(affine[0]), _by_channel(affine[1])
        if v0 is not None:
            v0 = _lying(v0, v_stride, self.last)
        assert (scale is not None, shift is not None, numbers[-1] is not None) == (self.affine, self.affine, self.rate)
        assert (0 if weights is None else weights.numel()) == self.weights
        assert weights is None or (weights.dtype is torch.float32 and weights.is_contiguous())
        at = [0 if x is None else x.data_ptr() for x in (y, residual, scale, shift, v0, *numbers, weights)]
        if self.pool is None or self.bits is None:
            self.steps(*at, out.data_ptr(), v.data_ptr())
        else:
            bits = torch.empty(self.bits, dtype=torch.int32, device=device)
            self.steps(*at, bits.data_ptr(), v.data_ptr())
            self.pool(bits.data_ptr(), at[-1], out.data_ptr())
        RUNS["fire", self.kernel] += 1
        return out, v


class Backward:
    """The backward of ``fire`` for operands like those it was made of, by one launcher.

    As many numbers as a launch has tensors are made in a call, and no more: gradients, and partial sums of those that are
    sums over slots.
    """

    def __init__(self, o: Operands, kernel: str, need_linear: bool, need_weights: bool) -> None:
        """Operands as checked. Raises ValueError where no kernel takes them, BackendError where it cannot be had."""
        call = Fire(o)
        self.kernel, self.device, self.dtype, self.last = kernel, o.y.device, o.y.dtype, call.last
        need_weights = need_weights and call.group > 0
        program, grid, self.tally = call.walking_back(need_linear, need_weights)
        self.block, self.blocks = grid.block, grid.blocks
        _, shared = cuda.tally(grid.block, self.tally, 0, self.device)
        numbers = (call.call, np.int32(grid.rounds), np.int32(grid.parts))
        self.steps = launchers.prepared(kernel, cuda.Launch(program, grid.blocks, numbers, shared, self.device, True))
        out, v = call.memory()
        self.lies, self.added, self.out, self.v = call.y.stride(), _added(call), out.stride(), (tuple(v.shape), v.stride())
        # As the drives lie, whatever a dimension of one place says of itself.
        self.gradient, self.shape = empty(o.y, list(o.y.shape), call.format).stride(), tuple(o.y.shape)
        self.residual = None
        if o.residual is not None:
            made = empty(o.y, list(o.residual.shape), call.format)
            self.residual = tuple(made.shape), made.stride()
        self.state, self.rate = o.v0 is not None, o.q is not None
        # Partial sums, and over which of their dimensions these are summed up.
        self.by_channel: tuple[int, ...] | None = None
        if o.scale is not None:
            # By part of the map and channel, or by sample, channel and part.
            self.by_channel = (grid.parts, call.c) if call.last else (call.n, call.c, grid.parts)
        self.by_drive = (grid.blocks, 2 * call.groups) if need_linear else None
        self.by_step = (grid.blocks, call.steps) if need_weights and not call.general else None
        self.bits: tuple[int, int] | None = None
        self.weigh: tuple[cuda.Ready, tuple[int, int, int]] | None = None
        if call.general:
            self._prepare_pool(call, kernel, need_weights, v)

    def _prepare_pool(self, call: Fire, kernel: str, need_weights: bool, v: Tensor) -> None:
        """Behind a general pool: the steps again, for their spikes as bits, and the gradient to the weights from those."""
        self.bits = call.words, call.frame
        bits = torch.empty(self.bits, dtype=torch.int32, device=self.device)
        program, blocks = call.stepping(False, bits, v)
        self.masks = launchers.prepared(kernel, cuda.Launch(program, blocks, (call.call,), 0, self.device))
        if need_weights:
            program, blocks, rounds = call.weighing()
            _, shared = cuda.tally(program.block, call.steps, 0, self.device)
            arguments = (call.call, np.int32(rounds))
            made = launchers.prepared(kernel, cuda.Launch(program, blocks, arguments, shared, self.device))
            self.weigh = made, (program.block, call.steps, blocks)

    def _partial(self, shape: tuple[int, ...] | None) -> Tensor | None:
        return None if shape is None else torch.empty(shape, dtype=torch.float32, device=self.device)

    def _pooled(self, go: Tensor, read: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
        """The spikes as bits, and the gradient to the weights behind a general pool; ``read``: what the steps read."""
        assert self.bits is not None
        bits = torch.empty(self.bits, dtype=torch.int32, device=self.device)
        v = torch.empty_strided(*self.v, dtype=torch.float32, device=self.device)
        self.masks(*[cuda.address(x) for x in (*read, bits, v)])
        if self.weigh is None:
            return bits, None
        weigh, (block, steps, blocks) = self.weigh
        partial = torch.empty(blocks, steps, dtype=torch.float32, device=self.device)
        scratch, _ = cuda.tally(block, steps, blocks, self.device)
        weigh(*[cuda.address(x) for x in (bits, go, partial, scratch)])
        return bits, partial.sum(0)

    def __call__(self, go: Tensor, gv: Tensor | None, o: Operands) -> tuple[Tensor | None, ...]:
        """Gradients to y, residual, scale, shift, v0, linear and weights; None where there is none or none is wanted."""
        y, residual, scale, shift, v0, linear, rate, weights = o[:8]
        (v_shape, v_stride), device, last = self.v, self.device, self.last
        y, go = _lying(y, self.lies, last), _lying(go, self.out, last)
        v0, gv = (None if x is None else _lying(x, v_stride, last) for x in (v0, gv))
        residual = None if residual is None or self.added is None else _lying(residual, self.added, last)
        scale, shift, linear, rate, weights = (_by_channel(x) for x in (scale, shift, linear, rate, weights))
        bits, g_weights = None, None
        if self.bits is not None:
            bits, g_weights = self._pooled(go, (y, residual, scale, shift, v0, linear, rate, weights))
        gy = torch.empty_strided(self.shape, self.gradient, dtype=self.dtype, device=device)
        g_residual = None if self.residual is None else torch.empty_strided(*self.residual, dtype=self.dtype, device=device)
        gv0 = torch.empty_strided(v_shape, v_stride, dtype=torch.float32, device=device) if self.state else None
        by_scale, by_shift = self._partial(self.by_channel), self._partial(self.by_channel)
        by_linear, by_weight = self._partial(self.by_drive), self._partial(self.by_step)
        scratch, _ = cuda.tally(self.block, self.tally, self.blocks, device)
        at = cuda.addresses(
            go=go, y=y, y_again=y, residual=residual, gv=gv, scale=scale, shift=shift, v0=v0, linear=linear, rate=rate,
            weights=weights, masks=bits, gy=gy, g_residual=g_residual, gv0=gv0, sums_scale=by_scale, sums_shift=by_shift,
            sums_linear=by_linear, sums_weights=by_weight, scratch=scratch,
        )  # fmt: skip
        self.steps(*at)
        over = (0,) if last else (0, 2)
        g_scale, g_shift = (None if x is None else x.sum(over) for x in (by_scale, by_shift))
        g_linear = None if by_linear is None else by_linear.sum(0).view(-1, 2)
        if by_weight is not None:
            g_weights = by_weight.sum(0)
        RUNS["fire", self.kernel] += 1
        return gy, g_residual, g_scale, g_shift, gv0, g_linear, g_weights


# By what each was made of. A net has some dozens; sizes of batches and clips that take turns are as many more.
_FORWARD: dict[tuple[Any, ...], Launch] = {}
_BACKWARD: dict[tuple[Any, ...], Backward] = {}
KEPT = 512


def forget() -> None:
    """What was kept."""
    _FORWARD.clear()
    _BACKWARD.clear()


def _like(x: Tensor | None) -> Any:
    """What a check looks at, of a tensor that is no frames."""
    return None if x is None else (x.shape, x.dtype, x.device)


def _key(o: Operands, kernel: str, *more: Any) -> tuple[Any, ...]:
    """All of the operands that a launch is made of, but for numbers in tensors."""
    y = o.y
    tensors = (y.shape, y.stride(), y.dtype, y.device, *[_like(x) for x in o[1:8]])
    return (kernel, *more, *tensors, tuple(o.lengths), *o[9:20], tuple(o.window), o.group)


def _keep(kept: dict[tuple[Any, ...], Any], key: tuple[Any, ...], made: Any) -> Any:
    if len(kept) >= KEPT:
        kept.clear()
    kept[key] = made
    return made


def forward(kernel: str, o: Operands) -> tuple[Tensor, Tensor]:
    """Output and last voltages, by the launcher of this name. Raises as ``Launch``."""
    key = _key(o, kernel)
    launch = _FORWARD.get(key)
    if launch is None:
        launch = _keep(_FORWARD, key, Launch(o.counted(), kernel))
    elif forward_ad._current_level >= 0:
        check_fire(o)  # tangents are the call's
    affine, weights = (o.scale, o.shift), cuda.vector(o.weights)
    return launch(o.y, o.v0, o.residual, affine, weights, (_by_channel(o.linear), _by_channel(o.q)))


def backward(
    kernel: str, go: Tensor, gv: Tensor | None, o: Operands, need_linear: bool, need_weights: bool
) -> tuple[Tensor | None, ...]:
    """Gradients to y, residual, scale, shift, v0, linear and weights, None where there is none or none is wanted.

    Raises ValueError where the gradients do not fit the operands; else as ``Launch``.
    """
    key = _key(o, kernel, need_linear, need_weights, _like(go), _like(gv))
    launch = _BACKWARD.get(key)
    if launch is None:
        refuse_dtype("fire_backward", o.y, ON_CUDA)
        check_fire_backward(go, gv, o)
        launch = _keep(_BACKWARD, key, Backward(o.counted(), kernel, need_linear, need_weights))
    elif forward_ad._current_level >= 0:
        check_fire_backward(go, gv, o)
    return launch(go, gv, o)
