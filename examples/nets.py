"""The two convolutional SNNs of the quickstart, written in plain SpikingJelly.

Nothing here knows of sj_tac: these are the nets as a user has them, with the checkpoints that ``train.py`` makes.
"""

from __future__ import annotations

from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

DIGITS_T = 16
EVENTS_T = 32


def _block(in_channels: int, out_channels: int, spiking: nn.Module, padding: int = 1) -> list[nn.Module]:
    return [
        layer.Conv2d(in_channels, out_channels, kernel_size=3, padding=padding, bias=False),
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


class PaperImageNet(nn.Module):
    """The rate-coded images' net of arXiv 2603.13810: tau = 10, soft reset; spikes [T, N, 10] out, counted for the score.

    Args:
        decay_input: the input gain of the hidden neurons: 1, the paper's, or SpikingJelly's own default, 1/tau. The output
            neurons, which no BatchNorm feeds, have 1/tau in both cases: with 1 they saturate, and training is slow to start.
        printed: the net as the paper prints it: convolutions without padding, and 128 spiking neurons before the last ten.
    """

    def __init__(self, channels: int = 32, decay_input: bool = False, printed: bool = False) -> None:
        super().__init__()

        def lif(decay_input: bool) -> nn.Module:
            spiking = surrogate.ATan()
            return neuron.LIFNode(10.0, decay_input, v_reset=None, detach_reset=True, surrogate_function=spiking)

        padding, side = (0, 5) if printed else (1, 7)
        first = _block(1, channels, lif(decay_input), padding)
        self.features = nn.Sequential(*first, *_block(channels, 2 * channels, lif(decay_input), padding))
        features = 2 * channels * side * side
        hidden = [layer.Linear(features, 128), lif(True)] if printed else []
        self.classifier = nn.Sequential(layer.Flatten(), *hidden, layer.Linear(128 if printed else features, 10), lif(True))
        functional.set_step_mode(self, "m")

    def forward(self, x):
        return self.classifier(self.features(x))


class GestureNet(nn.Module):
    """Blocks of conv -> BN -> LIF -> pool on event frames [T, N, 2, size, size]; votes [T, N, classes] out.

    With 5 blocks of 128 channels and a size of 64 it is the DVS net of arXiv 2603.13810 but for the voting layer, which
    SpikingJelly's own DVSGestureNet has.
    """

    def __init__(self, classes: int = 11, channels: int = 128, blocks: int = 5, size: int = 64) -> None:
        super().__init__()
        if size % 2**blocks:
            raise ValueError(f"{blocks} blocks halve the frame {blocks} times, but {size} pixels are not whole after that")

        def lif() -> nn.Module:
            return neuron.LIFNode(tau=2.0, detach_reset=True, surrogate_function=surrogate.ATan())

        widths = [2] + [channels] * blocks
        modules = [_block(widths[i], widths[i + 1], lif()) for i in range(blocks)]
        self.features = nn.Sequential(*[module for block in modules for module in block])
        side = size // 2**blocks
        votes = layer.Linear(channels * side * side, 10 * classes)
        self.classifier = nn.Sequential(layer.Flatten(), layer.Dropout(0.25), votes, lif(), layer.VotingLayer(10))
        functional.set_step_mode(self, "m")

    def forward(self, x):
        return self.classifier(self.features(x))
