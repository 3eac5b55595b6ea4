"""The nets of SpikingJelly's model zoo with small inputs: every builder of ``spikingjelly.activation_based.model``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from spikingjelly.activation_based import layer, model, neuron, surrogate
from spikingjelly.activation_based.model import (
    parametric_lif_net,
    sew_resnet,
    snas_net,
    spike_dhs,
    spiking_resnet,
    spiking_vgg,
    spiking_vggws_ottt,
)
from torch import nn


@dataclass(frozen=True)
class Case:
    """A builder and its input: [T, N, C, H, W], or [N, C, H, W] for nets that step through time themselves."""

    family: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    multi_step: bool = True


def _neuron(**more: Any) -> dict[str, Any]:
    return {"spiking_neuron": neuron.LIFNode, "surrogate_function": surrogate.ATan(), "detach_reset": True} | more


def _narrow(net: Any) -> nn.Module:
    """A VGG with a narrow classifier: 120 million weights of Linear layers are none of our business."""
    linears = [i for i, m in enumerate(net.classifier) if isinstance(m, nn.Linear)]
    sizes = [512 * 7 * 7, 64, 64, 10]
    for i, inputs, outputs in zip(linears, sizes, sizes[1:], strict=False):
        net.classifier[i] = type(net.classifier[i])(inputs, outputs)
    return net


def _builders(module: Any, prefix: str) -> list[str]:
    return [name for name in module.__all__ if name.startswith(prefix) and callable(getattr(module, name))]


CASES: dict[str, Case] = {}
for _name, _shape in {
    "MNISTNet": (4, 2, 1, 28, 28), "FashionMNISTNet": (4, 2, 1, 28, 28), "NMNISTNet": (4, 2, 2, 34, 34),
    "CIFAR10Net": (4, 1, 3, 32, 32), "CIFAR10DVSNet": (4, 1, 2, 128, 128), "DVSGestureNet": (4, 1, 2, 128, 128),
}.items():  # fmt: skip
    CASES[_name] = Case(
        "Plain CNNs",
        lambda n=_name: getattr(parametric_lif_net, n)(channels=32, **_neuron()),
        _shape,
    )
for _name in _builders(spiking_vgg, "spiking_vgg"):
    CASES[_name] = Case(
        "VGG",
        lambda n=_name: _narrow(getattr(spiking_vgg, n)(num_classes=10, **_neuron())),
        (4, 1, 3, 32, 32),
    )
for _name in _builders(spiking_resnet, "spiking_"):
    CASES[_name] = Case(
        "Spiking ResNets",
        lambda n=_name: getattr(spiking_resnet, n)(num_classes=10, **_neuron()),
        (4, 1, 3, 64, 64),
    )
for _name in _builders(sew_resnet, "sew_res") + _builders(sew_resnet, "sew_wide"):
    CASES[_name] = Case(
        "SEW ResNets",
        lambda n=_name: getattr(sew_resnet, n)(num_classes=10, cnf="ADD", **_neuron()),
        (4, 1, 3, 64, 64),
    )
CASES["sew_resnet18, IAND"] = Case(
    "SEW ResNets", lambda: sew_resnet.sew_resnet18(num_classes=10, cnf="IAND", **_neuron()), (4, 1, 3, 64, 64)
)
for _name in ("ms_resnet18", "ms_resnet34", "max_resnet18"):
    _size = 32 if _name == "max_resnet18" else 64
    CASES[_name] = Case(
        "MS and max ResNets", lambda n=_name: getattr(model, n)(T=4, num_classes=10), (4, 1, 3, _size, _size)
    )
CASES["att_ms_resnet18"] = Case("MS and max ResNets", lambda: model.att_ms_resnet18(T=4, num_classes=10), (4, 1, 3, 64, 64))
CASES["masnn_dvs128_gesture"] = Case("Attention CNN", lambda: model.masnn_dvs128_gesture(T=10), (10, 1, 2, 32, 32))
_SIZES = {"img_size_h": 64, "img_size_w": 64}
CASES |= {
    "spikformer_ti": Case("Transformers", lambda: model.spikformer_ti(T=4, num_classes=10, **_SIZES), (4, 1, 3, 64, 64)),
    "spikformer_s": Case("Transformers", lambda: model.spikformer_s(T=4, num_classes=10, **_SIZES), (4, 1, 3, 64, 64)),
    "spikformer_cifar10": Case("Transformers", lambda: model.spikformer_cifar10(T=4), (4, 1, 3, 32, 32)),
    "qkformer_10_384": Case("Transformers", lambda: model.qkformer_10_384(T=4, num_classes=10), (4, 1, 3, 64, 64)),
    "maxformer_10_384": Case("Transformers", lambda: model.maxformer_10_384(T=4, num_classes=10), (4, 1, 3, 64, 64)),
    "maxformer_cifar": Case("Transformers", lambda: model.maxformer_cifar(T=4), (4, 1, 3, 32, 32)),
    "sdt_8_384": Case("Transformers", lambda: model.sdt_8_384(T=4, num_classes=10), (4, 1, 3, 64, 64)),
}
for _name in _builders(spiking_vggws_ottt, "ottt_"):
    CASES[_name] = Case(
        "Online training (OTTT)",
        lambda n=_name: getattr(spiking_vggws_ottt, n)(num_classes=10),
        (1, 3, 32, 32),
        False,
    )


def _snasnet() -> nn.Module:
    options = SimpleNamespace(
        timestep=3, second_avgpooling=2, dataset="cifar10", celltype="forward", threshold=1.0, tau=4 / 3
    )
    cells = np.array([[0, 2, 3, 1], [0, 0, 3, 4], [0, 0, 0, 2], [0, 0, 0, 0]])
    return snas_net.SNASNet(options, cells)


def _spike_dhs() -> nn.Module:
    options = SimpleNamespace(fea_step=3, fea_num_layers=8, fea_block_multiplier=3, fea_filter_multiplier=48)
    net = spike_dhs.SpikeDHS(3, options)
    for module in net.modules():
        if isinstance(module, (layer.Conv2d, layer.BatchNorm2d, layer.Linear, neuron.BaseNode)):
            module.step_mode = "m"
    return net


CASES["SNASNet"] = Case("Architecture search", _snasnet, (1, 3, 32, 32), False)
CASES["SpikeDHS"] = Case("Architecture search", _spike_dhs, (1, 3, 32, 32), False)
