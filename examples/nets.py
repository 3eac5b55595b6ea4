"""The two convolutional SNNs of the quickstart, written in plain SpikingJelly.

Nothing here knows of sj_tac: these are the nets as a user has them, with the checkpoints that ``train.py`` makes.
"""

from __future__ import annotations

from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

DIGITS_T = 16
EVENTS_T = 32


def _block(in_channels: int, out_channels: int, spiking: nn.Module) -> list[nn.Module]:
    return [
        layer.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        layer.BatchNorm2d(out_channels),
        spiking,
        layer.MaxPool2d(2, 2),
    ]


def _classifier(features: int, spiking: nn.Module) -> nn.Sequential:
    return nn.Sequential(layer.Flatten(), layer.Dropout(0.25), layer.Linear(features, 100), spiking, layer.VotingLayer(10))


class DigitNet(nn.Module):
    """Rate-coded MNIST: spikes [T, N, 1, 28, 28] in, votes [T, N, 10] out (class score: the mean over T)."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()

        def lif() -> nn.Module:
            return neuron.LIFNode(tau=2.0, detach_reset=True, surrogate_function=surrogate.ATan())

        self.features = nn.Sequential(*_block(1, channels, lif()), *_block(channels, 2 * channels, lif()))
        self.classifier = _classifier(2 * channels * 7 * 7, lif())
        functional.set_step_mode(self, "m")

    def forward(self, x):
        return self.classifier(self.features(x))


class EventNet(nn.Module):
    """N-MNIST event frames: [T, N, 2, 34, 34] in, votes [T, N, 10] out; its neurons learn their time constants."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()

        def plif() -> nn.Module:
            return neuron.ParametricLIFNode(init_tau=1.5, detach_reset=True, surrogate_function=surrogate.ATan())

        self.features = nn.Sequential(
            *_block(2, channels, plif()),
            *_block(channels, 2 * channels, plif()),
            *_block(2 * channels, 2 * channels, plif()),
        )
        self.classifier = _classifier(2 * channels * 4 * 4, plif())
        functional.set_step_mode(self, "m")

    def forward(self, x):
        return self.classifier(self.features(x))
