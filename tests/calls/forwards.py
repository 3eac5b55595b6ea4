"""A net of four conv blocks and a head, whose forward is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import awake, frames
from torch import Tensor, nn

C, SIZE, T = 4, 8, 7


def lif(**more: Any) -> nn.Module:
    return neuron.LIFNode(**({"tau": 2.3, "surrogate_function": surrogate.ATan(), "detach_reset": True} | more))


def block(inputs: int, outputs: int, *more: nn.Module) -> nn.Sequential:
    norm = layer.BatchNorm2d(outputs)
    nn.init.uniform_(norm.weight, 1.5, 2.5)
    nn.init.uniform_(norm.bias, 0.2, 0.6)
    norm.running_mean.uniform_(-0.2, 0.2)
    norm.running_var.uniform_(0.5, 1.5)
    return nn.Sequential(layer.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm, lif(), *more)


class Blocks(nn.Module):
    """Blocks a, b, c, d (with a pool), and a head; ``steps(net, x)`` is the forward."""

    def __init__(self, steps: Callable[..., Any]) -> None:
        super().__init__()
        self.steps = steps
        self.a, self.b, self.c = block(2, C), block(C, C), block(C, C)
        self.d = block(C, C, layer.MaxPool2d(2, 2))
        self.head = nn.Sequential(layer.Flatten(), layer.Linear(C * 16, 5))

    def forward(self, x: Any) -> Any:
        return self.steps(self, x)


def straight(n: Any, x: Tensor) -> Tensor:
    return n.head(n.d(n.c(n.b(n.a(x)))))


def spikes_in(seed: int = 3, steps: int = T) -> Tensor:
    return frames(steps, 2, 2, SIZE, SIZE, dtype=torch.float64, seed=seed)


def build(steps: Callable[..., Any] = straight) -> Blocks:
    """An awake float64 net in eval mode with this forward."""
    torch.manual_seed(1)
    net = Blocks(straight)
    functional.set_step_mode(net, "m")
    net = net.double().eval()
    awake(net, spikes_in())
    net.steps = steps
    return net
