"""All that is measured on a CUDA device, in one command and one folder: the GPU tests, inference, training, bytes a second.

SpikingJelly runs its Triton neurons in every configuration that it offers: conv-BN folding, channels_last, torch.compile,
CUDA graph; TF32 and bf16 (its own precision configuration, so that the neurons stay on Triton). Ratios are to its best.
A configuration that fails is a row that says so.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.functional import conv_bn_fusion
from spikingjelly.activation_based.precision import PrecisionConfig, prepare_model_for_precision
from torch import Tensor, nn

import sj_tac
from benchmarks import measure, nets
from sj_tac.functional import fire
from sj_tac.support import machine

ROOT = Path(__file__).resolve().parents[1]
KS = (1, 2, 4, 8)
LAST = measure.LAST
Runs = dict[str, Callable[[], Any]]


def autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else nullcontext()


def host_model(net: nn.Module, precision: str) -> nn.Module:
    """SpikingJelly's own net, its neurons on Triton in this precision."""
    if precision == "bf16":
        config = PrecisionConfig.from_any({"mode": "bf16", "neuron_storage": "bf16"})
        prepared: nn.Module = prepare_model_for_precision(net, "cuda", config).model
        return prepared
    return net


def eager(module: nn.Module, x: Tensor, precision: str) -> Callable[[], Any]:
    @torch.no_grad()
    def run() -> None:
        functional.reset_net(module)
        with autocast(precision):
            module(x)
        torch.cuda.synchronize()

    return run


def graphed(module: nn.Module, x: Tensor, precision: str) -> Callable[[], Any]:
    """The forward from rest as one CUDA graph."""
    with torch.no_grad(), autocast(precision):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                functional.reset_net(module)
                module(x)
        torch.cuda.current_stream().wait_stream(side)
        functional.reset_net(module)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(x)

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


def floor(net: nn.Module, x: Tensor, k: int, precision: str) -> Callable[[], Any]:
    bare = measure.bare_convolutions(net, x, k)

    @torch.no_grad()
    def run() -> None:
        with autocast(precision):
            bare()
        torch.cuda.synchronize()

    return run


def inference_runs(net: nn.Module, x: Tensor, precision: str, compiled: bool, failed: dict[str, str]) -> Runs:
    """Every configuration by name; building one may fail, and then ``failed`` says why."""
    runs: Runs = {}

    def add(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        try:
            run = make()
            run()
            runs[name] = run
        except Exception as error:  # one configuration's failure must not cost the others
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"

    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    for suffix, source in (("", net), (LAST, last)):
        host = host_model(copy.deepcopy(source), precision)
        folded = host_model(conv_bn_fusion.fuse_conv_bn_eval_modules(source), precision)
        add(f"SpikingJelly eager{suffix}", lambda host=host: eager(host, x, precision))
        add(f"SpikingJelly BN folded{suffix}", lambda folded=folded: eager(folded, x, precision))
        add(
            f"SpikingJelly BN folded, CUDA graph{suffix}", lambda folded=folded: graphed(copy.deepcopy(folded), x, precision)
        )
        if compiled:
            add(
                f"SpikingJelly BN folded, torch.compile{suffix}",
                lambda folded=folded: eager(torch.compile(copy.deepcopy(folded)), x, precision),
            )
        for k in KS:
            fast = sj_tac.convert(source, "preserve", k, example_input=x[:, :1])
            add(f"sj_tac preserve k={k}{suffix}", lambda fast=fast: eager(fast, x, precision))
            again = copy.deepcopy(fast)
            add(f"sj_tac, CUDA graph, preserve k={k}{suffix}", lambda again=again: graphed(again, x, precision))
            add(f"bare convolutions k={k}{suffix}", lambda source=source, k=k: floor(source, x, k, precision))
    return runs


def training_runs(net: nn.Module, x: Tensor, precision: str, failed: dict[str, str]) -> Runs:
    """Forward and backward, BatchNorm frozen."""
    runs: Runs = {}
    for suffix in ("", LAST):
        source = copy.deepcopy(net).to(memory_format=torch.channels_last if suffix else torch.contiguous_format)
        found = {f"SpikingJelly eager{suffix}": host_model(copy.deepcopy(source), precision)}
        for k in KS[:3]:
            found[f"sj_tac preserve k={k}{suffix}"] = sj_tac.convert(source, "preserve", k, example_input=x[:, :1])
        for name, module in found.items():

            def run(module: nn.Module = module) -> None:
                functional.reset_net(module)
                module.zero_grad()
                with autocast(precision):
                    y = module(x)
                y.float().sum().backward()
                torch.cuda.synchronize()

            try:
                run()
                runs[name] = run
            except Exception as error:  # as above
                failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return runs


def peaks(runs: Runs) -> dict[str, dict[str, Any]]:
    """Device memory that a call takes on top of what is there, in MB."""
    found = {}
    for name, run in runs.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        found[name] = {"peak MB": round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)}
    return found


def seconds_of(run: Callable[[], Any], repeats: int = 30) -> float:
    """Of one run, from CUDA events around many."""
    for _ in range(3):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


@torch.no_grad()
def bandwidth() -> list[dict[str, Any]]:
    """Bytes a second of ``fire`` alone, by DVSGestureNet's first two layers at batch 16, against a copy of as many bytes."""
    net, _ = nets.make("DVSGestureNet", 1)
    node = next(m for m in net.modules() if hasattr(m, "v_threshold"))
    pool, rows = nn.MaxPool2d(2, 2), []
    for dtype in (torch.float32, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            for size, k in ((128, 1), (128, 2), (128, 4), (64, 2)):
                groups = 16 // k
                y = torch.randn(groups * 16, 128, size, size, dtype=dtype, device="cuda").contiguous(memory_format=layout)
                y, weights = y.unflatten(0, (groups, 16)), torch.rand(16, device="cuda") if k > 1 else None
                scale, shift = torch.rand(128, device="cuda"), torch.rand(128, device="cuda")

                def run(
                    y: Tensor = y, k: int = k, weights: Tensor | None = weights, s: Tensor = scale, b: Tensor = shift
                ) -> Any:
                    return fire(y, node, k, scale=s, shift=b, pool=pool, weights=weights, group=k, backend="cupy")

                out, v = run()
                moved = sum(t.numel() * t.element_size() for t in (y, out, v))
                source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
                target = torch.empty_like(source)
                ours, copying = seconds_of(run), seconds_of(lambda a=target, b=source: a.copy_(b))
                rows.append({
                    "name": f"{str(dtype)[6:]}, {size} x {size}, k={k}{LAST if layout == torch.channels_last else ''}",
                    "ms": 1e3 * ours, "GB/s": round(moved / ours / 1e9), "copy GB/s": round(moved / copying / 1e9),
                    "of copy": round(copying / ours, 3),
                })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=measure.RESULTS / f"gpu-{date.today().isoformat()}")
    parser.add_argument("--net", action="append", choices=list(nets.CASES), help="default: DVSGestureNet, then paper-dvs")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=8.5, help="start no further table after this")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile of SpikingJelly")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest -m gpu")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: torch.cuda.is_available() is False")
    start, console = time.monotonic(), Console(width=130, record=True)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if not options.no_tests:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--junitxml", str(options.out / "tests.xml")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        (options.out / "tests.txt").write_text(done.stdout + done.stderr)
        console.print(done.stdout[-1500:])
    everything: dict[str, Any] = {"machine": machine.describe(), "bandwidth": bandwidth(), "failed": {}}
    for row in everything["bandwidth"]:
        console.print(row)
    for name in options.net or ["DVSGestureNet", "paper-dvs"]:
        for precision in ("TF32", "bf16"):
            for kind in ("inference", "training"):
                if time.monotonic() - start > 60 * options.minutes:
                    console.print(f"out of time before {kind} of {name}, {precision}")
                    continue
                title, failed = f"{kind} {name} {precision}, batch {options.batch}", {}
                net, x = nets.make(name, options.batch, "cuda")
                if kind == "inference":
                    runs = inference_runs(net, x, precision, not options.no_compile, failed)
                else:
                    runs = training_runs(net, x, precision, failed)
                for lost, why in failed.items():
                    console.print(f"failed: {title}: {lost}: {why}")
                everything["failed"][title] = failed
                seconds = measure.interleaved(runs, options.rounds, title)
                rows = measure.rows(seconds, [label for label in runs if label.startswith("SpikingJelly")], peaks(runs))
                measure.table(title, rows, console)
                measure.save(
                    options.out / f"{title.replace(' ', '-').replace(',', '')}.json", title, {name: rows}, options.rounds
                )
                everything[title] = rows
                (options.out / "all.json").write_text(json.dumps(everything, indent=1) + "\n")
                del runs
                torch.cuda.empty_cache()
    console.save_text(str(options.out / "report.txt"))
    console.print(f"Written: {options.out}")


if __name__ == "__main__":
    main()
