"""Small nets, each in one idiom that a planner may take for another, and what is right for each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from spikingjelly.activation_based import surrogate
from torch import nn

T, N, C, SIZE = 4, 3, 4, 8
BETA = 0.25


class Leaky(nn.Module):
    """A LIF neuron written by hand. ``order``: how its frames are laid out; "folded" rows need its own T."""

    def __init__(self, order="time first", decay=BETA, noise=0.0, threshold=0.5, per_channel=False):
        super().__init__()
        self.order, self.noise, self.threshold, self.decay = order, noise, threshold, decay
        if per_channel:
            self.decay = nn.Parameter(torch.linspace(0.2, 0.8, C).view(1, C, 1, 1))

    def frames(self, x):
        if self.order == "folded":
            return x.view(T, -1, *x.shape[1:])
        if self.order == "folded, samples first":
            return x.view(-1, T, *x.shape[1:]).transpose(0, 1)
        return x.transpose(0, 1) if self.order == "samples first" else x

    def forward(self, x):
        v, spikes = 0.0, []
        for u in self.frames(x):
            v = v * self.decay + u + self.noise * torch.randn_like(u)
            spikes.append(surrogate.atan.apply(v - self.threshold, 2.0))
            v = v * (1 - spikes[-1].detach())
        made = torch.stack(spikes)
        return (made.transpose(0, 1) if "samples first" in self.order else made).reshape(x.shape)


class Parallel(nn.Module):
    """A neuron without reset: one matrix over time, lower triangular if ``causal``."""

    def __init__(self, causal):
        super().__init__()
        weight = torch.randn(T, T, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(weight.tril() if causal else weight)

    def forward(self, x):
        return surrogate.atan.apply((self.weight @ x.flatten(1)).view(x.shape), 2.0)


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class Looping(nn.Conv2d):
    """Takes frames [T, N, C, H, W] and loops over T."""

    def forward(self, x):
        return torch.stack([super(Looping, self).forward(frame) for frame in x])


class Remembering(nn.Conv2d):
    """Adds a part of its last call's output."""

    last = 0.0

    def forward(self, x):
        y = super().forward(x) + 0.1 * self.last
        self.last = y.detach()
        return y


class Differences(nn.Conv2d):
    def forward(self, x):
        return unfolded(super().forward, torch.cat([x[:1], x[1:] - x[:-1]]))


class Embedding(nn.Conv2d):
    """Adds a number of its own to each step."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.steps = nn.Parameter(torch.linspace(-1, 1, T))

    def forward(self, x):
        return unfolded(super().forward, x) + self.steps.view(-1, 1, 1, 1, 1)


def unfolded(convolution, x):
    return convolution(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Net(nn.Module):
    """``parts``, called by ``way(net, x)``."""

    def __init__(self, way, **parts):
        super().__init__()
        self.way = way
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args):
        return self.way(self, *args)


def conv(kind=nn.Conv2d, size=3):
    return kind(C, C, size, padding=size // 2)


@dataclass(frozen=True)
class Case:
    """A net, the shape of its input, and what a reader would say of its convolution "conv".

    Attributes:
        order: where its frames are: "folded" [T * N, ...], "folded, samples first" [N * T, ...], "time first" [T, N, ...].
            None: it must stay as it is. why: what the plan says then.
        exact: k = 2 shares drives whose weighted sums are the source's. others: shapes that the plan must hold for as well.
    """

    make: Callable[[], nn.Module]
    order: str | None
    shape: tuple[int, ...] = (T, N, C, SIZE, SIZE)
    why: str = ""
    exact: bool = True
    others: tuple[tuple[int, ...], ...] = ()
    beta: float | None = BETA


def after(way, neuron=Leaky, kind=nn.Conv2d, **parts):
    return lambda: Net(way, conv=conv(kind), neuron=neuron(), **{name: make() for name, make in parts.items()})


def plain(net, x):
    return net.neuron(unfolded(net.conv, x))


def on_rows(net, x):
    return net.neuron(net.conv(x.flatten(0, 1)))


def with_own_shape(net, x):
    return net.neuron(net.conv(x))


def in_place(net, x):
    spikes = net.first(x)
    y = net.second(unfolded(net.before, spikes))
    y += spikes
    return net.neuron(unfolded(net.conv, y))


FOLDED, SAMPLES_FIRST = (lambda: Leaky("folded")), (lambda: Leaky("folded, samples first"))
MORE = ((T, N + 2, C, SIZE, SIZE), (T + 2, N, C, SIZE, SIZE))
MORE_SAMPLES = ((T, N + 2, C, SIZE, SIZE),)
MEET = "frames meet"
CASES = {
    "plain": Case(after(plain), "folded", others=MORE),
    "folded": Case(after(on_rows, FOLDED), "folded", others=MORE_SAMPLES),
    "folded, samples first": Case(
        after(on_rows, SAMPLES_FIRST), "folded, samples first", (N, T, C, SIZE, SIZE), others=((N + 2, T, C, SIZE, SIZE),)
    ),
    "samples first": Case(
        after(plain, lambda: Leaky("samples first")), "folded, samples first", (N, T, C, SIZE, SIZE),
        others=((N + 2, T, C, SIZE, SIZE), (N, T + 2, C, SIZE, SIZE)),
    ),
    "as many steps as samples": Case(after(on_rows, FOLDED), "folded", (T, T, C, SIZE, SIZE), others=MORE_SAMPLES),
    "one sample": Case(after(on_rows, FOLDED), "folded", (T, 1, C, SIZE, SIZE), others=MORE_SAMPLES),
    "one sample, samples first": Case(
        after(on_rows, SAMPLES_FIRST), "folded, samples first", (1, T, C, SIZE, SIZE), others=((N, T, C, SIZE, SIZE),)
    ),
    "an image that is repeated": Case(
        after(lambda net, x: net.neuron(net.conv(x.repeat(T, 1, 1, 1))), FOLDED), "folded", (N, C, SIZE, SIZE),
        others=((N + 2, C, SIZE, SIZE),),
    ),
    "an image that is repeated behind": Case(
        after(lambda net, x: net.neuron(net.conv(x)[None].repeat(T, 1, 1, 1, 1))), None, (N, C, SIZE, SIZE), MEET
    ),
    "one step": Case(after(plain), None, (1, N, C, SIZE, SIZE), "drives no neuron"),
    "a noisy neuron": Case(after(plain, lambda: Leaky(noise=0.3)), None, why="drives no neuron"),
    "a neuron that never fires": Case(after(plain, lambda: Leaky(threshold=1e9)), None, why="drives no neuron"),
    "a decay for each channel": Case(after(plain, lambda: Leaky(per_channel=True)), "folded", others=MORE, beta=0.5),
    "two decays": Case(
        after(lambda net, x: net.neuron(y := unfolded(net.conv, x)) + net.second(y), second=lambda: Leaky(decay=0.5)),
        "folded", others=MORE,
    ),
    "weights made in each call": Case(after(plain, kind=Standardised), "folded", others=MORE),
    "a convolution that loops over time": Case(after(with_own_shape, kind=Looping), "time first", others=MORE),
    "a convolution with a state": Case(after(plain, kind=Remembering), None, why="keeps a state"),
    "a convolution of differences": Case(after(with_own_shape, kind=Differences), None, why="does not treat frames alike"),
    "a number for each step": Case(after(with_own_shape, kind=Embedding), None, why="no other number of frames"),
    "a convolution over time": Case(
        lambda: Net(
            lambda net, x: net.neuron(net.conv(x.permute(1, 2, 0, 3, 4)).permute(2, 0, 1, 3, 4)),
            conv=conv(nn.Conv3d), neuron=Leaky(),
        ),
        None, why="time is inside",
    ),
    "time as channels": Case(
        lambda: Net(
            lambda net, x: net.neuron(x * net.conv(x.mean((2, 3, 4)).mT[..., None]).mT.permute(2, 0, 1)[..., None, None]),
            conv=conv(nn.Conv1d, 1), neuron=Leaky(),
        ),
        None, why="time is among its channels",
    ),
    "a mean over time": Case(
        after(lambda net, x: net.neuron((y := unfolded(net.conv, x)) - y.mean(0, keepdim=True))), None, why=MEET
    ),
    "a softmax over time": Case(after(lambda net, x: net.neuron(unfolded(net.conv, x).softmax(0))), None, why=MEET),
    "a sum over time": Case(after(lambda net, x: net.neuron(unfolded(net.conv, x).cumsum(0))), None, why=MEET),
    "a mean over samples": Case(
        after(lambda net, x: net.neuron((y := unfolded(net.conv, x)) - y.mean(1, keepdim=True))), None, why=MEET
    ),
    "time that is flipped": Case(after(lambda net, x: net.neuron(unfolded(net.conv, x).flip(0))), None, why="no order"),
    "samples that are rolled": Case(
        after(lambda net, x: net.neuron(unfolded(net.conv, x).roll(1, 1).flatten(0, 1)), FOLDED), None, why="no order"
    ),
    "a causal matrix for a neuron": Case(after(plain, lambda: Parallel(True)), "folded", others=MORE_SAMPLES, beta=None),
    "a full matrix for a neuron": Case(after(plain, lambda: Parallel(False)), None, why="drives no neuron"),
    "a convolution that is called twice": Case(
        after(lambda net, x: net.second(unfolded(net.conv, net.neuron(unfolded(net.conv, x)))), second=Leaky), "folded",
        others=MORE,
    ),
    "a loop over time": Case(
        after(lambda net, x: net.neuron(torch.stack([net.conv(frame) for frame in x]))), None, why="called 4 times"
    ),
    "a pool of maxima": Case(
        after(lambda net, x: net.neuron(unfolded(lambda y: net.pool(net.conv(y)), x)), pool=lambda: nn.MaxPool2d(2)),
        "folded", exact=False, others=MORE,
    ),
    "an activation": Case(
        after(lambda net, x: net.neuron(unfolded(net.conv, x).relu())), "folded", exact=False, others=MORE
    ),
    "a residual sum in place": Case(
        after(in_place, before=conv, first=Leaky, second=Leaky), "folded", others=MORE
    ),
    "a concatenation": Case(
        after(lambda net, x: net.neuron(torch.cat([unfolded(net.conv, x), x], 2))), "folded", others=MORE
    ),
    "a head": Case(after(lambda net, x: unfolded(net.conv, net.neuron(x))), None, why="drives no neuron"),
}  # fmt: skip
