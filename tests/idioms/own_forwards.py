"""Miniature nets whose convolutions and Linears have a forward of their own: weights that are made anew in every call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from idioms.miniatures import C, Idiom, lif
from spikingjelly.activation_based import functional, layer
from torch import Tensor, nn


def standardised(weight: Tensor) -> Tensor:
    dims = tuple(range(1, weight.dim()))
    moved = weight - weight.mean(dims, keepdim=True)
    return moved / (moved.std(dims, keepdim=True) + 1e-5) * 0.3


class Standardised(layer.Conv2d):
    """Of the host's own layer: frames [T, N, C, H, W] in step_mode "m". Its gain is a parameter that the host's has not."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more, step_mode="m")
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, self.out_channels).view(-1, 1, 1, 1))

    def once(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardised(self.weight) * self.gain, self.bias, self.stride, self.padding, self.dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.once(x) if self.step_mode == "s" else functional.seq_to_ann_forward(x, self.once)


class FoldedStandardised(nn.Conv2d):
    """Of torch's own layer: folded frames [T * N, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardised(self.weight), self.bias, self.stride, self.padding, self.dilation, self.groups)


class Masked(nn.Conv2d):
    """By the method that torch's forward calls; its mask is a buffer."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.register_buffer("mask", (torch.rand(self.weight.shape) > 0.3).to(self.weight))

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * self.mask, bias)


class Branching(nn.Conv2d):
    """Two kernels in one layer, the second a parameter of its own, and a scale behind them."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.point = nn.Parameter(torch.randn(self.out_channels, self.in_channels, 1, 1) * 0.3)
        self.scale = nn.Parameter(torch.rand(self.out_channels, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) + F.conv2d(x, self.point)) * self.scale


class Binary(layer.Linear):
    """Weights of two values, with a gradient that goes past the sign."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + (self.weight.abs().mean() * self.weight.sign() - self.weight).detach()
        return F.linear(x, weight, self.bias)


class OwnForwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1 = Standardised(2, C, 3, padding=1), layer.BatchNorm2d(C, step_mode="m"), lif()
        self.conv2, self.bn2, self.lif2 = FoldedStandardised(C, C, 3, padding=1, bias=False), nn.BatchNorm2d(C), lif()
        self.inside = layer.SeqToANNContainer(Masked(C, C, 3, padding=1), nn.BatchNorm2d(C))
        self.lif3, self.lif4, self.lif5 = lif(), lif(), lif()
        self.conv4 = Branching(C, C, 3, padding=1)
        self.fc = Binary(C, C, step_mode="m")

    def forward(self, x: Tensor) -> Tensor:
        t, n = x.shape[:2]
        x = self.lif1(self.bn1(self.conv1(x)))
        x = self.lif2(self.bn2(self.conv2(x.flatten(0, 1))).unflatten(0, (t, n)))
        x = self.lif3(self.inside(x))
        x = self.lif4(self.conv4(x.flatten(0, 1)).unflatten(0, (t, n)))
        x = x.mean((-2, -1))
        return (x + self.lif5(self.fc(x))).mean(0)


_ALL, _FOLDED = ("conv1", "conv2", "inside.0", "conv4"), ("conv2", "inside.0", "conv4")
OWN = {
    "own forwards": Idiom(OwnForwards, _ALL, _FOLDED),
    "own linear": Idiom(OwnForwards, (*_ALL, "fc"), _FOLDED, layers=("conv", "linear")),
}
