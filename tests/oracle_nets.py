"""The nets of ``oracle.py``, with small inputs: of benchmarks/nets.py, benchmarks/zoo_nets.py and tests/idioms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from idioms import test_idioms
from spikingjelly.activation_based import functional
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks import nets, zoo_nets

Make = Callable[[], tuple[nn.Module, Tensor]]


@dataclass(frozen=True)
class Subject:
    """A net that is looked at: how it and its input are made, which kinds of layers it converts, and how closely to look."""

    make: Make
    depth: str = "all"
    layers: tuple[str, ...] = ("conv",)


# Any number of steps fits these, and the last group of an odd one is short.
ODD = ("Plain CNNs", "VGG", "Spiking ResNets", "SEW ResNets")
# Convolutions with many channels at the full size of the image.
WIDE = ("max_resnet18", "maxformer_cifar", "spikformer_cifar10")


def fit(net: nn.Module, x: Tensor) -> None:
    """Make the Linear layers that were made for larger images anew, for what they are given on ``x``."""

    def resize(module: Any, args: tuple[Tensor, ...]) -> None:
        inputs = args[0].shape[-1]
        if inputs != module.in_features:
            module.in_features = inputs
            module.weight = nn.Parameter(torch.randn(module.out_features, inputs, dtype=x.dtype) / inputs**0.5)

    handles = [m.register_forward_pre_hook(resize) for m in net.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()


def wake(net: nn.Module, x: Tensor) -> None:
    """Give norms statistics and an affine map that are not the identity, and move thresholds until neurons fire."""
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        if norm.affine:
            nn.init.uniform_(norm.weight, 0.7, 1.3)
            nn.init.uniform_(norm.bias, -0.1, 0.3)
    # In training mode first: what comes to a norm then depends on neurons that fire, and not on its own old statistics.
    nets.wake(net.train(), x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    nets.wake(net.eval(), x)


def built(build: Callable[[], nn.Module], shape: tuple[int, ...], rate: float | None = None) -> tuple[nn.Module, Tensor]:
    """A net in float64 and its input: images, or events at this rate. Frames [T, N, ...] make it multi-step and awake."""
    torch.manual_seed(0)
    net = build().eval().double()
    x = torch.rand(shape, dtype=torch.float64)
    x = x if rate is None else (x < rate).double()
    if len(shape) == 5:
        functional.set_step_mode(net, "m")
        fit(net, x)
        wake(net, x)
    return net, x


def smaller(shape: tuple[int, ...], size: int, steps: int = 0) -> tuple[int, ...]:
    """The same kind of input in a batch of two, with maps of at most this size; ``steps``: in place of its own."""
    *front, channels, height, width = shape
    front = [steps or front[0], 2] if len(front) == 2 else [2]
    return (*front, channels, min(height, size), min(width, size))


def depth_of(name: str, case: zoo_nets.Case) -> str:
    """How closely to look at a net of the zoo: its verdicts tell of the deepest ones, which repeat the same blocks."""
    if not case.multi_step:
        return "step by step" if name.startswith("ottt") else "verdicts"
    if "101" in name or "152" in name:
        return "verdicts"
    return "all" if case.family == "Plain CNNs" else "some"


def of_zoo(name: str, case: zoo_nets.Case) -> Subject:
    """A net of the zoo."""
    depth = depth_of(name, case)
    size = 16 if name in WIDE else 32
    steps = (5 if depth == "all" else 3) if case.family in ODD else 0
    return Subject(partial(built, case.build, smaller(case.shape, size, steps)), depth)


def of_nets(name: str, case: nets.Case) -> Subject:
    """A net of benchmarks/nets.py, whose input is events."""
    # The zoo's DVSGestureNet has a quarter of the channels, and is looked at closely.
    small = name in ("paper-dvs", "paper-mnist", "CIFAR10DVSNet")
    build = partial(narrow, case.build) if "vgg" in name else case.build
    return Subject(partial(built, build, smaller(case.shape, 32, 5 if small else 3), 0.1), "all" if small else "some")


def narrow(build: Callable[[], nn.Module]) -> nn.Module:
    """A VGG with the classifier that the zoo's have."""
    return zoo_nets._narrow(build())


def subjects() -> dict[str, Subject]:
    """Every net by its name."""
    found: dict[str, Subject] = {}
    for name, idiom in test_idioms.IDIOMS.items():
        found[f"idiom {name}"] = Subject(partial(test_idioms.make, name, torch.float64), "all", idiom.layers)
    # Left out are the same nets with larger maps.
    found |= {f"net {name}": of_nets(name, case) for name, case in nets.CASES.items() if "128 x 128" not in name}
    return found | {f"zoo {name}": of_zoo(name, case) for name, case in zoo_nets.CASES.items()}
