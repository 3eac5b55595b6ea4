"""All that is measured on a CUDA device, in one command and one folder: bytes a second, inference, training, tests.

SpikingJelly runs its Triton neurons in every configuration that it offers: conv-BN folding, channels_last, torch.compile,
CUDA graph; TF32, bf16 (its own precision configuration, so that the neurons stay on Triton) and weights in bf16. Ratios are
to its best. A configuration that fails is a row that says so, and every row is written before the next one begins.
"""

from __future__ import annotations

import argparse
import copy
import gc
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.functional import conv_bn_fusion
from spikingjelly.activation_based.precision import PrecisionConfig, prepare_model_for_precision
from torch import Tensor, nn

import sj_tac
from benchmarks import measure, nets
from benchmarks.gpu_kernels import Results, bandwidth, overheads
from sj_tac import capturing
from sj_tac.support.files import write_text

ROOT = Path(__file__).resolve().parents[1]
KS = (1, 2, 4, 8)
LAST = measure.LAST


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

    def call() -> None:
        functional.reset_net(module)
        module(x)

    with torch.no_grad(), autocast(precision):
        _, replay = capturing.record(call, x.device)

    def run() -> None:
        replay()
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


Makers = dict[str, Callable[[], Callable[[], Any]]]


def inference_rows(net: nn.Module, x: Tensor, precision: str, compiled: bool) -> Makers:
    """Every configuration by name, and what makes its run: none is made, or can fail, before its turn."""
    rows: Makers = {}

    def of(last: bool) -> nn.Module:
        return copy.deepcopy(net).to(memory_format=torch.channels_last if last else torch.contiguous_format)

    def folded(last: bool) -> nn.Module:
        return host_model(conv_bn_fusion.fuse_conv_bn_eval_modules(of(last)), precision)

    def fast(last: bool, k: int) -> nn.Module:
        return sj_tac.convert(of(last), "preserve", k, example_input=x[:, :1])

    for last, suffix in ((False, ""), (True, LAST)):
        rows[f"SpikingJelly eager{suffix}"] = lambda last=last: eager(host_model(of(last), precision), x, precision)
        rows[f"SpikingJelly BN folded{suffix}"] = lambda last=last: eager(folded(last), x, precision)
        rows[f"SpikingJelly BN folded, CUDA graph{suffix}"] = lambda last=last: graphed(folded(last), x, precision)
        if compiled:
            rows[f"SpikingJelly BN folded, torch.compile{suffix}"] = lambda last=last: eager(
                cast(nn.Module, torch.compile(folded(last))), x, precision
            )
        for k in KS:
            rows[f"sj_tac preserve k={k}{suffix}"] = lambda last=last, k=k: eager(fast(last, k), x, precision)
            rows[f"sj_tac, CUDA graph preserve k={k}{suffix}"] = lambda last=last, k=k: graphed(fast(last, k), x, precision)
            rows[f"bare convolutions k={k}{suffix}"] = lambda last=last, k=k: floor(of(last), x, k, precision)
    return rows


def training_rows(net: nn.Module, x: Tensor, precision: str) -> Makers:
    """Forward and backward, BatchNorm frozen; called, and as one CUDA graph, which has no Python in it."""
    rows: Makers = {}

    def step(module: nn.Module) -> None:
        functional.reset_net(module)
        module.zero_grad()
        with autocast(precision):
            y = module(x)
        y.float().sum().backward()

    def called(module: nn.Module) -> Callable[[], None]:
        return lambda: (step(module), torch.cuda.synchronize())[1]

    def replayed(module: nn.Module) -> Callable[[], None]:
        _, replay = capturing.record(lambda: step(module), x.device)
        return lambda: (replay(), torch.cuda.synchronize())[1]

    for suffix in ("", LAST):
        source = copy.deepcopy(net).to(memory_format=torch.channels_last if suffix else torch.contiguous_format)
        for how, words in ((called, ""), (replayed, ", CUDA graph")):
            rows[f"SpikingJelly{words or ' eager'}{suffix}"] = lambda source=source, how=how: how(
                host_model(copy.deepcopy(source), precision)
            )
            for k in KS[:3]:
                rows[f"sj_tac{words} preserve k={k}{suffix}"] = lambda source=source, k=k, how=how: how(
                    sj_tac.convert(source, "preserve", k, example_input=x[:, :1])
                )
    return rows


def timed(make: Callable[[], Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Seconds of each round, and the device memory in MB that a call takes on top of what is there.

    A CUDA graph takes its memory when it is captured, so for one it is what making it took.
    """
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = make()
    run()
    made = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    called = torch.cuda.max_memory_allocated() - held
    seconds = measure.in_turns({"": run}, rounds)[""]
    return {"seconds": seconds, "peak MB": round((called or made) / 1e6, 1)}


KERNELS = {"bandwidth": bandwidth, "overhead": overheads}
STAGES = (*KERNELS, "inference", "training")
PRECISIONS = ("TF32", "bf16", "bf16 weights")


def tables(results: Results, console: Console, options: argparse.Namespace) -> None:
    """Inference, then training, of every net in every precision."""
    for kind in (stage for stage in ("inference", "training") if stage in options.stage):
        for name in options.net or ["DVSGestureNet", "paper-dvs"]:
            for precision in options.precision:
                title = f"{kind} {name} {precision}, batch {options.batch}"
                net, x = nets.make(name, options.batch, "cuda")
                if precision == "bf16 weights":
                    net, x = net.to(torch.bfloat16), x.to(torch.bfloat16)
                compiled = not options.no_compile
                rows = (
                    inference_rows(net, x, precision, compiled) if kind == "inference" else training_rows(net, x, precision)
                )
                found = [
                    results.add(title, row, lambda make=make: timed(make, options.rounds))
                    for row, make in rows.items()
                    if re.search(options.row, row)
                ]
                good = {row["name"]: row for row in found if "failed" not in row}
                for row in found:
                    if "failed" in row:
                        console.print(f"failed: {title}: {row['name']}: {row['failed']}")
                if good:
                    host = [label for label in good if label.startswith("SpikingJelly")]
                    more = {label: {"peak MB": row["peak MB"]} for label, row in good.items()}
                    shown = measure.rows({label: row["seconds"] for label, row in good.items()}, host, more)
                    measure.table(title, shown, console)
                    file = options.out / f"{title.replace(' ', '-').replace(',', '')}.json"
                    measure.save(file, title, {name: shown}, options.rounds)
                console.save_text(str(options.out / "report.txt"), clear=False)


def tests(out: Path, console: Console, seconds: float) -> None:
    """The tests that need a device, apart from what is measured: they compile hundreds of specialisations."""
    files = ["tests/test_gpu.py", "tests/test_gpu_nets.py", "tests/kernels/test_gpu_fire.py"]
    command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-q", "-n", "8", "--junitxml", str(out / "tests.xml")]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds)
        said = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"{type(error).__name__}: {error}"
    write_text(out / "tests.txt", said)
    console.print(said[-1500:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=measure.RESULTS / f"gpu-{date.today().isoformat()}")
    parser.add_argument("--net", action="append", choices=list(nets.CASES), help="default: DVSGestureNet, then paper-dvs")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=8.5, help="measure nothing more after this")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile of SpikingJelly")
    parser.add_argument("--tests", type=float, metavar="MINUTES", help="run the GPU tests, after all that is measured")
    parser.add_argument("--stage", action="append", choices=STAGES, help="default: all, in this order")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: all")
    parser.add_argument("--row", default="", metavar="REGEX", help="of tables of nets, only rows whose name has it")
    options = parser.parse_args()
    options.stage, options.precision = options.stage or STAGES, options.precision or PRECISIONS
    if not torch.cuda.is_available():
        parser.error("no CUDA device: torch.cuda.is_available() is False")
    console = Console(width=130, record=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    results = Results(options.out, options.minutes)
    for name, stage in KERNELS.items():
        if name in options.stage:
            stage(results, console)
    tables(results, console, options)
    if options.tests:
        tests(options.out, console, 60 * options.tests)
    console.save_text(str(options.out / "report.txt"))
    console.print(f"Written: {options.out}")


if __name__ == "__main__":
    main()
