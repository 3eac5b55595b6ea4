"""Nets with four conv blocks and two heads, and many ways to write their forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from operations import Doubled
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
    """Blocks a, b, c, d (with a pool), and heads; ``steps(net, x)`` is the forward."""

    def __init__(self, steps: Callable[..., Any]) -> None:
        super().__init__()
        self.steps = steps
        self.a, self.b, self.c = block(2, C), block(C, C), block(C, C)
        self.d = block(C, C, layer.MaxPool2d(2, 2))
        self.head = nn.Sequential(layer.Flatten(), layer.Linear(C * 16, 5))
        self.aux = nn.Sequential(layer.Flatten(), layer.Linear(C * 64, 5))
        self.e, self.f = block(2, C), block(C, C)
        self.flag = False

    def forward(self, x: Any) -> Any:
        return self.steps(self, x)


def straight(n: Any, x: Tensor) -> Tensor:
    return n.head(n.d(n.c(n.b(n.a(x)))))


def spikes_in(seed: int = 3, steps: int = T) -> Tensor:
    return frames(steps, 2, 2, SIZE, SIZE, dtype=torch.float64, seed=seed)


def build(steps: Callable[..., Any] = straight, x: Any = None, make: type[Blocks] = Blocks) -> Blocks:
    """An awake float64 net in eval mode with this forward."""
    torch.manual_seed(1)
    net = make(straight)
    functional.set_step_mode(net, "m")
    net = net.double().eval()
    first = spikes_in()
    awake(net, first)
    # e and f are read by few forwards only.
    awake(nn.Sequential(net.e, net.f), first)
    net.steps = steps
    return net


# ---- forwards: name -> (function, what it needs) -----------------------------------------------------------------------

FORWARDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}


def case(name: str, **needs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a forward. ``flag``: set after convert; ``x``: makes the input; ``grads``: ways of calling that it allows."""

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        FORWARDS[name] = (function, needs)
        return function

    return note


case("plain")(straight)


@case("the same layers with T and 5")
def two_lengths(n, x):
    return straight(n, x).mean(0) + n.aux(n.c(n.b(n.a(x[:5])))).mean(0)


@case("two inputs", x=lambda: (spikes_in(), spikes_in(4, 5)))
def two_inputs(n, x):
    return n.head(n.d(n.b(n.a(x[0])))).mean(0), n.aux(n.f(n.e(x[1]))).mean(0)


@case("stochastic depth", flag=True)
def depth(n, x):
    s = n.a(x)
    s = s * s if n.flag and torch.rand(()) < 2 else n.b(s)
    return n.head(n.d(n.c(s)))


@case("a drive in a buffer")
def buffered_drive(n, x):
    buffer = torch.zeros(T, 2, C, SIZE, SIZE, dtype=torch.float64)
    buffer[2:, :, :C] = n.b[0](n.a(x))[2:]
    return n.head(n.d(n.c(n.b[2](n.b[1](buffer)))))


@case("a residual that is written later")
def residual_written(n, x):
    s = n.a(x)
    identity = s * 1.0
    y = n.b[1](n.b[0](s)) + identity
    identity.mul_(0.0)
    return n.head(n.d(n.c(n.b[2](y))))


@case("a summand that is written later", grads=("no_grad", "inference"))  # with gradients torch itself objects
def summand_written(n, x):
    s = n.a(x) * 1.0
    u = s + n.b(s)
    s.mul_(0.25)
    return n.head(n.d(n.c(u))), s


def twice(x: Tensor) -> Tensor:
    return Doubled.apply(x)


torch.fx.wrap("twice")


@case("an autograd.Function on drives")
def function_on_drives(n, x):
    y = n.b[1](twice(n.b[0](n.a(x))))
    z = n.c[1](n.c[0](n.b[2](y)))
    z += y
    return n.head(n.d(n.c[2](twice(z))))


@case("statistics without gradients")
def statistics(n, x):
    s = n.a(x)
    y = n.b[0](s)
    with torch.no_grad():
        m = s.mean() + y.mean() + s.std()
    return n.head(n.d(n.c(n.b[2](n.b[1](y))))), m


@case("cat, stack, slices")
def joined(n, x):
    s = n.a(x)
    t = n.b(s)
    return n.head(n.d(n.c(torch.cat([s[:, :, :2], t[:, :, 2:]], 2)))), torch.stack([s, t]).mean((1, 2))


@case("a still image", x=lambda: spikes_in()[0])
def still(n, x):
    return straight(n, x.unsqueeze(0).repeat(6, 1, 1, 1, 1))
