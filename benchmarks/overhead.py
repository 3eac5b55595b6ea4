"""What a fused layer costs beside its convolution: ten Conv-BN-LIF layers on maps so small that little else is left.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --threads 1 --out overhead.json
    python -m benchmarks.overhead --stub [--before earlier.json]    # Python's part on CUDA; no device runs

The bare convolutions run on the same T / k frames. What is left of a layer's time is Python, torch's modules, the affine
map and the kernel of the neuron itself. Frames are Python's own, from the conv's forward to the kernel.
"""

from __future__ import annotations

import json
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

import sj_tac
from benchmarks.measure import RESULTS, bare_convolutions, interleaved, parsed, parser
from sj_tac.runtime.convs import DriveModule
from sj_tac.support import machine

LAYERS, CHANNELS, STEPS = 10, 16, 8
SIZES = (4, 16)
KS = (1, 2, 4)


def net() -> nn.Sequential:
    """Conv-BN-LIF, ten times over."""
    modules: list[nn.Module] = []
    for _ in range(LAYERS):
        modules += [
            layer.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            layer.BatchNorm2d(CHANNELS),
            neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True),
        ]
    made = nn.Sequential(*modules)
    functional.set_step_mode(made, "m")
    return made.eval()


def frames_to_kernel(model: nn.Module, x: Tensor) -> int:
    """Python's frames from each conv's forward to the kernel of its neuron, the most of all layers but the first."""
    begin, end = DriveModule.forward.__code__, "kernels/cpu/forward.py"
    counts: list[int] = []
    running = False

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal running
        if event != "call":
            return
        if frame.f_code is begin:
            running = True
            counts.append(0)
        if running:
            running = not frame.f_code.co_filename.endswith(end)
            counts[-1] += running

    functional.reset_net(model)
    with torch.no_grad():
        for _ in range(3):  # what is tried once is behind it
            model(x)
            functional.reset_net(model)
        sys.setprofile(watch)
        try:
            model(x)
        finally:
            sys.setprofile(None)
    functional.reset_net(model)
    return max(counts[1:])


def rows(size: int, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a layer by k, beside those of its convolution and of SpikingJelly's own layer."""
    torch.manual_seed(0)
    source = net()
    x = (torch.rand(STEPS, 1, CHANNELS, size, size) < 0.3).float()
    models = {k: sj_tac.convert(source, "preserve", k) for k in KS}

    def called(model: nn.Module) -> Any:
        def run() -> None:
            functional.reset_net(model)
            for _ in range(10):
                model(x)

        return run

    runs = {f"k={k}": called(model) for k, model in models.items()} | {"SpikingJelly": called(source)}
    for k in KS:
        bare = bare_convolutions(source, x, k)
        runs[f"bare k={k}"] = lambda bare=bare: [bare() for _ in range(10)]  # type: ignore[misc]
    with torch.no_grad():
        seconds = interleaved(runs, rounds, f"{size} x {size}")
    each = {name: statistics.median(values) / 10 / LAYERS * 1e6 for name, values in seconds.items()}
    return [
        {
            "size": size,
            "k": k,
            "layer_us": round(each[f"k={k}"], 1),
            "convolution_us": round(each[f"bare k={k}"], 1),
            "overhead_us": round(each[f"k={k}"] - each[f"bare k={k}"], 1),
            "spikingjelly_us": round(each["SpikingJelly"], 1),
            "frames": frames_to_kernel(models[k], x),
        }
        for k in KS
    ]


def stub_rows(options: Any) -> list[dict[str, Any]]:
    """What Python takes on CUDA, where no device is."""
    from benchmarks import stubbed  # it needs what the tests need

    torch.manual_seed(0)
    found = stubbed.rows(net(), (torch.rand(STEPS, 1, CHANNELS, 4, 4) < 0.3).float(), KS, options.rounds)
    return stubbed.merged(found, json.loads(options.before.read_text())["rows"]) if options.before else found


def main() -> None:
    """Measure, show and save."""
    made = parser(__doc__ or "")
    made.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    made.add_argument("--stub", action="store_true", help="Python's part of the CUDA path, without a device (stubbed.py)")
    made.add_argument("--before", type=Path, help="with --stub: what it wrote for an earlier version, to stand beside")
    options = parsed(made)
    torch.set_num_threads(options.threads)
    found = stub_rows(options) if options.stub else [row for size in SIZES for row in rows(size, options.rounds)]
    table = Table(title="A fused layer, microseconds", title_justify="left")
    for column in found[0]:
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    kind = "overhead-stub" if options.stub else "overhead"
    path = options.out or RESULTS / f"{'overhead-stub' if options.stub else 'overhead-cpu'}-{date.today()}.json"
    content = {"kind": kind, "threads": options.threads, "rounds": options.rounds, "machine": machine.describe()}
    path.write_text(json.dumps(content | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
