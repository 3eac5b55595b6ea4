"""The affine map of a BatchNorm in eval mode, by the kernels that run where it is: on CUDA one launch instead of seven."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sj_tac import host
from sj_tac.host import dispatch
from sj_tac.kernels import backends, reference
from sj_tac.kernels.gpu import launchers, program as cuda
from sj_tac.kernels.layout import RUNS

BLOCK = 128


def affine(norm: Any, known: host.Affine, backend: str) -> tuple[Tensor, Tensor]:
    """``host.affine``, to the last bit; ``backend`` as of the chain that the BatchNorm is in.

    Computed in every call: who writes through ``.data`` leaves no trace by which an old map could be told from a new one.
    """
    weight, bias, _, var = numbers = host.norm_numbers(norm)
    if backend == reference.NAME:
        return host.affine(norm, known)
    shape, device = var.shape, var.device
    kernel = _kernel(backend, device) if dispatch.is_plain(var) else ""
    if not kernel:
        return host.affine(norm, known)
    for x in numbers:
        if x is not None and not (
            type(x) in dispatch.PLAIN
            and x.dtype is torch.float32
            and x.shape == shape
            and x.device == device
            and x.is_contiguous()
        ):
            return host.affine(norm, known)
    if not dispatch.differentiates(weight, bias):
        return _launch(kernel, norm.eps, numbers, None)
    if not host.are_differentiable(var, weight, bias):
        return host.affine(norm, known)

    def make() -> host.Mapped:
        saved = var.new_empty(2, *shape)
        return host.Mapped(_launch(kernel, norm.eps, numbers, saved), *saved.unbind())

    return host.differentiable(weight, bias, make)


def _launch(kernel: str, eps: float, numbers: tuple[Tensor | None, ...], saved: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale and shift of weight, bias, running mean and variance; into ``saved`` [2, C] what their gradients take."""
    var = numbers[-1]
    assert var is not None
    scale, shift = torch.empty_like(var), torch.empty_like(var)
    at = [0 if x is None else x.data_ptr() for x in (*numbers, scale, shift, saved)]
    _ready(kernel, var.device, eps, var.numel())(*at)
    RUNS["norm", kernel] += 1
    return scale, shift


@lru_cache(maxsize=64)
def _kernel(backend: str, device: torch.device) -> str:
    """What launches the kernel there for a chain of this backend; "" where it is not CUDA's."""
    kernel, problem = backends.fastest(backend, device, torch.float32)
    return kernel if not problem and kernel in backends.ON_CUDA else ""


@lru_cache(maxsize=256)
def _ready(kernel: str, device: torch.device, eps: float, channels: int) -> cuda.Ready:
    program = cuda.program("norm_affine", IO=0, WIDE=0, BLOCK=BLOCK)
    arguments = (np.float32(eps), np.int32(channels))
    return launchers.prepared(kernel, cuda.Launch(program, -(-channels // BLOCK), arguments, 0, device))
