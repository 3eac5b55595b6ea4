"""Nets with four conv blocks and two heads, and many ways to write their forward."""

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
    """Blocks a, b, c, d (with a pool), and heads; ``steps(net, x)`` is the forward."""

    def __init__(self, steps: Callable[..., Any]) -> None:
        super().__init__()
        self.steps = steps
        self.a, self.b, self.c = block(2, C), block(C, C), block(C, C)
        self.d = block(C, C, layer.MaxPool2d(2, 2))
        self.head = nn.Sequential(layer.Flatten(), layer.Linear(C * 16, 5))
        self.aux = nn.Sequential(layer.Flatten(), layer.Linear(C * 64, 5))
        self.e, self.f = block(2, C), block(C, C)
        self.bare, self.bare_norm = nn.Conv2d(C, C, 3, padding=1, bias=False), nn.BatchNorm2d(C)
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
    """Register a forward. ``flag``: set after convert; ``x``: makes the input; ``modes``, ``grads``: where it is defined."""

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        FORWARDS[name] = (function, needs)
        return function

    return note


case("plain")(straight)


@case("x[-2:]")
def last(n, x):
    s = n.a(x)
    return n.head(n.d(n.c(n.b(s)))).mean(0), n.aux(n.f(s[-2:]))


@case("x[-2:] into layers called before")
def last_again(n, x):
    s = n.a(x)
    return n.head(n.d(n.c(n.b(s)))).mean(0), n.aux(n.c(n.b(s[-2:])))


@case("x[::2]")
def strided(n, x):
    s = n.a(x)
    return n.head(n.d(n.b(s))), n.aux(n.c(s[::2]))


@case("x[1:]")
def shifted(n, x):
    return n.head(n.d(n.c(n.b(n.a(x)[1:]))))


@case("cat over time")
def doubled(n, x):
    s = n.a(x)
    return n.head(n.d(n.c(torch.cat([s, n.b(s)]))))


@case("pooling over time")
def pooled_time(n, x):
    s = n.a(x)[:6]
    return n.head(n.d(n.c(n.b(s.unflatten(0, (3, 2)).mean(1)))))


@case("detach_()", modes=("preserve",))  # the definition's own marks are views, which torch does not detach in place
def cut(n, x):
    s = n.a(x) * 1.5
    y = n.aux(n.f(s))
    s.detach_()
    return n.head(n.d(n.c(n.b(s)))), y


@case("numbers on a drive")
def mapped(n, x):
    d = n.b[1](n.b[0](n.a(x)))
    return n.head(n.d(n.c(n.b[2](d * 2 - 0.3))))


@case("the same layers with T and 5")
def two_lengths(n, x):
    return straight(n, x).mean(0) + n.aux(n.c(n.b(n.a(x[:5])))).mean(0)


@case("two inputs", x=lambda: (spikes_in(), spikes_in(4, 5)))
def two_inputs(n, x):
    return n.head(n.d(n.b(n.a(x[0])))).mean(0), n.aux(n.f(n.e(x[1]))).mean(0)


@case("an auxiliary head", flag=True)
def auxiliary(n, x):
    s = n.b(n.a(x))
    y = n.head(n.d(n.c(s)))
    return (y, n.aux(s)) if n.flag else y


@case("an auxiliary head in training")
def auxiliary_in_training(n, x):
    s = n.b(n.a(x))
    y = n.head(n.d(n.c(s)))
    return (y, n.aux(s)) if n.training else y


@case("features on demand", flag=True)
def features(n, x):
    s = n.b(n.a(x))
    y = n.head(n.d(n.c(s)))
    return {"y": y, "features": s} if n.flag else y


@case("stochastic depth", flag=True)
def depth(n, x):
    s = n.a(x)
    s = s * s if n.flag and torch.rand(()) < 2 else n.b(s)
    return n.head(n.d(n.c(s)))


@case("mul_ of spikes")
def scaled_spikes(n, x):
    y = n.a(x)
    y.mul_(2.0)
    return n.head(n.d(n.c(n.b(y))))


@case("mul_ of a drive")
def scaled_drive(n, x):
    y = n.b[1](n.b[0](n.a(x)))
    y.mul_(2.0)
    return n.head(n.d(n.c(n.b[2](y))))


@case("add_ of a head")
def moved_output(n, x):
    out = straight(n, x)
    out.add_(0.1)
    return out


@case("items of a buffer")
def buffered(n, x):
    buffer = torch.zeros(T, 2, C, SIZE, SIZE, dtype=torch.float64)
    buffer[:, :, :C] = n.a(x)
    return n.head(n.d(n.c(n.b(buffer))))


@case("a drive in a buffer")
def buffered_drive(n, x):
    buffer = torch.zeros(T, 2, C, SIZE, SIZE, dtype=torch.float64)
    buffer[2:, :, :C] = n.b[0](n.a(x))[2:]
    return n.head(n.d(n.c(n.b[2](n.b[1](buffer)))))


@case("writes through a view")
def viewed(n, x):
    s = n.a(x) * 1.0
    v = s[0]
    v.mul_(0.5)
    s.add_(1.0)
    return n.head(n.d(n.c(n.b(s + v))))


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


@case("a summand that is written before the neuron")
def drive_summand_written(n, x):
    s = n.a(x)
    t = s * 1.0
    z = n.b[1](n.b[0](s)) + t
    t.mul_(0.5)
    return n.head(n.d(n.c(n.b[2](z) + t)))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def twice(x: Tensor) -> Tensor:
    return Twice.apply(x)


torch.fx.wrap("twice")


@case("an autograd.Function on spikes")
def function_on_spikes(n, x):
    return n.head(n.d(n.c(twice(n.b(twice(n.a(x)))))))


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


@case("a loss of rates")
def rates(n, x):
    s = n.a(x)
    t = n.b(s)
    return n.head(n.d(n.c(t))) + t.mean() + s.sum() * 1e-3


@case("torch's own layers on folded time", modes=("preserve",))
def folded(n, x):
    s = n.b[1](n.b[0](n.a(x)))
    z = n.bare_norm(n.bare(s.flatten(0, 1))).reshape(s.shape).contiguous()
    return n.head(n.d(n.c(n.b[2](z))))


@case("a still image", x=lambda: spikes_in()[0])
def still(n, x):
    return straight(n, x.unsqueeze(0).repeat(6, 1, 1, 1, 1))


@case("channels_last")
def channels_last(n, x):
    return straight(n, x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2]))


@case("a residual")
def residual(n, x):
    s = n.a(x)
    return n.head(n.d(n.c(n.b[2](n.b[1](n.b[0](s)) + s))))


@case("a residual in place")
def residual_in_place(n, x):
    s = n.a(x)
    y = n.b[1](n.b[0](s))
    y += s
    return n.head(n.d(n.c(n.b[2](y)) + s))


@case("the mean of spikes as a factor")
def gated(n, x):
    s = n.a(x)
    return n.head(n.d(n.c(s * n.b(s).mean((0, 3, 4), keepdim=True))))


@case("a shift in time")
def rolled(n, x):
    s = n.a(x)
    return n.head(n.d(n.c(s + torch.roll(n.b(s), 1, 0))))
