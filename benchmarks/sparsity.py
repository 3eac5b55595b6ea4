"""Five ways to use that spikes are sparse, against the dense convolution: Table 1 of arXiv 2603.13810, on this machine.

    python -m benchmarks.sparsity [--device cuda]

Spikes are i.i.d. at firing rates of 0.01 to 0.5, as the paper's. Each way computes the dense convolution's result (checked
before it is timed) and starts from the same dense spike tensor, as a layer of a net would:

- temporal delta: convolve what changed since the frame before, and add up; frames without change are skipped
- gather: the coordinates of the spikes, and an index_add of a row of weights for each of their 3 x 3 targets
- torch.compile of the dense convolution
- sparse GEMM: unfolded patches as compressed rows (CSR) times the weights
- custom kernel: one pass over the spikes that adds rows of weights (Numba on a CPU, CUDA through CuPy on a GPU)

The last row is what the paper does instead: k = 4 frames summed, one dense convolution for them.
"""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import event_conv, measure
from sj_tac.functional import aggregate
from sj_tac.support import machine

RATES = (0.01, 0.05, 0.1, 0.2, 0.5)
STEPS, BATCH, CHANNELS, SIZE = 16, 2, 64, 32
DENSE, TAC = "dense convolution", "TAC, k = 4 (dense, T/4 frames)"


def dense(x: Tensor, weight: Tensor) -> Tensor:
    """[T, N, C, H, W] -> [T, N, C', H, W], 3 x 3, padding 1."""
    return F.conv2d(x.flatten(0, 1), weight, padding=1).unflatten(0, x.shape[:2])


def temporal_delta(x: Tensor, weight: Tensor) -> Tensor:
    change = torch.cat([x[:1], x[1:] - x[:-1]]).flatten(0, 1)
    changed = change.flatten(1).any(1).nonzero().flatten()
    y = F.conv2d(change[changed], weight, padding=1)
    whole = y.new_zeros(len(change), *y.shape[1:]).index_copy(0, changed, y)
    return whole.unflatten(0, x.shape[:2]).cumsum(0)


def gather(x: Tensor, weight: Tensor) -> Tensor:
    frames = x.flatten(0, 1)
    height, width = frames.shape[2:]
    out = x.new_zeros(len(frames) * (height + 2) * (width + 2), len(weight))
    frame, channel, row, column = frames.nonzero(as_tuple=True)
    rows = weight.permute(2, 3, 1, 0).contiguous()  # [3, 3, C, C']
    for dy in range(3):
        for dx in range(3):
            target = (frame * (height + 2) + row + 2 - dy) * (width + 2) + column + 2 - dx
            out.index_add_(0, target, rows[dy, dx][channel])
    padded = out.view(len(frames), height + 2, width + 2, -1)
    return padded[:, 1:-1, 1:-1].permute(0, 3, 1, 2).unflatten(0, x.shape[:2])


def sparse_gemm(x: Tensor, weight: Tensor) -> Tensor:
    frames = x.flatten(0, 1)
    patches = F.unfold(frames, 3, padding=1).transpose(1, 2).flatten(0, 1)  # [N H W, 9 C]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")  # torch calls it beta, once
        compressed = patches.to_sparse_csr()
    y = torch.sparse.mm(compressed, weight.flatten(1).t().contiguous())
    return y.view(*x.shape[:2], *x.shape[3:], -1).permute(0, 1, 4, 2, 3)


def custom_kernel(x: Tensor, weight: Tensor) -> Tensor:
    return event_conv.event_conv(x.flatten(0, 1), weight).unflatten(0, x.shape[:2])


def tac(x: Tensor, weight: Tensor) -> Tensor:
    return dense(aggregate(x, [0.25] * 4, 4), weight)


def strategies(compiled: bool) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Every way by name, the dense convolution first."""
    found = {DENSE: dense, "temporal delta": temporal_delta, "gather": gather}
    if compiled:
        found["torch.compile, dense"] = torch.compile(dense)
    return found | {"sparse GEMM (CSR)": sparse_gemm, "custom kernel": custom_kernel, TAC: tac}


def spikes(rate: float, device: str) -> tuple[Tensor, Tensor]:
    """Spikes [T, N, C, H, W] and weights [C', C, 3, 3]."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(STEPS, BATCH, CHANNELS, SIZE, SIZE, generator=generator) < rate).float()
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, generator=generator) / np.sqrt(9 * CHANNELS)
    return x.to(device), weight.to(device)


@torch.no_grad()
def measured(rate: float, device: str, rounds: int, compiled: bool) -> dict[str, float]:
    """Median milliseconds of every way; raises where one does not compute the convolution."""
    x, weight = spikes(rate, device)
    ways = strategies(compiled)
    expected = dense(x, weight)
    for name, way in ways.items():
        if name != TAC:
            torch.testing.assert_close(way(x, weight), expected, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")

    def run(way: Callable[[Tensor, Tensor], Tensor]) -> None:
        way(x, weight)
        if device == "cuda":
            torch.cuda.synchronize()

    runs = {name: lambda way=way: run(way) for name, way in ways.items()}
    taken = measure.interleaved(runs, rounds, f"rate {rate}")
    return {name: 1e3 * statistics.median(seconds) for name, seconds in taken.items()}


def table(results: dict[str, dict[str, float]]) -> Table:
    """Milliseconds, and the ratio to the dense convolution of the same firing rate."""
    shown = Table(title=f"[{STEPS}, {BATCH}, {CHANNELS}, {SIZE}, {SIZE}], {CHANNELS} output channels, 3 x 3")
    shown.add_column("ms (speed-up over dense)")
    for rate in results:
        shown.add_column(f"rate {rate}", justify="right")
    for name in next(iter(results.values())):
        cells = [f"{row[name]:.1f} ({row[DENSE] / row[name]:.2f}x)" for row in results.values()]
        shown.add_row(name, *cells)
    return shown


def main() -> None:
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = measure.parsed(parser)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no GPU here")
    results = {str(r): measured(r, options.device, options.rounds, not options.no_compile) for r in RATES}
    Console(width=125).print(table(results))
    path = options.out or measure.RESULTS / f"sparsity-{options.device}-{date.today().isoformat()}.json"
    content: dict[str, Any] = {"kind": "sparsity", "rounds": options.rounds, "machine": machine.describe()}
    content |= {"input": [STEPS, BATCH, CHANNELS, SIZE, SIZE], "milliseconds": results}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
