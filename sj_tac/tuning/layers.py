"""Firing rates and time of every layer, of the source and of its conversion."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from sj_tac import host
from sj_tac.rewrites.gate import as_defined
from sj_tac.tuning.batches import Batch, collect
from sj_tac.tuning.measure import firing, run, run_batch


class LayerMeasure(NamedTuple):
    """One module of a net, before and after conversion.

    Attributes:
        name: qualified name.
        kind: its class.
        rate_before: of the source, spikes per neuron and step; None of what is no neuron.
        rate_after: of the converted net.
        ms_before: of the source, milliseconds of its calls in one forward.
        ms_after: of the converted net.
    """

    name: str
    kind: str
    rate_before: float | None
    rate_after: float | None
    ms_before: float | None
    ms_after: float | None


def measure_layers(source: nn.Module, converted: nn.Module, batches: Any, rounds: int = 5) -> tuple[LayerMeasure, ...]:
    """What every layer of both nets fires and takes; they are left as they were.

    Args:
        batches: frames [T, N, C, H, W], or (frames, labels), or a list of them. Times are of the first.
        rounds: timed calls of each net, in turns; the medians count.

    Raises:
        BatchError: no usable batch, or a net does not run on one.
    """
    held = collect(batches, source)
    for net in (source, converted):
        with host.looked_at(net):
            run_batch(net, held[0], 0)
    rates = [firing(net, held) for net in (source, converted)]
    times = _times((source, converted), held[0], rounds)
    found = []
    for name, module in source.named_modules():
        fires, takes = [r.get(name, (None, 0))[0] for r in rates], [t.get(name) for t in times]
        if any(value is not None for value in (*fires, *takes)):
            found.append(LayerMeasure(name, type(module).__name__, *fires, *takes))
    return tuple(found)


def _times(nets: tuple[nn.Module, nn.Module], batch: Batch, rounds: int) -> list[Mapping[str, float]]:
    """Milliseconds of every leaf of each net, medians of rounds in turns."""
    rounds_of: list[dict[str, list[float]]] = [{}, {}]
    for number in range(rounds + 1):
        for net, taken in zip(nets, rounds_of, strict=True):
            for name, seconds in _one(net, batch).items():
                if number:  # the first call warms up
                    taken.setdefault(name, []).append(seconds * 1000)
    return [{name: statistics.median(ms) for name, ms in taken.items()} for taken in rounds_of]


def _one(net: nn.Module, batch: Batch) -> dict[str, float]:
    """Seconds of every layer of SpikingJelly's and every leaf in one call."""
    seconds: dict[str, float] = {}
    entered: list[float] = []
    cuda = batch.frames.is_cuda

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def leave(name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            seconds[name] = seconds.get(name, 0.0) + now() - entered.pop()

        return note

    with host.looked_at(net), as_defined():
        for name, module in _leaves(net).items():
            module.register_forward_pre_hook(lambda module, args: entered.append(now()))
            module.register_forward_hook(leave(name))
        run(net, batch.fresh())
    return seconds


def _leaves(net: nn.Module) -> dict[str, nn.Module]:
    """What has no layers inside: a neuron's surrogate function is none."""
    neurons = [name for name, module in net.named_modules() if isinstance(module, host.neuron.BaseNode)]
    return {
        name: module
        for name, module in net.named_modules()
        if name in neurons or (not any(module.children()) and not any(name.startswith(f"{n}.") for n in neurons))
    }
