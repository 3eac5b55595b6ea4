"""Interleaved medians, the floor of bare convolutions, and where results go."""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from spikingjelly.activation_based import functional
from torch import Tensor, nn

from sj_tac.support import machine
from sj_tac.support.memory import keep_memory
from sj_tac.tuning.measure import in_turns

RESULTS = Path(__file__).resolve().parent / "results"
# Ends the name of a configuration whose weights, and so activations, are channels_last.
LAST = ", channels_last"


def interleaved(runs: dict[str, Callable[[], None]], rounds: int, title: str, again: bool = False) -> dict[str, list[float]]:
    """Seconds of every run in every round, one warm-up round first; in each round every run has its turn.

    ``again``: each runs once before it is timed, so that what it finds in the caches is its own, as in a loop.
    """
    with Progress(transient=True) as progress:
        task = progress.add_task(title, total=(rounds + 1) * len(runs))
        in_turns(runs, 1, lambda: progress.advance(task))
        return in_turns(runs, rounds, lambda: progress.advance(task), again=again)


class SeparateCalls(nn.Module):
    """The paper's baseline: the net one frame at a time, so T calls of every convolution."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)
        functional.set_step_mode(self.net, "s")

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.net(frame) for frame in x])


def bare_convolutions(net: nn.Module, x: Tensor, k: int) -> Callable[[], list[Tensor]]:
    """All convolutions of the net, nothing else, on T/k frames of random input: the floor."""
    shapes: list[tuple[nn.Conv2d, tuple[int, ...]]] = []
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    handles = [m.register_forward_pre_hook(lambda m, a: shapes.append((m, tuple(a[0].shape)))) for m in convs]
    functional.reset_net(net)
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    functional.reset_net(net)
    first = shapes[0][0]
    inputs = []
    for m, s in shapes:
        last = m.weight.is_contiguous(memory_format=torch.channels_last) and not m.weight.is_contiguous()
        data = torch.rand(-(-s[0] // k) * s[1], *s[2:], device=m.weight.device)
        data = data.contiguous(memory_format=torch.channels_last) if last else data
        inputs.append((m, data.requires_grad_(m is not first and torch.is_grad_enabled())))
    return lambda: [m._conv_forward(data, m.weight, m.bias) for m, data in inputs]


def precision(options: argparse.Namespace) -> torch.autocast:
    """What a run is to stand under: autocast in bfloat16, or nothing."""
    return torch.autocast("cpu", torch.bfloat16, enabled=options.autocast)


class OutsideAutocast(nn.Module):
    """A net that is called outside of the autocast that the others are measured under."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            found: Tensor = self.net(x)
            return found


def under(options: argparse.Namespace, run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` under ``precision``."""

    def wrapped() -> Any:
        with precision(options):
            return run()

    return wrapped


def floors(net: nn.Module, x: Tensor, ks: tuple[int, ...]) -> dict[str, Callable[[], list[Tensor]]]:
    """The bare convolutions at every k, in both memory formats."""
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    fitting = [k for k in ks if k <= x.shape[0]]
    found = {f"bare convolutions k={k}": bare_convolutions(net, x, k) for k in fitting}
    return found | {f"bare convolutions k={k}{LAST}": bare_convolutions(last, x, k) for k in fitting}


def peak_megabytes(run: Callable[[], Any]) -> float | None:
    """How much the resident memory of the process rises above what it was during one call; None where /proc cannot say."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def resident(field: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        reset.write_text("5")
        run()
        return round((resident("VmHWM") - before) / 1024, 1)
    except (OSError, AttributeError, StopIteration):
        return None


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=7, help="timed rounds; medians are shown (default 7)")
    made.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/)")
    made.add_argument("--keep-memory", action="store_true", help="call sj_tac.keep_memory() first (glibc)")
    return made


def may_autocast(made: argparse.ArgumentParser) -> None:
    """Add the option that ``precision`` reads."""
    made.add_argument("--autocast", action="store_true", help="everything under torch.autocast in bfloat16")


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, of at least one round."""
    options = made.parse_args()
    if options.rounds < 1:
        made.error(f"--rounds {options.rounds}: at least 1")
    if options.keep_memory and not keep_memory():
        made.error("--keep-memory: the allocator is not glibc's")
    return options


def arguments(description: str, names: list[str]) -> argparse.Namespace:
    """The options of the benchmarks of nets."""
    made = parser(description)
    made.add_argument("--net", choices=names, action="append", help="measure only these (default: all)")
    compiled = "add torch.compile of SpikingJelly (minutes of compiling), in both memory formats or in channels_last alone"
    made.add_argument("--compile", nargs="?", const="both", choices=("both", "channels_last"), help=compiled)
    made.add_argument("--again", action="store_true", help="run each once before each timed run, as in a loop of its own")
    may_autocast(made)
    options = parsed(made)
    options.net = options.net or names
    return options


def compiles(options: argparse.Namespace, suffix: str) -> bool:
    """Whether torch.compile is to be tried of a net in this memory format: "" or ``LAST``."""
    return options.compile == "both" or (options.compile is not None and suffix == LAST)


def table(title: str, rows: list[dict[str, Any]], console: Console) -> None:
    """Rows with name, ms, to_best, to_floor and any more columns."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("configuration")
    extra = [key for key in rows[0] if key not in ("name", "ms", "to_best", "to_floor")]
    for column in ("ms", "x best SpikingJelly", "/ bare convolutions", *extra):
        shown.add_column(column, justify="right")
    for row in rows:
        floor = f"{row['to_floor']:.2f}" if row["to_floor"] else ""
        shown.add_row(
            row["name"],
            f"{row['ms']:.1f}",
            f"{row['to_best']:.2f}x" if row["to_best"] else "",
            floor,
            *(str(row[key] or "") for key in extra),
        )
    console.print(shown)


def rows(seconds: dict[str, list[float]], host: list[str], more: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians; ratios to the best SpikingJelly configuration of the run and to the bare convolutions of the same k."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min((medians[name] for name in host if name in medians), default=None)
    out = []
    for name, value in medians.items():
        k = name.rsplit("k=", 1)[1] if "k=" in name else "1"
        floor = medians.get(f"bare convolutions k={k}") if name.startswith("sj_tac") else None
        row = {
            "name": name,
            "ms": 1e3 * value,
            "to_best": best / value if best else None,
            "to_floor": value / floor if floor else None,
        }
        out.append(row | more.get(name, {}))
    return out


def _place(options: argparse.Namespace, kind: str) -> Path:
    """Where what was measured goes, where the command line does not say."""
    half = getattr(options, "autocast", False)
    words = [kind, "cpu", *(["bfloat16"] if half else []), *(["kept-memory"] if options.keep_memory else [])]
    return options.out or RESULTS / f"{'-'.join(words)}-{date.today()}.json"


def _about(options: argparse.Namespace) -> dict[str, Any]:
    """What a result says of how it was measured, where that is not the usual way."""
    half = {"precision": "bfloat16, by autocast"} if getattr(options, "autocast", False) else {}
    return half | ({"again": True} if getattr(options, "again", False) else {})


def report(options: argparse.Namespace, kind: str, measured: Callable[[str], tuple[Tensor, list[dict[str, Any]]]]) -> None:
    """``measured(net)`` -> (input, rows) for every net that is wanted: as tables, JSON and PNG."""
    console, results = Console(width=110), {}
    for name in options.net:
        x, results[name] = measured(name)
        table(f"{name}, input {list(x.shape)}", results[name], console)
    path, more = _place(options, kind), _about(options)
    console.print(f"Written: {save(path, kind, results, options.rounds, more)}")


def save_rows(options: argparse.Namespace, kind: str, found: list[dict[str, Any]]) -> None:
    """Rows with the machine, as JSON, of a benchmark that is not of whole nets."""
    path, more = _place(options, kind.replace("_", "-")), _about(options)
    content = {"kind": kind, "rounds": options.rounds, **more, "machine": machine.describe(), "rows": found}
    path.write_text(json.dumps(content, indent=1) + "\n")


def save(
    path: Path, kind: str, results: dict[str, list[dict[str, Any]]], rounds: int, more: dict[str, Any] | None = None
) -> Path:
    """All tables with the machine, and what ``more`` says of all of them, as JSON beside a PNG of the ratios."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"kind": kind, "rounds": rounds, **(more or {}), "machine": machine.describe(), "results": results}
    path.write_text(json.dumps(content, indent=1) + "\n")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return path
    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 4.5), squeeze=False)
    for axis, (net, table_rows) in zip(axes[0], results.items(), strict=True):
        shown = [r for r in table_rows if r["to_best"] and not r["name"].startswith("bare")]
        colors = ["#2a6fbb" if r["name"].startswith("sj_tac") else "#8c8c8c" for r in shown]
        bars = axis.barh([r["name"] for r in shown][::-1], [r["to_best"] for r in shown][::-1], color=colors[::-1])
        axis.bar_label(bars, fmt="%.2fx", padding=2, fontsize=7)
        axis.set_title(net, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.margins(x=0.2)
    figure.suptitle(f"{kind}: speed-up over the best SpikingJelly configuration", fontsize=10)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=120)
    pyplot.close(figure)
    return path
