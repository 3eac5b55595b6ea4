"""A first layer in one kernel beside a convolution and ``fire``: milliseconds of calls that take turns, medians.

    python -m benchmarks.first_layer --threads 1

Frames of events, G = 8 and N = 4, in channels_last; a MaxPool of 2 x 2 behind the neuron where the row says so.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import sj_tac
from sj_tac.rewrites import lower

G, N = 8, 4
LIF = ("lif", 2.0, True, 1.0, 0.0, False, 1, 2.0)
# Channels in, kernel, stride, channels out, side of the map, pooled.
LAYERS = [
    (1, 3, 1, 32, 28, True), (2, 3, 1, 32, 32, False), (2, 3, 1, 128, 64, True), (3, 3, 1, 64, 32, False),
    (3, 3, 1, 64, 32, True), (3, 3, 1, 48, 32, False), (2, 5, 1, 64, 32, True), (4, 4, 2, 64, 64, False),
    (2, 7, 2, 64, 64, True), (3, 7, 2, 64, 64, True), (3, 3, 1, 24, 16, False), (3, 3, 1, 8, 8, False),
]  # fmt: skip


def row(channels: int, kernel: int, stride: int, out: int, side: int, pooled: bool, rounds: int) -> str:
    """Time one layer."""
    x = (torch.rand(G * N, channels, side, side) < 0.1).float()
    weight = torch.randn(out, channels, kernel, kernel).contiguous(memory_format=torch.channels_last) / 2
    norm = torch.zeros(out), torch.ones(out), torch.ones(out), torch.zeros(out), 1e-5
    how = (stride, stride), (kernel // 2, kernel // 2), (1, 1)
    run = lower.Fire(LIF, 1, 3, (1, 2, 2, 2, 2, 0, 0) if pooled else None, "plain")

    def one() -> None:
        run(x, None, None, norm, None, ((weight, None, *how), None), None, (G, None))

    def two() -> None:
        run(F.conv2d(x, weight, None, *how), None, None, norm, None, (None, None), None, (G, None))

    taken: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(rounds):
        for call in (one, two):
            start = time.perf_counter()
            call()
            taken[call.__name__].append(1e3 * (time.perf_counter() - start))
    first, second = (statistics.median(taken[name][1:]) for name in ("one", "two"))
    layer = f"{channels} -> {out}, {kernel} x {kernel} / {stride}, {side} x {side}{', pooled' if pooled else ''}"
    return f"| {layer} | {channels * kernel**2} | {first:.2f} | {second:.2f} | {second / first:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sj_tac.keep_memory()
    print("| layer | terms | one kernel, ms | two, ms | speed |\n|---|---|---|---|---|")
    with torch.no_grad():
        for case in LAYERS:
            print(row(*case, options.rounds), flush=True)


if __name__ == "__main__":
    main()
