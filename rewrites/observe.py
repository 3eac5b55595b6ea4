"""What a sample shows of a converted net beside its source: is it slower, do neurons fire otherwise, do predictions move?"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.host import dispatch
from sj_tac.rewrites.arguments import copied
from sj_tac.rewrites.verify import tensors
from sj_tac.runtime.swaps import is_swapped
from sj_tac.verdicts import AT_RISK, HELP

SECONDS = 0.5  # for the times, beyond one run of each
ROUNDS = 7
CLEAR = 1.5  # three rounds are enough where the times differ by this factor
SLOWER = 1.05
MOVED = 0.25  # relative, of a firing rate


def observe(
    source: nn.Module, converted: nn.Module, arguments: tuple[Any, ...], *, aggregates: bool, timed: bool
) -> list[str]:
    """One sentence for each thing that a user would want to know. Both nets are left as they were.

    Args:
        aggregates: frames share drives, so that spikes may differ. timed: the kernels that run are those of later calls.
    """
    moved: list[str] = []
    if aggregates:
        before, after = _run(source, arguments), _run(converted, arguments)
        moved = _predictions(before[0], after[0]) + _rates(before[1], after[1])
    # Last, so that what a report says of the last call is said of one that nobody watched.
    found = _times(source, converted, arguments) if timed else []
    return found + ([f"{AT_RISK}: {'; '.join(moved)}; {HELP}"] if moved else [])


def _times(source: nn.Module, converted: nn.Module, arguments: tuple[Any, ...]) -> list[str]:
    taken: dict[nn.Module, list[float]] = {source: [], converted: []}
    cuda = any(p.is_cuda for p in converted.parameters())
    start = time.perf_counter()
    with host.looked_at(source), host.looked_at(converted):
        while not taken[source] or (len(taken[source]) < ROUNDS and time.perf_counter() - start < SECONDS):
            if len(taken[source]) == 3 and not 1 / CLEAR < _ratio(taken[source], taken[converted]) < CLEAR:
                break
            for net, seconds in taken.items():
                # Twice, so that a net follows itself, and not another that filled the caches.
                for _ in range(2):
                    host.reset_memories(net)
                    began = time.perf_counter()
                    net(*copied(arguments))
                    if cuda:
                        torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
    if _ratio(taken[source], taken[converted]) <= SLOWER:
        return []
    before, after = (1e3 * statistics.median(seconds) for seconds in taken.values())
    return [
        f"slower than its source on this sample: {after:.3g} ms for {before:.3g} ms; sj_tac.search finds layers that gain"
    ]


def _ratio(before: list[float], after: list[float]) -> float:
    return statistics.median(after) / statistics.median(before)


def _run(net: nn.Module, arguments: tuple[Any, ...]) -> tuple[list[Tensor], dict[str, float]]:
    """Outputs, and the firing rate of every neuron."""
    rates: dict[str, float] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, spikes: Any) -> None:
            if isinstance(spikes, Tensor):
                rates[name] = float(dispatch.unwrapped(spikes).float().mean())

        return hook

    with host.looked_at(net), _uncounted(net):
        host.reset_memories(net)
        for name, module in net.named_modules():
            if host.is_neuron(module) or host.is_registered_neuron(module):
                module.register_forward_hook(note(name))
        return tensors(net(*copied(arguments))), rates


@contextlib.contextmanager
def _uncounted(net: nn.Module) -> Iterator[None]:
    """Frames that are made for a hook of ours are nothing that a report should tell."""
    roles: list[Any] = [m._tac for m in net.modules() if is_swapped(m)]
    counts: list[Any] = [role.made for role in roles if hasattr(role, "made")]
    kept = [dict(count) for count in counts]
    try:
        yield
    finally:
        for count, before in zip(counts, kept, strict=True):
            count.clear()
            count.update(before)


def _predictions(before: list[Tensor], after: list[Tensor]) -> list[str]:
    """How many predictions moved, where the output is class scores [N, C] or [T, N, C]."""
    if len(before) != 1 or len(after) != 1 or before[0].dim() not in (2, 3) or before[0].shape[-1] < 2:
        return []
    a, b = (x.float().mean(0) if x.dim() == 3 else x for x in (before[0], after[0]))
    if a.shape != b.shape:
        return []
    moved = int((a.argmax(-1) != b.argmax(-1)).sum())
    if not moved:
        return []
    return [f"{moved} of {a.shape[0]} samples get another prediction than from the source"]


def _rates(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """The neuron whose firing rate moved most, and how many moved by more than a quarter."""
    moved = {
        name: after[name] / rate - 1
        for name, rate in before.items()
        if rate > 0.01 and name in after and abs(after[name] / rate - 1) > MOVED
    }
    if not moved:
        return []
    name = max(moved, key=lambda n: abs(moved[n]))
    return [
        f"{len(moved)} of {len(before)} neurons fire at another rate than in the source, most of all {name!r}: "
        f"{before[name]:.3f} -> {after[name]:.3f}"
    ]
