"""Miniature nets in the idioms of published models, and what an independent reader would say of each.

All are our own. LIF neurons have tau = 2 everywhere, so that every group is weighed by the same decay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

T, N, C, SIZE = 7, 3, 6, 8


def lif(**more: Any) -> nn.Module:
    more = {"tau": 2.0, "detach_reset": True, "step_mode": "m", "surrogate_function": surrogate.ATan()} | more
    return neuron.LIFNode(**more)


def conv(inputs: int = C, outputs: int = C, size: int = 3) -> nn.Module:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)


def grouped(x: Tensor, k: int, dim: int = 0, beta: float = 0.5) -> Tensor:
    """Frames along ``dim`` as a converted convolution reads them: in each one's place its group's weighted mean."""
    parts = []
    for part in x.split(k, dim):
        n = part.shape[dim]
        weights = beta ** torch.arange(n - 1, -1, -1, dtype=x.dtype)
        weights = (weights / weights.sum()).view(n, *[1] * (x.dim() - dim - 1))
        parts.append((part * weights).sum(dim, keepdim=True).expand_as(part))
    return torch.cat(parts, dim)


def by_hand(
    net: nn.Module, k: int, convs: Mapping[str, tuple[int, int] | None], dim: int = 0, beta: float = 0.5
) -> nn.Module:
    """A copy of the net, with hooks that hand convs a weighted mean in the place of every frame of its group.

    Args:
        convs: of each name, what unfolds the frames that it is handed; None where they are not folded.
        dim: which of the first two dimensions is time. beta: of the neurons' decay.
    """
    made = copy.deepcopy(net)

    def aggregate(module: nn.Module, args: Any, fold: tuple[int, int] | None) -> tuple[Tensor]:
        y = grouped(args[0] if fold is None else args[0].unflatten(0, fold), k, dim, beta)
        return (y if fold is None else y.flatten(0, 1),)

    for name, fold in convs.items():
        made.get_submodule(name).register_forward_pre_hook(partial(aggregate, fold=fold))
    return made


class Stem(nn.Module):
    """Folded convolutions: flatten(0, 1), bare conv and BatchNorm, reshape(T, N, ...), neuron, a bare MaxPool on spikes."""

    def __init__(self, inputs: int = 2) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1, self.pool = conv(inputs), nn.BatchNorm2d(C), lif(), nn.MaxPool2d(2)
        self.conv2, self.bn2, self.lif2 = conv(), nn.BatchNorm2d(C), lif()

    def forward(self, x: Tensor) -> Tensor:
        t, n, _, h, w = x.shape
        x = self.bn1(self.conv1(x.flatten(0, 1))).reshape(t, n, -1, h, w).contiguous()
        x = self.pool(self.lif1(x).flatten(0, 1).contiguous())
        tap = x
        x = self.bn2(self.conv2(x)).reshape(t, n, C, h // 2, w // 2)
        return (self.lif2(x).flatten(0, 1) + tap).reshape(t, n, C, h // 2, w // 2)


class Attention(nn.Module):
    """Queries, keys and values of one folded value by 1x1 convolutions over tokens; products of spikes."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.add_module(f"{name}_conv", nn.Conv1d(C, C, 1, bias=False))
            self.add_module(f"{name}_bn", nn.BatchNorm1d(C))
            self.add_module(f"{name}_lif", lif())
        self.attn_lif = lif(v_threshold=0.5)
        self.proj_conv, self.proj_bn, self.proj_lif = nn.Conv1d(C, C, 1), nn.BatchNorm1d(C), lif()

    def forward(self, x: Tensor) -> Tensor:
        t, n, c, h, w = x.shape
        tokens = x.flatten(3).flatten(0, 1)
        made = []
        for name in "qkv":
            y = self.get_submodule(f"{name}_bn")(self.get_submodule(f"{name}_conv")(tokens))
            y = self.get_submodule(f"{name}_lif")(y.reshape(t, n, c, h * w).contiguous())
            made.append(y.transpose(-1, -2).reshape(t, n, h * w, 2, c // 2).permute(0, 1, 3, 2, 4).contiguous())
        q, k, v = made
        x = ((q @ k.transpose(-2, -1)) * 0.5 @ v).transpose(3, 4).reshape(t, n, c, h * w).contiguous()
        x = self.proj_bn(self.proj_conv(self.attn_lif(x).flatten(0, 1)))
        return self.proj_lif(x.reshape(t, n, c, h, w))


class Transformer(nn.Module):
    def __init__(self, batch_first: bool = False, steps: int | None = None) -> None:
        super().__init__()
        self.batch_first, self.steps = batch_first, steps
        self.stem, self.attn = Stem(3 if steps else 2), Attention()
        self.head = nn.Linear(C, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.steps:
            x = x.unsqueeze(0).repeat(self.steps, 1, 1, 1, 1)
        if self.batch_first:
            x = x.permute(1, 0, 2, 3, 4)
        x = self.stem(x)
        x = x + self.attn(x)
        return self.head(x.flatten(3).mean(3).mean(0))


class Shortcut(nn.Module):
    """A stream of drives: conv and BatchNorm between neuron and sum, read by the next neuron and the next sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_bn = conv(2), nn.BatchNorm2d(C)
        for i in (1, 2):
            self.add_module(f"lif{i}", lif())
            self.add_module(f"conv{i}", conv())
            self.add_module(f"bn{i}", nn.BatchNorm2d(C))
        self.head_lif, self.head = lif(), nn.Linear(C, 4)

    def forward(self, x: Tensor) -> Tensor:
        t, n = x.shape[:2]
        x = self.stem_bn(self.stem(x.flatten(0, 1)))
        for i in (1, 2):
            identity = x
            x = self.get_submodule(f"lif{i}")(x.reshape(t, n, *x.shape[1:])).flatten(0, 1)
            x = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x))
            x = x + identity
        x = self.head_lif(x.reshape(t, n, *x.shape[1:]))
        return self.head(x.flatten(3).mean(3)).mean(0)


class SeqToANN(nn.Module):
    """A private container that folds time itself."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.module = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        shape = [x.shape[0], x.shape[1]]
        y = self.module(x.flatten(0, 1).contiguous())
        shape.extend(y.shape[1:])
        return y.view(shape)


class Private(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            SeqToANN(conv(2), nn.BatchNorm2d(C)), lif(), SeqToANN(nn.AvgPool2d(2)),
            SeqToANN(conv(), nn.BatchNorm2d(C)), lif(),
        )  # fmt: skip
        self.head = SeqToANN(nn.Flatten(), nn.Linear(C * 16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)).mean(0)


class Containers(nn.Module):
    """The host's container with two convolutions, or with none, and its function of a list of modules and of a resize."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layer.SeqToANNContainer(conv(2), nn.BatchNorm2d(C), conv(size=1), nn.BatchNorm2d(C))
        self.pool, self.up = layer.SeqToANNContainer(nn.AvgPool2d(2)), nn.Upsample(scale_factor=2, mode="nearest")
        self.conv2, self.bn2, self.lif1, self.lif2 = conv(), nn.BatchNorm2d(C), lif(), lif()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.seq_to_ann_forward(self.pool(self.lif1(self.first(x))), self.up)
        return self.lif2(functional.seq_to_ann_forward(x, [self.conv2, self.bn2])).mean((-1, -2)).mean(0)


class Spellings(nn.Module):
    """view, unflatten, -1, slices, chunks, a number in front, cat by a negative dimension, a clone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1 = conv(2), nn.BatchNorm2d(C), lif()
        self.conv2, self.bn2, self.lif2 = conv(), nn.BatchNorm2d(C), lif()
        self.left, self.right, self.lif3 = conv(C // 2), conv(C // 2), lif()

    def forward(self, x: Tensor) -> Tensor:
        t, n, c, h, w = x.shape
        x = self.lif1(self.bn1(self.conv1(x.reshape(t * n, c, h, w))).view(t, -1, C, h, w))
        x = 2 * self.bn2(self.conv2(torch.clone(x).view(-1, C, h, w))).unflatten(0, (t, n))
        x = self.lif2(torch.cat([x[:, :, : C // 2], x[:, :, C // 2 :]], dim=-3))
        a, b = x.flatten(0, 1).chunk(2, dim=1)
        return self.lif3((self.left(a) + self.right(b)).view(t, n, C, h, w)).mean((-2, -1)).mean(0)


class Tokens(nn.Module):
    """nn.Linear on folded tokens [T * N, L, C], BatchNorm1d between two transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.lif = conv(2), nn.BatchNorm2d(C), lif()
        self.fc1, self.bn1, self.lif1 = nn.Linear(C, 8), nn.BatchNorm1d(8), lif()
        self.fc2, self.bn2, self.lif2 = nn.Linear(8, C), nn.BatchNorm1d(C), lif()

    def forward(self, x: Tensor) -> Tensor:
        t, n = x.shape[:2]
        x = self.lif(self.bn(self.conv(x.flatten(0, 1))).reshape(t, n, C, -1)).transpose(-1, -2)
        y = self.fc1(x.flatten(0, 1))
        y = self.lif1(self.bn1(y.transpose(-1, -2)).transpose(-1, -2).reshape(t, n, -1, 8).contiguous())
        y = self.bn2(self.fc2(y.flatten(0, 1)).transpose(-1, -2)).transpose(-1, -2).reshape(t, n, -1, C)
        return self.lif2(y.contiguous()).mean(2).mean(0)


class MyLIF(neuron.LIFNode):
    """A subclass that adds a constructor and what the host does not have."""

    kind = "mine"

    def __init__(self, v_threshold: float = 1.0) -> None:
        super().__init__(
            tau=2.0, detach_reset=True, step_mode="m", surrogate_function=surrogate.ATan(), v_threshold=v_threshold
        )
        self.nickname = "a"

    def named(self) -> str:
        return self.nickname


class Conv3x3(layer.Conv2d):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1, bias=False, step_mode="m")


class Norm(layer.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, step_mode="m")


class BareConv(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 1, bias=False)


class Subclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1 = Conv3x3(2, C), Norm(C), MyLIF()
        self.conv2, self.bn2, self.lif2 = BareConv(C, C), nn.BatchNorm2d(C), MyLIF(0.8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lif1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x.flatten(0, 1)))
        return self.lif2(y.view_as(x)).mean((-2, -1)).mean(0)


class OwnNeuron(nn.Module):
    """A neuron class of one's own, with an affine leak, over frames [T, N, ...]."""

    def __init__(self, leak: float = 0.5) -> None:
        super().__init__()
        self.leak, self.spike = leak, surrogate.ATan()

    def forward(self, x: Tensor) -> Tensor:
        v, spikes = torch.zeros_like(x[0]), []
        for frame in x:
            v = self.leak * v + frame
            fired = self.spike(v - 1.0)
            v = (1 - fired.detach()) * v
            spikes.append(fired)
        return torch.stack(spikes)


class Mine(OwnNeuron):
    """Of a class that is registered, as far as its base is."""


class OwnNorm(nn.Module):
    """A norm of one's own: BatchNorm over T * N, times a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.alpha = nn.BatchNorm2d(C), 1.25

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * self.bn(x.flatten(0, 1)).view_as(x)


class Registered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.node1 = layer.Conv2d(2, C, 3, padding=1, step_mode="m"), OwnNorm(), Mine()
        self.conv2, self.bn2, self.node2 = layer.Conv2d(C, C, 3, padding=1, step_mode="m"), OwnNorm(), lif()

    def forward(self, x: Tensor) -> Tensor:
        x = self.node1(self.bn1(self.conv1(x)))
        return self.node2(self.bn2(self.conv2(x))).mean((-2, -1)).mean(0)


class Buffered(nn.Module):
    """What it is given, and a drive, are copied into tensors that the forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1 = conv(2), nn.BatchNorm2d(C), lif()
        self.conv2, self.bn2, self.lif2 = conv(), nn.BatchNorm2d(C), lif()

    def forward(self, x: Tensor) -> Tensor:
        t, n, _, h, w = x.shape
        held = torch.zeros(x.shape, dtype=x.dtype)
        held[:] = x
        drive = torch.empty(t * n, C, h, w, dtype=x.dtype)
        drive[...] = self.bn1(self.conv1(held.flatten(0, 1)))
        x = self.lif1(drive.view(t, n, C, h, w))
        return self.lif2(self.bn2(self.conv2(x.flatten(0, 1))).view(t, n, C, h, w)).mean((-2, -1)).mean(0)


class Decoder(nn.Module):
    """Transposed convolutions, the host's and torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bn1, self.lif1 = layer.Conv2d(2, C, 3, stride=2, padding=1, step_mode="m"), Norm(C), lif()
        self.up1, self.bn2, self.lif2 = layer.ConvTranspose2d(C, C, 2, stride=2, step_mode="m"), Norm(C), lif()
        self.up2, self.bn3, self.lif3 = nn.ConvTranspose2d(C, C, 2, stride=2), nn.BatchNorm2d(C), lif()

    def forward(self, x: Tensor) -> Tensor:
        t, n = x.shape[:2]
        x = self.lif2(self.bn2(self.up1(self.lif1(self.bn1(self.down(x))))))
        y = self.bn3(self.up2(x.flatten(0, 1)))
        return self.lif3(y.reshape(t, n, *y.shape[1:])).mean((-2, -1)).mean(0)


class StaticLayers(nn.Module):
    """The host's multi-step layers on an image that is expanded; a MaxPool before the first neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.bn0 = layer.Conv2d(3, C, 3, padding=1, step_mode="m"), layer.BatchNorm2d(C, step_mode="m")
        self.pool, self.lif0 = layer.MaxPool2d(2, step_mode="m"), lif()
        self.conv1, self.bn1, self.lif1 = Conv3x3(C, C), Norm(C), lif()

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0).expand(T, -1, -1, -1, -1)
        x = self.lif0(self.pool(self.bn0(self.conv0(x))))
        return self.lif1(self.bn1(self.conv1(x))).mean((-2, -1)).mean(0)


@dataclass(frozen=True)
class Idiom:
    """One net. ``converted``: the convs that an independent reader would convert; ``exact``: those of one frame alone.

    ``folded``: the convs that are handed [T * N, ...]. ``shape``: of the input.
    """

    make: Callable[[], nn.Module]
    converted: tuple[str, ...]
    folded: tuple[str, ...]
    exact: tuple[str, ...] = ()
    shape: tuple[int, ...] = (T, N, 2, SIZE, SIZE)
    layers: tuple[str, ...] = ("conv",)


_STEM = ("stem.conv1", "stem.conv2")
_ATTENTION = ("attn.q_conv", "attn.k_conv", "attn.v_conv", "attn.proj_conv")
IMAGE = (N, 3, SIZE, SIZE)
IDIOMS = {
    "folded": Idiom(Transformer, _STEM + _ATTENTION, _STEM + _ATTENTION),
    "batch first": Idiom(lambda: Transformer(True), _STEM + _ATTENTION, _STEM + _ATTENTION, shape=(N, T, 2, SIZE, SIZE)),
    "static": Idiom(lambda: Transformer(steps=T), _STEM + _ATTENTION, _STEM + _ATTENTION, ("stem.conv1",), IMAGE),
    "static layers": Idiom(StaticLayers, ("conv0", "conv1"), (), ("conv0",), IMAGE),
    "shortcut": Idiom(Shortcut, ("stem", "conv1", "conv2"), ("stem", "conv1", "conv2")),
    "private container": Idiom(
        Private, ("features.0.module.0", "features.3.module.0"), ("features.0.module.0", "features.3.module.0")
    ),
    "containers": Idiom(Containers, ("first.0", "first.2", "conv2"), ("first.0", "first.2", "conv2")),
    "spellings": Idiom(Spellings, ("conv1", "conv2", "left", "right"), ("conv1", "conv2", "left", "right")),
    "tokens": Idiom(Tokens, ("conv", "fc1", "fc2"), ("conv", "fc1", "fc2"), layers=("conv", "linear")),
    "subclasses": Idiom(Subclasses, ("conv1", "conv2"), ("conv2",)),
    "registered": Idiom(Registered, ("conv1", "conv2"), ()),
    "buffers": Idiom(Buffered, ("conv1", "conv2"), ("conv1", "conv2")),
    "decoder": Idiom(Decoder, ("down", "up1", "up2"), ("up2",)),
}
