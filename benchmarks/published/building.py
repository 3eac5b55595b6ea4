"""A published model from its checkout: imported where it lies, with seeded weights, and awake."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn

import sj_tac
from benchmarks.published import stubs
from benchmarks.published.cases import SAMPLES, Case

LOW, HIGH = 0.05, 0.5
BATCHES = 3


def load(case: Case, folder: Path) -> Any:
    """The imported file of a case. This process can then import no other model that has modules of the same names."""
    checkout = folder / case.repository
    if not (checkout / case.file).exists():
        raise FileNotFoundError(f"{case.repository}/{case.file} is not there")
    stubs.install()
    importlib.import_module("sj_tac.compat.clock_driven")
    importlib.import_module("sj_tac.compat.backends")
    start = checkout / case.root if case.root else (checkout / case.file).parent
    sys.path.insert(0, str(start.resolve()))
    for package in case.bare:
        stubs.bare_package(package, str(start.resolve() / package.replace(".", "/")))
    path = (checkout / case.file).resolve().relative_to(start.resolve())
    return importlib.import_module(".".join(path.with_suffix("").parts))


def sample(case: Case, seed: int) -> Tensor:
    """A random input: normal images, or events at a rate of about 0.1 of a smooth pattern that drifts a pixel a step."""
    generator = torch.Generator().manual_seed(seed)
    if not case.events:
        return torch.randn(case.shape, generator=generator)
    # In front stand time and batch, in either order, or a batch alone.
    *front, channels, height, width = case.shape
    coarse = torch.rand(SAMPLES * channels, 1, height // 8 + 1, width // 8 + 1, generator=generator)
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bilinear").view(SAMPLES, channels, height, width)
    steps = math.prod(front) // SAMPLES
    drifting = torch.stack([smooth.roll((t, t), (-2, -1)) for t in range(steps)])
    if front[0] == SAMPLES:
        drifting = drifting.transpose(0, 1)
    rate = 0.3 * drifting.reshape(case.shape) ** 1.5
    return (torch.rand(case.shape, generator=generator) < rate).float()


def make(case: Case, folder: Path) -> nn.Module:
    """The model in eval mode, awake."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    net = case.build(load(case, folder))
    for kind in {type(m) for m in net.modules() if type(m).__name__ in case.registered}:
        sj_tac.register_neuron(kind, decay=case.registered[kind.__name__])
    reset(net)
    wake(net, case)
    return net.eval()


def reset(net: nn.Module) -> None:
    """Forget the membranes."""
    functional.reset_net(net)


def neurons(net: nn.Module, case: Case) -> dict[str, nn.Module]:
    """SpikingJelly's neurons and the model's own, by name."""
    own = case.neurons
    return {n: m for n, m in net.named_modules() if isinstance(m, neuron.BaseNode) or type(m).__name__ in own}


@contextmanager
def hooked(handles: list[Any]) -> Iterator[None]:
    """Take the hooks away again."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def wake(net: nn.Module, case: Case) -> None:
    """Give BatchNorm the statistics of a few batches, then move thresholds until neurons fire at 5 to 50 %.

    Random weights silence a deep net, or saturate it; then anything agrees with anything.
    """
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    for norm in norms:
        # Residual branches that start at zero drive no neuron, whatever its threshold.
        if norm.weight is not None and not norm.weight.any():
            nn.init.ones_(norm.weight)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    net.train()
    for seed in range(BATCHES):
        reset(net)
        net(sample(case, 100 + seed))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    net.eval()
    reset(net)

    def adjust(module: Any, args: tuple[Tensor, ...], spikes: Tensor) -> Tensor:
        for i in range(60):
            rate = spikes.mean().item()
            if LOW <= rate <= HIGH:
                break
            factor = 1 + 0.8 * 0.93**i
            module.v_threshold *= 1 / factor if rate < LOW else factor**1.3
            module.reset()
            spikes = type(module).forward(module, *args)
        return spikes

    movable = [
        m for m in neurons(net, case).values() if isinstance(m, neuron.BaseNode) and isinstance(m.v_threshold, (int, float))
    ]
    with hooked([m.register_forward_hook(adjust) for m in movable if m.step_mode == "m"]):
        net(sample(case, 100))
    reset(net)


@torch.no_grad()
def rates(net: nn.Module, case: Case, x: Tensor) -> dict[str, float]:
    """The firing rate of every neuron on x."""
    seen: dict[str, float] = {}

    def look(name: str) -> Any:
        return lambda module, args, spikes: seen.update({name: float(spikes.mean())})

    with hooked([m.register_forward_hook(look(n)) for n, m in neurons(net, case).items()]):
        reset(net)
        net(x)
    reset(net)
    return seen
