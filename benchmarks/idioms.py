"""The idioms of published models, in miniature: whether any is slower converted than as it is.

    python -m benchmarks.idioms

The nets of tests/idioms/miniatures.py: so small that what is measured is Python's part. Inference, against SpikingJelly
eager, which is the source itself.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import functional
from torch import Tensor, nn

import sj_tac
from benchmarks.measure import interleaved, parsed, parser, save_rows
from benchmarks.nets import wake

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "idioms")]
KS = (1, 2, 4)
EAGER = "SpikingJelly eager"


def called(net: nn.Module, x: Tensor) -> None:
    """One call from rest."""
    functional.reset_net(net)
    net(x)


@torch.no_grad()
def row(name: str, idiom: Any, rounds: int) -> dict[str, Any]:
    """Milliseconds of one idiom as it is, and how many times faster it is at each k."""
    torch.manual_seed(0)
    net, x = idiom.make().eval(), torch.rand(idiom.shape)
    wake(net, x)
    nets = {EAGER: net}
    for k in KS:
        policy = {"version": 1, "layers": list(idiom.layers), "default": {"mode": "preserve", "k": k}}
        nets[f"k={k}"] = sj_tac.convert(net, policy, example_input=x)
    seconds = interleaved({label: partial(called, one, x) for label, one in nets.items()}, rounds, name)
    ms = {label: 1e3 * statistics.median(values) for label, values in seconds.items()}
    return {"name": name, "shape": list(x.shape), "ms": ms[EAGER]} | {k: ms[EAGER] / ms[k] for k in ms if k != EAGER}


def main() -> None:
    """Measure, show and save."""
    import miniatures

    made = parser(__doc__ or "")
    made.set_defaults(rounds=101)
    options = parsed(made)
    found = [row(name, idiom, options.rounds) for name, idiom in miniatures.IDIOMS.items()]
    table = Table(title=f"Faster than {EAGER}", title_justify="left")
    for column in found[0]:
        table.add_column(column)
    for one in found:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in one.values()))
    Console().print(table)
    save_rows(options, "idioms", found)


if __name__ == "__main__":
    main()
