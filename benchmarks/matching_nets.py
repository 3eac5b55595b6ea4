"""The nets that matching is measured on, in plain SpikingJelly, each with the data that it is trained on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import datasets
import gestures
import nets

Neuron = Callable[[], nn.Module]
T = 16


def _if() -> nn.Module:
    return neuron.IFNode(detach_reset=True, surrogate_function=surrogate.ATan())


def _lif(**more: Any) -> nn.Module:
    return neuron.LIFNode(tau=2.0, detach_reset=True, surrogate_function=surrogate.ATan(), **more)


def _conv(a: int, b: int, spiking: nn.Module, stride: int = 1) -> list[nn.Module]:
    return [layer.Conv2d(a, b, 3, stride, 1, bias=False), layer.BatchNorm2d(b), spiking]


def plain(widths: tuple[int | str, ...], spiking: Neuron, classes: int = 11) -> nn.Module:
    """conv -> BN -> neuron for every width, MaxPool for every "M", then Linear -> neuron -> votes, on [T, N, 2, 32, 32]."""
    modules: list[nn.Module] = []
    channels, side = 2, 32
    for width in widths:
        if isinstance(width, int):
            modules += _conv(channels, width, spiking())
            channels = width
        else:
            modules.append(layer.MaxPool2d(2, 2))
            side //= 2
    modules += [layer.Flatten(), layer.Linear(channels * side * side, 10 * classes), spiking(), layer.VotingLayer(10)]
    return _multi_step(nn.Sequential(*modules))


class Block(nn.Module):
    """A residual block whose sum is one of spikes, as SEW ResNet's with ADD."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(a, b, _lif(), stride), *_conv(b, b, _lif()))
        short = [layer.Conv2d(a, b, 1, stride, bias=False), layer.BatchNorm2d(b), _lif()]
        self.short = nn.Sequential(*short) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.short(x)


def sew(classes: int = 11) -> nn.Module:
    """A small SEW ResNet: stem and pool, four blocks, mean over space, Linear."""
    stem = [*_conv(2, 16, _lif()), layer.MaxPool2d(2, 2)]
    blocks = [Block(16, 24, 2), Block(24, 24, 1), Block(24, 48, 2), Block(48, 48, 1)]
    pool = layer.AdaptiveAvgPool2d((1, 1))
    return _multi_step(nn.Sequential(*stem, *blocks, pool, layer.Flatten(), layer.Linear(48, classes)))


def _multi_step(net: nn.Module) -> nn.Module:
    functional.set_step_mode(net, "m")
    return net


@dataclass(frozen=True)
class Task:
    """A net, its data, and how long it is trained."""

    build: Callable[[], nn.Module]
    data: str
    epochs: int
    rate: float = 3e-3


TASKS = {
    # Six convolutions, IF with hard reset.
    "IF": Task(lambda: plain((16, "M", 24, 24, "M", 32, 32, "M", 48), _if), "gestures", 12),
    "LIF": Task(lambda: nets.GestureNet(11, 24, 4, 32), "gestures", 12),
    "PLIF": Task(nets.EventNet, "nmnist", 16),
    "SEW": Task(sew, "gestures", 12),
    # Eight convolutions, LIF with soft reset.
    "VGG": Task(
        lambda: plain((16, "M", 24, 24, "M", 32, 32, "M", 48, 48, 48), lambda: _lif(v_reset=None)), "gestures", 12
    ),
}  # fmt: skip


def split(
    data: str, archive: Path | None, cache: Path, quick: bool, tested: int = 550
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Frames [T, N, 2, H, W] and labels [N] to train on, and others (``tested`` gestures). Raises DataError."""
    if data == "gestures":
        counts = (220, 110) if quick else (1650, tested)
        pairs = [gestures.generate(count, T, 32, seed, cache) for count, seed in zip(counts, (5, 6), strict=True)]
        return tuple((frames.float(), labels) for frames, labels in pairs)  # type: ignore[return-value]
    frames, labels = datasets.event_frames(datasets.read_recordings(archive or datasets.SHIPPED_EVENTS), T)
    test, train = datasets.split_off(labels, len(labels) * 3 // 11, 0)
    return (frames[:, train], labels[train]), (frames[:, test], labels[test])


def half_the_events(frames: Tensor, seed: int) -> Tensor:
    """Every event kept with probability a half."""
    generator = torch.Generator().manual_seed(seed)
    return torch.binomial(frames, torch.full_like(frames, 0.5), generator=generator)


def noisy(frames: Tensor, seed: int) -> Tensor:
    """Background events beside the recorded ones: 0.05 a pixel, polarity and frame."""
    generator = torch.Generator().manual_seed(seed)
    return frames + torch.poisson(torch.full_like(frames, 0.05), generator=generator)


SHIFTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "clean": lambda frames, seed: frames, "half": half_the_events, "noise": noisy,
}  # fmt: skip
