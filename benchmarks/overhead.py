"""What a fused layer costs beside its convolution: ten Conv-BN-LIF layers on maps so small that little else is left.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --threads 1 --out overhead.json

The bare convolutions run on the same T / k frames. What is left of a layer's time is Python, torch's modules, the affine
map and the kernel of the neuron itself.
"""

from __future__ import annotations

import json
import statistics
from datetime import date
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

import sj_tac
from benchmarks.measure import RESULTS, bare_convolutions, interleaved, parsed, parser
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
        }
        for k in KS
    ]


def main() -> None:
    """Measure, show and save."""
    made = parser(__doc__ or "")
    made.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    options = parsed(made)
    torch.set_num_threads(options.threads)
    found = [row for size in SIZES for row in rows(size, options.rounds)]
    table = Table(title="A fused layer, microseconds", title_justify="left")
    for column in found[0]:
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    path = options.out or RESULTS / f"overhead-cpu-{date.today()}.json"
    content = {"kind": "overhead", "threads": options.threads, "rounds": options.rounds, "machine": machine.describe()}
    path.write_text(json.dumps(content | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
