"""``fire`` forward on CUDA, prepared once for drives of one shape and one neuron: a call makes memory and launches.

As ``cpu.launches``, which says what may differ between calls. Here numbers in tensors are never looked at, because a look
waits for the device: the sums' weights and a PLIF's w are read by the kernel, from the tensors of each call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sj_tac.kernels.checks import check_fire, refuse_dtype
from sj_tac.kernels.fire_op import ON_CUDA
from sj_tac.kernels.gpu import launchers, program as cuda
from sj_tac.kernels.gpu.fire import Fire
from sj_tac.kernels.layout import RUNS
from sj_tac.kernels.operands import Operands

# Bytes: no thread reads more at once, so that what begins at a multiple of it fits a vector of any width.
ALIGNED = 32


def _by_channel(x: Tensor | None) -> Tensor | None:
    """``program.vector``, which makes a view even where there is nothing to do."""
    return x if x is None or (x.dtype is torch.float32 and x.is_contiguous()) else cuda.vector(x)


class Launch:
    """The forward of ``fire`` for operands like those it was made of, by one launcher.

    Attributes:
        kernel: the launcher's name. shape: of the output.
        reads_weights: the weights of the sums may be others in every call; only how many are summed is fixed.
        convolves: it takes frames, filters and bias in the place of drives.
    """

    # fmt: off
    __slots__ = (
        "added", "affine", "bits", "device", "dtype", "kernel", "last", "lies", "out", "pool", "rate", "shape", "steps", "v",
        "weights",
    )
    # fmt: on
    reads_weights, convolves = True, False
    # Beta and gamma of merged steps, which no launch is made for: a null pointer, where the kernel takes one.
    linear: tuple[None, ...] = (None,)

    def __init__(self, o: Operands, kernel: str) -> None:
        """Raises ValueError where the operands do not fit each other, BackendError where the kernels cannot be had."""
        refuse_dtype("fire", o.y, ON_CUDA)
        check_fire(o)
        self._prepare(self._call(o), o, kernel)

    def _call(self, o: Operands) -> Fire:
        return Fire(o)

    def _prepare(self, call: Fire, o: Operands, kernel: str) -> None:
        self.kernel, self.device, self.dtype, self.last = kernel, o.y.device, o.y.dtype, call.last
        out, v = call.memory()
        self.shape, self.out, self.v = tuple(out.shape), out.stride(), (tuple(v.shape), v.stride())
        self.lies = call.y.stride()
        self.added = None if call.residual is None else (call.frame, *self.lies[1:])
        self.affine, self.rate = call.scale is not None, call.rate is not None
        self.weights = 0 if o.weights is None else call.steps
        self.bits, self.pool = None, None
        if call.general:
            self.bits = call.words, call.frame
            program, blocks = call.pooling()
            self.pool = launchers.prepared(kernel, cuda.Launch(program, blocks, (call.call,), 0, self.device))
            out = torch.empty(self.bits, dtype=torch.int32, device=self.device)
        program, blocks = call.stepping(call.windows, out, v)
        numbers = self._numbers(call)
        self.steps = launchers.prepared(kernel, cuda.Launch(program, blocks, numbers, call.shared, self.device))

    def _numbers(self, call: Fire) -> tuple[cuda.Argument, ...]:
        """What the program with the steps takes behind addresses."""
        return (call.call,)

    def _lying(self, x: Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Frames as the kernels read them; a copy where they lie otherwise, or begin where no vector may."""
        if x.stride() != stride:
            x = cuda.dense(x, self.last, dtype)
        return x if x.data_ptr() % ALIGNED == 0 else x.clone()

    def __call__(
        self,
        y: Tensor,
        v0: Tensor | None,
        residual: Tensor | None,
        affine: tuple[Tensor | None, Tensor | None],
        weights: Tensor | None,
        w: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Output and last voltages; ``affine``: scale and shift; weights: [T] in float32; w: of a PLIF, in any dtype."""
        y = self._lying(y, self.lies, self.dtype)
        if residual is not None and self.added is not None:
            residual = self._lying(residual, self.added, self.dtype)
        # The kernel reads without looking.
        assert (residual is not None) == (self.added is not None)
        return self._run((y, residual), v0, affine, weights, w)

    def _run(
        self,
        read: tuple[Tensor | None, ...],
        v0: Tensor | None,
        affine: tuple[Tensor | None, Tensor | None],
        weights: Tensor | None,
        w: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """``read``: what the drives are made of, as the program with the steps takes it in front."""
        device, (v_shape, v_stride) = self.device, self.v
        out = torch.empty_strided(self.shape, self.out, dtype=self.dtype, device=device)
        v = torch.empty_strided(v_shape, v_stride, dtype=torch.float32, device=device)
        scale, shift = _by_channel(affine[0]), _by_channel(affine[1])
        if v0 is not None:
            v0 = self._lying(v0, v_stride, torch.float32)
        # Another neuron than a PLIF may have a parameter of that name as well.
        rate = w.to(torch.float32).sigmoid() if self.rate and w is not None else None
        assert (scale is not None, shift is not None, rate is not None) == (self.affine, self.affine, self.rate)
        assert (0 if weights is None else weights.numel()) == self.weights
        assert weights is None or (weights.dtype is torch.float32 and weights.is_contiguous())
        at = [0 if x is None else x.data_ptr() for x in (*read, scale, shift, v0, *self.linear, rate, weights)]
        if self.pool is None or self.bits is None:
            self.steps(*at, out.data_ptr(), v.data_ptr())
        else:
            bits = torch.empty(self.bits, dtype=torch.int32, device=device)
            self.steps(*at, bits.data_ptr(), v.data_ptr())
            self.pool(bits.data_ptr(), at[-1], out.data_ptr())
        RUNS["fire", self.kernel] += 1
        return out, v
