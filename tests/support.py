"""What several test files build: chains, neurons of every kind, the zoo's nets, and the chain run without sj_tac."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from spikingjelly.activation_based.model import parametric_lif_net, sew_resnet, spiking_resnet, spiking_vgg
from torch import nn

from sj_tac import host
from sj_tac.definition.convs import SharedConv
from sj_tac.tuning import measure

# Every surrogate of SpikingJelly's public list, whatever later versions add. PoissonPass is no threshold function: it takes
# h - v_threshold as a probability and raises in SpikingJelly itself when that leaves 0..1.
SURROGATES = [
    value
    for value in vars(surrogate).values()
    if isinstance(value, type)
    and issubclass(value, nn.Module)
    and not value.__name__.endswith("Base")
    and value.__name__ not in ("MultiLevelSpikeCount", "PoissonPass")
    # The backward of this one raises in the older host itself.
    and (host.IS_V2 or value.__name__ != "NonzeroSignLogAbs")
]
SURROGATES = [make() for make in SURROGATES]
SURROGATES += [surrogate.MultiLevelSpikeCount(3)] if hasattr(surrogate, "MultiLevelSpikeCount") else []


def node(kind: str, v_reset: float | None = 0.0, decay_input: bool = True, tau: float = 2.0, **more: Any) -> nn.Module:
    """A neuron in step_mode 'm'; kind: lif, plif or if."""
    more = {"step_mode": "m", "v_reset": v_reset, "surrogate_function": surrogate.ATan()} | more
    if kind == "if":
        return neuron.IFNode(**more)
    if kind == "lif":
        return neuron.LIFNode(tau=tau, decay_input=decay_input, **more)
    return neuron.ParametricLIFNode(init_tau=tau, decay_input=decay_input, **more)


only_v2 = pytest.mark.skipif(not host.IS_V2, reason="SpikingJelly before 2.0 cannot do this itself")

# Every combination of the equations' cases: (kind, v_reset, decay_input).
NEURONS = [*product(["lif", "plif"], [None, 0.0, -0.3], [True, False]), *product(["if"], [None, 0.0, -0.3], [True])]


def conv(inputs: int = 2, outputs: int = 3, **more: Any) -> nn.Module:
    more = {"kernel_size": 3, "padding": 1, "step_mode": "m"} | more
    return layer.Conv2d(inputs, outputs, **more)


def norm(channels: int = 3, train_steps: int = 3) -> nn.Module:
    """A BatchNorm2d with statistics and an affine map that are not the identity; in eval mode."""
    made = layer.BatchNorm2d(channels, step_mode="m")
    made.running_mean.uniform_(-0.5, 0.5)
    made.running_var.uniform_(0.5, 2.0)
    nn.init.uniform_(made.weight, 0.5, 1.5)
    nn.init.uniform_(made.bias, -0.2, 0.4)
    return made.eval()


def plain(*modules: nn.Module | None) -> nn.Sequential:
    """Copies of the modules as the ordinary chain."""
    return nn.Sequential(*(copy.deepcopy(m) for m in modules if m is not None))


def frames(steps: int, *shape: int, rate: float = 0.4, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random spikes [steps, *shape]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(steps, *shape, generator=generator) < rate).to(dtype)


def csnn(channels: int = 4, classes: int = 3, make: Any = None, size: int = 8) -> nn.Sequential:
    """A Sequential CSNN with three conv chains (one without BN), pools and a Linear -> neuron -> voting head."""
    make = make or (lambda: node("lif"))
    torch.manual_seed(0)
    net = nn.Sequential(
        conv(2, channels, bias=False), norm(channels), make(), layer.MaxPool2d(2, step_mode="m"),
        conv(channels, channels, bias=False), norm(channels), make(), layer.AvgPool2d(2, step_mode="m"),
        conv(channels, channels), make(),
        layer.Flatten(step_mode="m"), layer.Dropout(0.2, step_mode="m"),
        layer.Linear(channels * (size // 4) ** 2, 2 * classes, step_mode="m"), make(), layer.VotingLayer(2, step_mode="m"),
    )  # fmt: skip
    return awake(net.eval(), frames(6, 2, 2, size, size))


class _Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


class _SamplesFirst(nn.Module):
    """A neuron of one's own, which is handed [N, T, ...]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v, spikes = torch.zeros_like(x[:, 0]), []
        for drive in x.unbind(1):
            v = 0.5 * v + drive
            spikes.append((v >= 0.3).to(x))
            v = v * (1 - spikes[-1])
        return torch.stack(spikes, 1)


def no_collapse() -> nn.Sequential:
    """A net whose one convolution may be preserved and not collapsed: its neuron is handed [N, T, ...]."""
    return nn.Sequential(
        conv(), _Transposed(), _SamplesFirst(), _Transposed(), layer.MaxPool2d(2, step_mode="m"),
        layer.Flatten(step_mode="m"), layer.Linear(48, 4, step_mode="m"), node("lif"),
    ).eval()  # fmt: skip


@torch.no_grad()
def awake(net: nn.Module, x: torch.Tensor, low: float = 0.05, high: float = 0.5) -> nn.Module:
    """Move the threshold of every neuron until it fires at a rate between ``low`` and ``high`` on ``x``.

    Random weights silence a deep SNN or saturate it, and then any conversion looks right.
    """

    def adjust(module: nn.Module, args: Any, spikes: torch.Tensor) -> torch.Tensor:
        factor = 2.0
        for _ in range(60):
            rate = spikes.mean().item()
            if low <= rate <= high:
                return spikes
            module.v_threshold *= 1 / factor if rate < low else factor**1.3
            factor = max(1.02, factor**0.9)
            module.reset()
            spikes = type(module).forward(module, args[0])
        raise AssertionError(f"a {type(module).__name__} fires at {rate}, whatever its threshold")

    handles = [m.register_forward_hook(adjust) for m in net.modules() if isinstance(m, neuron.BaseNode)]
    functional.reset_net(net)
    net(x)
    for handle in handles:
        handle.remove()
    functional.reset_net(net)
    return net


def dvs_gesture(kind: Any = neuron.LIFNode) -> nn.Module:
    return parametric_lif_net.DVSGestureNet(8, spiking_neuron=kind, surrogate_function=surrogate.ATan(), detach_reset=True)


def cifar10_dvs() -> nn.Module:
    return parametric_lif_net.CIFAR10DVSNet(8, spiking_neuron=neuron.ParametricLIFNode, surrogate_function=surrogate.ATan())


def ms_resnet18() -> nn.Module:
    from spikingjelly.activation_based.model import ms_resnet

    return ms_resnet.ms_resnet18(T=4, num_classes=10)


def vgg(builder: Any, kind: Any) -> nn.Module:
    """SpikingJelly's net with a narrow classifier: 120 million weights of Linear layers are none of our business."""
    net = builder(spiking_neuron=kind, num_classes=10)
    net.classifier[0], net.classifier[3] = layer.Linear(512 * 7 * 7, 64), layer.Linear(64, 64)
    net.classifier[6] = layer.Linear(64, 10)
    return net


# name: (builder, input shape behind T and N, conv -> [BN] -> neuron chains, the reason codes of the other convs)
ZOO: dict[str, tuple[Any, tuple[int, ...], int, dict[str, int]]] = {
    "DVSGestureNet LIF": (dvs_gesture, (2, 128, 128), 5, {}),
    "DVSGestureNet PLIF": (lambda: dvs_gesture(neuron.ParametricLIFNode), (2, 128, 128), 5, {}),
    "CIFAR10DVSNet": (cifar10_dvs, (2, 128, 128), 4, {}),
    "spiking_vgg11": (lambda: vgg(spiking_vgg.spiking_vgg11, neuron.IFNode), (3, 32, 32), 8, {}),
    "spiking_vgg11_bn": (lambda: vgg(spiking_vgg.spiking_vgg11_bn, neuron.LIFNode), (3, 32, 32), 8, {}),
    "spiking_resnet18": (
        lambda: spiking_resnet.spiking_resnet18(spiking_neuron=neuron.LIFNode, num_classes=10), (3, 64, 64), 20, {},
    ),
    "sew_resnet18": (
        lambda: sew_resnet.sew_resnet18(spiking_neuron=neuron.LIFNode, cnf="ADD", num_classes=10), (3, 64, 64), 20, {},
    ),
}  # fmt: skip
if host.IS_V2:  # the older host has no such model
    ZOO["ms_resnet18"] = (ms_resnet18, (3, 64, 64), 21, {})
NEEDS_EXAMPLE = {"ms_resnet18"}


def zoo(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A net of the zoo with random weights, in eval mode and step_mode 'm', awake; and an input [5, 2, ...]."""
    torch.manual_seed(0)
    builder, shape, _, _ = ZOO[name]
    net = builder().eval()
    functional.set_step_mode(net, "m")
    x = frames(5, 2, *shape, rate=0.3)
    return awake(net, x), x


@contextmanager
def recorded(net: nn.Module, kinds: Any = neuron.BaseNode) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Outputs of every module of these types, call by call."""
    outputs: dict[str, list[torch.Tensor]] = {}
    handles = [
        m.register_forward_hook(lambda m, a, out, name=name: outputs.setdefault(name, []).append(out.detach()[:].clone()))
        for name, m in net.named_modules()
        if isinstance(m, kinds)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def at_rest(net: nn.Module, *x: torch.Tensor) -> Any:
    """What a call gives that begins and ends at rest."""
    functional.reset_net(net)
    y = net(*x)
    functional.reset_net(net)
    return y


def same_state(a: nn.Module, b: nn.Module) -> bool:
    """Equal keys in order, shapes and values of state_dict, and equal parameter names."""
    left, right = a.state_dict(), b.state_dict()
    return (
        list(left) == list(right)
        and all(torch.equal(left[key], right[key]) for key in left)
        and [n for n, _ in a.named_parameters()] == [n for n, _ in b.named_parameters()]
    )


def time_by_k(monkeypatch, each: float = 0.0) -> None:
    """Nets take the longer the smaller their largest k, whatever else this machine does; ``each``: seconds of a run."""

    def seconds(nets: Any, frames: Any, rounds: int, *_: Any) -> dict[str, list[float]]:
        time.sleep(each * rounds * len(nets))
        shared = {name: [m.sharing for m in net.modules() if isinstance(m, SharedConv)] for name, net in nets.items()}
        largest = {name: max((s.k for s in found), default=1) for name, found in shared.items()}
        return {name: [0.1 / k] * rounds for name, k in largest.items()}

    monkeypatch.setattr(measure, "_seconds", seconds)


def interrupt(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, number: int) -> None:
    """Make the ``number``-th call of ``holder.name`` a Ctrl-C."""
    run, calls = getattr(holder, name), []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == number:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    monkeypatch.setattr(holder, name, stopping)
