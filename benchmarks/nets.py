"""The nets that are measured, in plain SpikingJelly with random weights, awake: every neuron fires at 5 to 50 %."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from spikingjelly.activation_based.model import parametric_lif_net, sew_resnet, spiking_resnet, spiking_vgg
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A net and its input [T, N, C, H, W]."""

    build: Callable[[], nn.Module]
    shape: tuple[int, int, int, int, int]


def _options(**more: object) -> dict[str, object]:
    return {"surrogate_function": surrogate.ATan(), "detach_reset": True} | more


def paper_dvs(channels: int = 128) -> nn.Module:
    """The five-layer DVS net of arXiv 2603.13810: 5 x (conv, BN, LIF, pool), 64 x 64 events."""
    modules: list[nn.Module] = []
    for i in range(5):
        modules += [
            layer.Conv2d(2 if i == 0 else channels, channels, 3, padding=1, bias=False),
            layer.BatchNorm2d(channels),
            neuron.LIFNode(**_options(tau=2.0)),
            layer.MaxPool2d(2, 2),
        ]
    return nn.Sequential(*modules, layer.Flatten(), layer.Linear(channels * 4, 11))


def paper_mnist() -> nn.Module:
    """The MNIST net of arXiv 2603.13810: tau = 10, soft reset."""
    modules: list[nn.Module] = []
    for inputs, outputs in ((1, 32), (32, 64)):
        spiking = neuron.LIFNode(**_options(tau=10.0, v_reset=None))
        modules += [layer.Conv2d(inputs, outputs, 3, padding=1), layer.BatchNorm2d(outputs), spiking, layer.MaxPool2d(2, 2)]
    return nn.Sequential(*modules, layer.Flatten(), layer.Linear(64 * 49, 10))


CASES: dict[str, Case] = {
    "paper-dvs": Case(paper_dvs, (16, 4, 2, 64, 64)),
    "paper-mnist": Case(paper_mnist, (25, 32, 1, 28, 28)),
    "DVSGestureNet": Case(
        lambda: parametric_lif_net.DVSGestureNet(spiking_neuron=neuron.LIFNode, **_options()), (16, 1, 2, 128, 128)
    ),
    "CIFAR10DVSNet": Case(
        lambda: parametric_lif_net.CIFAR10DVSNet(spiking_neuron=neuron.ParametricLIFNode, **_options()), (8, 1, 2, 128, 128)
    ),
    "spiking_vgg11_bn": Case(
        lambda: spiking_vgg.spiking_vgg11_bn(spiking_neuron=neuron.LIFNode, num_classes=10, **_options()), (8, 2, 3, 32, 32)
    ),
    "sew_resnet18": Case(
        lambda: sew_resnet.sew_resnet18(spiking_neuron=neuron.LIFNode, cnf="ADD", num_classes=10, **_options()),
        (4, 2, 3, 64, 64),
    ),
    "spiking_resnet18": Case(
        lambda: spiking_resnet.spiking_resnet18(spiking_neuron=neuron.LIFNode, num_classes=10, **_options()),
        (4, 2, 3, 64, 64),
    ),
}
# The residual nets once more where convolutions weigh more than the reading of their weights.
CASES |= {
    f"{name}, 128 x 128": replace(CASES[name], shape=(4, 2, 3, 128, 128)) for name in ("sew_resnet18", "spiking_resnet18")
}


@torch.no_grad()
def make(name: str, batch: int | None = None, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    """The net in eval mode and step_mode 'm', and random events at a rate of 0.1, of its own batch or another."""
    torch.manual_seed(0)
    case = CASES[name]
    net = case.build().eval().to(device)
    functional.set_step_mode(net, "m")
    steps, usual, *frame = case.shape
    x = (torch.rand(steps, batch or usual, *frame) < 0.1).float().to(device)

    wake(net, x)
    return net, x


@torch.no_grad()
def wake(net: nn.Module, x: Tensor) -> None:
    """Move thresholds until every neuron fires at 5 to 50 % on x: random weights silence a deep net, or saturate it."""

    def adjust(module: nn.Module, args: tuple[Tensor, ...], spikes: Tensor) -> Tensor:
        for i in range(60):
            rate = spikes.mean().item()
            if 0.05 <= rate <= 0.5:
                break
            factor = 1 + 0.8 * 0.93**i
            module.v_threshold *= 1 / factor if rate < 0.05 else factor**1.3
            module.reset()
            spikes = type(module).forward(module, args[0])
        return spikes

    handles = [m.register_forward_hook(adjust) for m in net.modules() if isinstance(m, neuron.BaseNode)]
    functional.reset_net(net)
    net(x)
    for handle in handles:
        handle.remove()
    functional.reset_net(net)
