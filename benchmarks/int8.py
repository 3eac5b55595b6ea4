"""int8 beside float32 and SpikingJelly's best, in one run: milliseconds of calls that take turns, medians.

    python -m benchmarks.int8 --threads 2 --nets paper-dvs sew_resnet18 --out int8.md

SpikingJelly: BatchNorm folded, channels_last, eager and compiled (weights frozen); the faster is what is compared with. The
bound is the bare convolutions and Linears in int8, all but the first, which is in float32. Linears that drive neurons are
converted, too. Memory is kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.functional import conv_bn_fusion
from torch import Tensor, nn

import sj_tac
from benchmarks import nets
from sj_tac.kernels.cpu import int8
from sj_tac.support import machine

LAST = torch.channels_last


def bound(net: nn.Module, x: Tensor, k: int) -> Callable[[], None]:
    """All convolutions and Linears of a net on T / k frames, in int8 but for the first one."""
    seen: list[tuple[Any, tuple[int, ...]]] = []
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    handles = [m.register_forward_pre_hook(lambda m, a: seen.append((m, tuple(a[0].shape)))) for m in layers]
    functional.reset_net(net)
    net(x)
    for handle in handles:
        handle.remove()
    functional.reset_net(net)
    calls: list[Callable[[], Any]] = []
    for place, (m, shape) in enumerate(seen):
        rows = shape if len(shape) <= (4 if isinstance(m, nn.Conv2d) else 2) else (shape[0] * shape[1], *shape[2:])
        rows = (-(-rows[0] // k), *rows[1:])
        frames = torch.randint(0, 2, rows, dtype=torch.uint8)
        if isinstance(m, nn.Conv2d):
            frames = frames.contiguous(memory_format=LAST)
        if not place:
            y = frames.float()
            calls.append(lambda m=m, y=y: F.conv2d(y, m.weight, m.bias, m.stride, m.padding))
            continue
        run = int8.convolution(m.stride, m.padding, m.dilation) if isinstance(m, nn.Conv2d) else int8.linear()
        calls.append(lambda run=run, m=m, frames=frames: run(frames, m.weight, None, 1, None))

    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


def rows(name: str, ks: list[int], rounds: int, compiles: bool) -> list[str]:
    """Return the table's lines of one net."""
    net, x = nets.make(name)
    net = net.to(memory_format=LAST)
    folded = conv_bn_fusion.fuse_conv_bn_eval_modules(net)
    hosts = {"eager": folded}
    if compiles:
        hosts["compiled"] = torch.compile(conv_bn_fusion.fuse_conv_bn_eval_modules(net), options={"freezing": True})
    found: dict[str, nn.Module] = dict(hosts)
    for k in ks:
        for label, dtype in (("float32", "source"), ("int8", "int8")):
            policy = {"layers": ["conv", "linear"], "default": {"mode": "preserve", "k": k, "dtype": dtype}}
            found[f"{label} {k}"] = sj_tac.convert(net, policy)

    def call(module: nn.Module) -> None:
        functional.reset_net(module)
        module(x)

    runs: dict[str, Callable[[], Any]] = {label: lambda module=module: call(module) for label, module in found.items()}
    runs |= {f"bound {k}": bound(net, x, k) for k in ks}
    taken: dict[str, list[float]] = {label: [] for label in runs}
    for turn in range(rounds + 2):
        for label, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                taken[label].append(1e3 * (time.perf_counter() - start))
    ms = {label: statistics.median(each) for label, each in taken.items()}
    host = min(ms[label] for label in hosts)
    lines = []
    for k in ks:
        wide, whole, least = ms[f"float32 {k}"], ms[f"int8 {k}"], ms[f"bound {k}"]
        reasons = sj_tac.report(found[f"int8 {k}"]).graphs[0].float32().values()
        count = f"{sum(not why for why in reasons)} of {len(reasons)}"
        times = " | ".join(f"{one:.1f}" for one in (*(ms[label] for label in hosts), wide, whole, least))
        lines.append(
            f"| {name} | {k} | {count} | {times} | {host / wide:.1f}x | {host / whole:.1f}x | {whole / least:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--nets", nargs="+", default=["paper-dvs", "sew_resnet18", "spiking_vgg11_bn"], choices=nets.CASES)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--eager", action="store_true", help="leave SpikingJelly compiled out")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    if problem := int8.problem():
        parser.error(problem)
    torch.set_num_threads(options.threads)
    sj_tac.keep_memory()
    hosts = ["eager, ms"] if options.eager else ["eager, ms", "compiled, ms"]
    columns = ["net", "k", "in int8", *hosts, "float32, ms", "int8, ms", "bound, ms", "float32", "int8", "int8 over bound"]
    about = ", ".join(f"{key} {value}" for key, value in machine.describe().items())
    text = [f"{about}; {options.threads} threads.", "", "| " + " | ".join(columns) + " |"]
    text.append("|" + "---|" * len(columns))
    print("\n".join(text), flush=True)
    with torch.no_grad():
        for name in options.nets:
            found = rows(name, options.k, options.rounds, not options.eager)
            print("\n".join(found), flush=True)
            text += found
    if options.out:
        options.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
