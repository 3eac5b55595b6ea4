"""Miniature nets with constants between convolution and neuron."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from idioms.miniatures import SIZE, C, Idiom, conv, lif
from spikingjelly.activation_based import layer
from torch import Tensor, nn


class Constants(nn.Module):
    """A LayerScale in front of a residual, a gain that is a parameter's sigmoid, a positional embedding, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1 = conv(2), nn.BatchNorm2d(C), lif()
        self.conv2, self.bn2, self.lif2 = conv(), nn.BatchNorm2d(C), lif()
        self.conv3, self.bn3, self.lif3 = layer.Conv2d(C, C, 1, step_mode="m"), layer.BatchNorm2d(C, step_mode="m"), lif()
        self.scale, self.gain = nn.Parameter(torch.rand(C) + 0.5), nn.Parameter(torch.tensor(0.7))
        self.place = nn.Parameter(torch.rand(1, C, SIZE, SIZE) * 0.2)
        self.register_buffer("lift", torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        t, n, _, h, w = x.shape
        x = self.bn1(self.conv1(x.flatten(0, 1))) * torch.sigmoid(self.gain) + self.place
        x = self.lif1(x.unflatten(0, (t, n)))
        y = self.bn2(self.conv2(x.flatten(0, 1))) * self.scale.unsqueeze(0).unsqueeze(-1).unsqueeze(-1)
        x = self.lif2(x + y.reshape(t, n, C, h, w))
        x = self.lift + self.bn3(self.conv3(x)) / self.scale[:, None, None]
        return self.lif3(self.place[0] - x.neg()).mean((-2, -1)).mean(0)


class Surroundings(nn.Module):
    """Borders of zeros, channels that become places, torch's own Dropout in eval mode, casts to the dtype that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1 = nn.Conv2d(2, 4 * C, 3, bias=False), nn.BatchNorm2d(4 * C), lif()
        self.conv2, self.bn2, self.lif2 = nn.Conv2d(C, C, 3, bias=False), nn.BatchNorm2d(C), lif()
        self.pad, self.shuffle, self.drop = nn.ZeroPad2d(1), nn.PixelShuffle(2), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        t, n = x.shape[:2]
        y = self.drop.eval()(self.shuffle(self.pad(self.bn1(self.conv1(x.flatten(0, 1))))))
        x = self.lif1(y.to(x.dtype).unflatten(0, (t, n)))
        y = F.pad(F.dropout(self.bn2(self.conv2(x.flatten(0, 1))), 0.2, False).type_as(x), (1, 1, 0, 2), value=0.3)
        return self.lif2(y.unflatten(0, (t, n))).mean((-2, -1)).mean(0)


class Bordered(nn.Module):
    """BatchNorm with a border of what it makes of zeros, as reparametrised convolutions have between their 1x1 and 3x3."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(features)

    def forward(self, x: Tensor) -> Tensor:
        bn, out = self.bn, F.pad(self.bn(x), [1] * 4)
        border = bn.bias.detach() - bn.running_mean * bn.weight.detach() / torch.sqrt(bn.running_var + bn.eps)
        border = border.view(1, -1, 1, 1)
        out[:, :, 0:1, :] = border
        out[:, :, -1:, :] = border
        out[:, :, :, 0:1] = border
        out[:, :, :, -1:] = border
        return out


class Reparametrised(nn.Module):
    """A 3x3 convolution as 1x1, depthwise 3x3 and 1x1, with a norm behind each but the second, and a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1 = conv(2), nn.BatchNorm2d(C), lif()
        self.body = nn.Sequential(
            nn.Conv2d(C, C, 1, bias=False),
            Bordered(C),
            nn.Sequential(nn.Conv2d(C, C, 3, groups=C, bias=False), nn.Conv2d(C, C, 1, bias=False), nn.BatchNorm2d(C)),
        )
        self.bn2, self.lif2 = nn.BatchNorm2d(C), lif()
        self.conv3, self.bn3, self.lif3 = conv(), nn.BatchNorm2d(C), lif()

    def forward(self, x: Tensor) -> Tensor:
        t, n, _, h, w = x.shape
        x = self.lif1(self.bn1(self.conv1(x.flatten(0, 1))).unflatten(0, (t, n)))
        x = x + self.bn2(self.body(x.flatten(0, 1))).reshape(t, n, C, h, w)
        x = self.lif2(x)
        return self.lif3(self.bn3(self.conv3(x.flatten(0, 1))).unflatten(0, (t, n))).mean((-2, -1)).mean(0)


FURTHER = {
    "reparametrised": Idiom(Reparametrised, *[("conv1", "body.0", "body.2.0", "body.2.1", "conv3")] * 2),
    "constants": Idiom(Constants, ("conv1", "conv2", "conv3"), ("conv1", "conv2")),
    "surroundings": Idiom(Surroundings, ("conv1", "conv2"), ("conv1", "conv2")),
}
