"""``fire`` on the CPU beside a copy of as many bytes, and what a step of a neuron takes.

    python -m benchmarks.bandwidth --keep-memory

A copy reads and writes as much as ``fire``: drives, once a group, sums of the groups' spikes, and voltages. Where
k is large ``fire`` is bound by the instructions of its steps, T of them at any k.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import layer, neuron

from benchmarks.measure import LAST, interleaved, parsed, parser, save_rows
from sj_tac.kernels import fire as kernels, fire_op

STEPS, BATCH, CHANNELS = 16, 4, 128
KS = (1, 2, 4, 8)
SIZES, DTYPES = (64, 16), (torch.float32, torch.bfloat16)
# Of calls that are timed together, so that a clock tells them apart.
SECONDS = 0.02


class Timed(NamedTuple):
    """A call, and how many bytes it moves."""

    call: Callable[[], Any]
    moved: int


def fired(size: int, k: int, pooled: bool, last: bool, dtype: torch.dtype) -> Timed:
    """``fire`` as a converted layer runs it, behind a BatchNorm and in front of a convolution that takes sums."""
    torch.manual_seed(0)
    y = torch.randn(STEPS // k * BATCH, CHANNELS, size, size).mul_(0.6).add_(0.3).to(dtype)
    y = y.to(memory_format=torch.channels_last) if last else y
    y = y.unflatten(0, (STEPS // k, BATCH))
    node, pool = neuron.LIFNode(step_mode="m").eval(), layer.MaxPool2d(2, step_mode="m") if pooled else None
    affine = torch.ones(CHANNELS), torch.zeros(CHANNELS)
    weights = torch.full((STEPS,), 1 / k) if k > 1 else None
    call = kernels.Call(y, node, [k] * len(y), None, None, *affine, pool, weights, k if k > 1 else 1)
    operands = kernels.operands(call, None)
    moved = sum(x.numel() * x.element_size() for x in (y, *fire_op.fire_now(*operands)))
    return Timed(lambda: fire_op.fire_now(*operands), moved)


def copied(moved: int) -> Timed:
    """A copy that reads and writes so many bytes in all."""
    source, target = torch.ones(2, moved // 8)
    return Timed(lambda: target.copy_(source), moved)


def _repeated(call: Callable[[], Any], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def row(size: int, pooled: bool, last: bool, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Gigabytes a second of ``fire`` and of a copy, and picoseconds of a neuron's step, by k."""
    name = f"{size} x {size}, {'2x2 pool' if pooled else 'no pool'}, {str(dtype).removeprefix('torch.')}{LAST * last}"
    found: dict[str, Any] = {"name": name}
    for k in KS:
        timed = {"fire": fired(size, k, pooled, last, dtype)}
        timed["copy"] = copied(timed["fire"].moved)
        once = {key: statistics.median(s) for key, s in interleaved({n: t.call for n, t in timed.items()}, 5, name).items()}
        times = {key: max(1, round(SECONDS / seconds)) for key, seconds in once.items()}
        runs = {key: _repeated(t.call, times[key]) for key, t in timed.items()}
        medians = {key: statistics.median(s) / times[key] for key, s in interleaved(runs, rounds, name).items()}
        found |= {f"{key} k={k}": timed[key].moved / medians[key] / 1e9 for key in timed}
        found[f"step k={k}"] = medians["fire"] / (STEPS * BATCH * CHANNELS * size * size) * 1e12
    return found


@torch.no_grad()
def main() -> None:
    options = parsed(parser(__doc__ or ""))
    cases = itertools.product(SIZES, (True, False), DTYPES, (False, True))
    found = [row(size, pooled, last, dtype, options.rounds) for size, pooled, dtype, last in cases]
    shown = Table("layer", *(f"k={k}" for k in KS), title="GB/s of fire / of a copy; ps a step of a neuron")
    for line in found:
        cells = (f"{line[f'fire k={k}']:.1f} / {line[f'copy k={k}']:.1f}; {line[f'step k={k}']:.0f}" for k in KS)
        shown.add_row(line["name"], *cells)
    Console(width=130).print(shown)
    save_rows(options, "bandwidth", found)


if __name__ == "__main__":
    main()
