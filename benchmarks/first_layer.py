"""First layers, of few input channels, which one kernel may convolve and fire: what is compiled, counted and measured.

    python -m benchmarks.first_layer [--keep-memory] [--autocast]    # on the CPU: layers run by one kernel, and in two

benchmarks.gpu measures there what is to be had on CUDA.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

import sj_tac
from benchmarks.measure import LAST, interleaved, may_autocast, parsed, parser, precision, save_rows
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.layout import RUNS


class Case(NamedTuple):
    """Channels in and out, kernel, stride and size of the input of a convolution; the MaxPool behind its neuron."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int
    pool: tuple[int, int, int] | None  # kernel, stride, padding

    def pooling(self) -> nn.Module | None:
        """The pool as SpikingJelly has it."""
        return None if self.pool is None else layer.MaxPool2d(*self.pool, step_mode="m")


CASES = {
    "2 -> 128, 3x3, 2x2 pool": Case(2, 128, 3, 1, 128, (2, 2, 0)),
    "2 -> 64, 3x3, no pool": Case(2, 64, 3, 1, 128, None),
    "3 -> 64, 7x7 stride 2, 3x3 pool": Case(3, 64, 7, 2, 224, (3, 2, 1)),
}
# On a GPU, these beside them.
ON_GPU = CASES | {
    "2 -> 64, 5x5, 2x2 pool": Case(2, 64, 5, 1, 128, (2, 2, 0)),
    "3 -> 64, 3x3, 32 x 32, no pool": Case(3, 64, 3, 1, 32, None),
    "1 -> 32, 3x3, 28 x 28, 2x2 pool": Case(1, 32, 3, 1, 28, (2, 2, 0)),
}

# On the CPU, of batches of 4.
ON_CPU = {
    "2 -> 128, 3x3, 64 x 64, 2x2 pool": Case(2, 128, 3, 1, 64, (2, 2, 0)),
    "2 -> 64, 3x3, 64 x 64, 2x2 pool": Case(2, 64, 3, 1, 64, (2, 2, 0)),
    "2 -> 64, 3x3, 64 x 64, no pool": Case(2, 64, 3, 1, 64, None),
    "2 -> 16, 3x3, 64 x 64, 2x2 pool": Case(2, 16, 3, 1, 64, (2, 2, 0)),
    "3 -> 64, 3x3, 32 x 32, no pool": Case(3, 64, 3, 1, 32, None),
    "2 -> 12, 5x5, 34 x 34, 2x2 pool": Case(2, 12, 5, 1, 34, (2, 2, 0)),
    "2 -> 64, 5x5, 64 x 64, 2x2 pool": Case(2, 64, 5, 1, 64, (2, 2, 0)),
    "3 -> 64, 7x7 stride 2, 64 x 64, no pool": Case(3, 64, 7, 2, 64, None),
    "1 -> 64, 3x3, 28 x 28, 2x2 pool": Case(1, 64, 3, 1, 28, (2, 2, 0)),
    "2 -> 64, 3x3, 8 x 8, 2x2 pool": Case(2, 64, 3, 1, 8, (2, 2, 0)),
}
KS = (1, 2, 4)


def source(case: Case, bias: bool = False) -> nn.Sequential:
    """Convolution, BatchNorm, LIF and pool, whose neurons fire; seeded by the caller."""
    norm, pool = layer.BatchNorm2d(case.outputs, step_mode="m"), case.pooling()
    norm.running_var.fill_(0.05)
    conv = layer.Conv2d(case.inputs, case.outputs, case.kernel, case.stride, case.kernel // 2, bias=bias, step_mode="m")
    lif = neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m")
    return nn.Sequential(conv, norm, lif, *([] if pool is None else [pool])).eval()


def converted(case: Case, dtype: torch.dtype, k: int, device: str, batch: int = 16) -> tuple[nn.Sequential, Tensor]:
    """A layer and the second one, a convolution and a neuron, that it makes sums for; and frames [16, batch, C, H, W]."""
    torch.manual_seed(0)
    second = layer.Conv2d(case.outputs, 4, 1, step_mode="m"), neuron.IFNode(step_mode="m")
    net = nn.Sequential(*source(case), *second).eval().to(device)
    fast: nn.Sequential = sj_tac.convert(net, "preserve", k).to(dtype)
    return fast, events((16, batch, case.inputs, case.size, case.size), dtype, device)


def events(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Frames of events, a fifth of all numbers."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.2).to(device, dtype)


def runs() -> int:
    """How often the kernel has run in this process."""
    return sum(n for (what, _), n in RUNS.items() if what == "conv_fire")


@contextmanager
def asked(said: str) -> Iterator[None]:
    """Inside, the environment asks for the kernel ("1"), or does not ("0")."""
    before = os.environ.get(conv_fire.VARIABLE)
    os.environ[conv_fire.VARIABLE] = said
    try:
        yield
    finally:
        if before is None:
            del os.environ[conv_fire.VARIABLE]
        else:
            os.environ[conv_fire.VARIABLE] = before


def layer_alone(case: Case, k: int, last: bool) -> Callable[[str], Tensor]:
    """A call of the first layer that makes sums for the second one: in one kernel ("1") or not ("0").

    ``last``: in channels_last. It gives the last voltages.
    """
    net, x = converted(case, torch.float32, k, "cpu", 4)
    net = net.to(memory_format=torch.channels_last) if last else net

    def run(said: str) -> Tensor:
        functional.reset_net(net)
        value: Any = x
        with asked(said):
            for module in net[:-2]:
                value = module(value)
        voltages: Tensor = net[2].v
        return voltages

    return run


def rows(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of each layer in two kernels and in one, by k. Raises RuntimeError where their voltages differ."""
    found = []
    for (name, case), last in itertools.product(ON_CPU.items(), (False, True)):
        row: dict[str, Any] = {"name": name + LAST * last}
        for k in KS:
            run = layer_alone(case, k, last)
            two = run("0")
            before = runs()
            if not torch.equal(two, run("1")):
                raise RuntimeError(f"{name}, k={k}: other voltages in one kernel than in two")
            row[f"taken k={k}"] = runs() > before
            timed = {said: lambda run=run, said=said: run(said) for said in "01"}
            seconds = interleaved(timed, rounds, f"{name}, k={k}")
            row[f"two k={k}"], row[f"one k={k}"] = (round(1e3 * statistics.median(seconds[said]), 2) for said in "01")
        found.append(row)
    return found


@torch.no_grad()
def main() -> None:
    """Measure, show and save."""
    made = parser(__doc__ or "")
    may_autocast(made)
    options = parsed(made)
    with precision(options):
        found = rows(options.rounds)
    table = Table(title="A first layer in two kernels and in one, ms", title_justify="left")
    for column in ("layer", *(f"k={k}" for k in KS)):
        table.add_column(column)
    for row in found:
        cells = (f"{row[f'two k={k}']} -> {row[f'one k={k}']}" if row[f"taken k={k}"] else "not taken" for k in KS)
        table.add_row(row["name"], *cells)
    Console().print(table)
    save_rows(options, "first_layer", found)


if __name__ == "__main__":
    main()
