"""First layers, of few input channels, which one kernel may convolve and fire: what is compiled, counted and measured.

That kernel is off unless the environment asks for it (docs/gpu.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from spikingjelly.activation_based import layer, neuron, surrogate
from torch import Tensor, nn

import sj_tac
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.layout import RUNS


class Case(NamedTuple):
    """Channels in and out, kernel, stride and size of the input of a convolution; the MaxPool behind its neuron."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int
    pool: tuple[int, int, int] | None  # kernel, stride, padding

    def pooling(self) -> nn.Module | None:
        """The pool as SpikingJelly has it."""
        return None if self.pool is None else layer.MaxPool2d(*self.pool, step_mode="m")


CASES = {
    "2 -> 128, 3x3, 2x2 pool": Case(2, 128, 3, 1, 128, (2, 2, 0)),
    "2 -> 64, 3x3, no pool": Case(2, 64, 3, 1, 128, None),
    "3 -> 64, 7x7 stride 2, 3x3 pool": Case(3, 64, 7, 2, 224, (3, 2, 1)),
}


def source(case: Case, bias: bool = False) -> nn.Sequential:
    """Convolution, BatchNorm, LIF and pool, whose neurons fire; seeded by the caller."""
    norm, pool = layer.BatchNorm2d(case.outputs, step_mode="m"), case.pooling()
    norm.running_var.fill_(0.05)
    conv = layer.Conv2d(case.inputs, case.outputs, case.kernel, case.stride, case.kernel // 2, bias=bias, step_mode="m")
    lif = neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m")
    return nn.Sequential(conv, norm, lif, *([] if pool is None else [pool])).eval()


def converted(case: Case, dtype: torch.dtype, k: int, device: str, batch: int = 16) -> tuple[nn.Sequential, Tensor]:
    """A layer and the second one, a convolution and a neuron, that it makes sums for; and frames [16, batch, C, H, W]."""
    torch.manual_seed(0)
    second = layer.Conv2d(case.outputs, 4, 1, step_mode="m"), neuron.IFNode(step_mode="m")
    net = nn.Sequential(*source(case), *second).eval().to(device)
    fast: nn.Sequential = sj_tac.convert(net, "preserve", k).to(dtype)
    return fast, events((16, batch, case.inputs, case.size, case.size), dtype, device)


def events(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Frames of events, a fifth of all numbers."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.2).to(device, dtype)


def runs() -> int:
    """How often the kernel has run in this process."""
    return sum(n for (what, _), n in RUNS.items() if what == "conv_fire")


@contextmanager
def asked(said: str) -> Iterator[None]:
    """Inside, the environment asks for the kernel ("1"), or does not ("0")."""
    before = os.environ.get(conv_fire.VARIABLE)
    os.environ[conv_fire.VARIABLE] = said
    try:
        yield
    finally:
        if before is None:
            del os.environ[conv_fire.VARIABLE]
        else:
            os.environ[conv_fire.VARIABLE] = before
