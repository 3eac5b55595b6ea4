"""Two pretrained SpikingJelly nets, converted without fine-tuning, on real data: what it costs and what it buys.

    python examples/quickstart.py

Rate-coded MNIST digits and N-MNIST event recordings; the nets are plain SpikingJelly (nets.py), their checkpoints were
trained by train.py. Every row is the same checkpoint. Prints a table and writes quickstart.png.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import datasets
import nets
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from spikingjelly.activation_based import functional, neuron
from timing import FUSED, SOURCE, host_configurations, in_turns

import sj_tac
from sj_tac.report import total_macs

HERE = Path(__file__).resolve().parent
MIXED = HERE / "policies" / "mixed.yaml"
BATCH = 100


@dataclass
class Task:
    """One net with its data: frames [T, N, C, H, W] and labels [N]."""

    title: str
    net: torch.nn.Module
    frames: torch.Tensor
    labels: torch.Tensor

    @property
    def batches(self) -> list[torch.Tensor]:
        return list(self.frames.split(BATCH, dim=1))


@dataclass
class Result:
    """One row of the table."""

    name: str
    net: torch.nn.Module
    macs: int
    predictions: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    firing: float = 0.0
    seconds: list[float] = field(default_factory=list)


def load(net: torch.nn.Module, name: str) -> torch.nn.Module:
    """The net with its shipped checkpoint, ready to predict."""
    path = HERE / "checkpoints" / f"{name}.pt"
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net.eval()


def digits() -> Task:
    images, labels = datasets.shipped_digits()
    frames = datasets.rate_code(images, nets.DIGITS_T, torch.Generator().manual_seed(1))
    return Task("1,000 MNIST test digits, rate-coded", load(nets.DigitNet(), "digits"), frames, labels)


def events() -> Task:
    frames, labels = datasets.shipped_events(nets.EVENTS_T)
    return Task("100 N-MNIST test recordings, event frames", load(nets.EventNet(), "events"), frames, labels)


def variants(task: Task) -> list[Result]:
    """The source net, SpikingJelly's own conv-BN fusion of it, and the converted nets."""
    sample, steps = task.frames[:, :1], len(task.frames)
    policies: list[tuple[str, str | Path, int]] = [
        ("preserve k=2", "preserve", 2),
        ("preserve k=4", "preserve", 4),
        ("collapse k=4", "collapse", 4),
        (f"collapse k=T={steps}", "collapse", steps),
        (f"policies/{MIXED.name}", MIXED, 2),
    ]
    before, _ = total_macs(sj_tac.plan(task.net, example_input=sample).verdicts)
    results = [Result(name, net, before) for name, net in host_configurations(task.net).items()]
    for name, policy, k in policies:
        fast = sj_tac.convert(task.net, policy, k, example_input=sample)
        assert list(fast.state_dict()) == list(task.net.state_dict())
        results.append(Result(name, fast, total_macs(sj_tac.report(fast).verdicts)[1]))
    return results


def predict(net: torch.nn.Module, frames: torch.Tensor) -> torch.Tensor:
    """Class votes averaged over time, for one batch; the neurons start at rest."""
    functional.reset_net(net)
    return net(frames).mean(0).argmax(1)


def watch_firing(net: torch.nn.Module) -> tuple[Callable[[], float], list]:
    """Spikes per neuron and step, over all neurons, while the hooks are on."""
    totals = [0.0, 0]

    def count(module: torch.nn.Module, args: object, spikes: torch.Tensor) -> None:
        totals[0] += spikes.mean().item() * spikes[0].numel()
        totals[1] += spikes[0].numel()

    handles = [m.register_forward_hook(count) for m in net.modules() if isinstance(m, neuron.BaseNode)]
    return lambda: totals[0] / totals[1], handles


@torch.no_grad()
def measure(results: list[Result], task: Task, rounds: int, tick: Callable[[], None]) -> None:
    for result in results:
        firing, handles = watch_firing(result.net)
        result.predictions = torch.cat([predict(result.net, batch) for batch in task.batches])
        result.firing = firing()
        for handle in handles:
            handle.remove()
        tick()
    batches = itertools.cycle(task.batches)
    for _ in range(rounds):
        batch = next(batches)
        taken = in_turns({r.name: lambda net=r.net, batch=batch: predict(net, batch) for r in results}, 1, tick)
        for result in results:
            result.seconds += taken[result.name]


def speedup(result: Result, results: list[Result]) -> float:
    """Against the faster of SpikingJelly's two configurations of this run, medians."""
    best = min(statistics.median(r.seconds) for r in results if r.name in (SOURCE, FUSED))
    return best / statistics.median(result.seconds)


def accuracy(result: Result, task: Task) -> float:
    return 100 * (result.predictions == task.labels).float().mean().item()


def tabulate(task: Task, results: list[Result]) -> Table:
    table = Table(title=task.title, title_justify="left")
    table.add_column("net")
    for column in ("accuracy %", "agreement %", "firing rate", "conv MACs/sample", "ms/batch", "speed-up"):
        table.add_column(column, justify="right")
    for r in results:
        agreement = 100 * (r.predictions == results[0].predictions).float().mean().item()
        table.add_row(
            r.name,
            f"{accuracy(r, task):.1f}",
            f"{agreement:.1f}",
            f"{r.firing:.3f}",
            f"{r.macs / 1e6:.1f} M",
            f"{1e3 * statistics.median(r.seconds):.0f}",
            f"{speedup(r, results):.2f}x",
        )
    return table


def plot(pairs: list[tuple[Task, list[Result]]], path: Path) -> bool:
    """Accuracy and speed-up of every row as bars. False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(2, len(pairs), figsize=(6 * len(pairs), 6.5), squeeze=False, sharey="row")
    for column, (task, results) in enumerate(pairs):
        names = [r.name.replace(", ", ",\n") for r in results]
        for row, (label, values, form) in enumerate(
            [
                ("accuracy %", [accuracy(r, task) for r in results], "%.1f"),
                ("speed-up over the best SpikingJelly row", [speedup(r, results) for r in results], "%.2fx"),
            ]
        ):
            axis = axes[row][column]
            colors = ["#8c8c8c" if r.name in (SOURCE, FUSED) else "#2a6fbb" for r in results]
            axis.bar_label(axis.bar(range(len(names)), values, color=colors), fmt=form, padding=2, fontsize=8)
            axis.set_xticks(range(len(names)), names if row else [], rotation=35, ha="right", fontsize=8)
            axis.set_ylabel(label if column == 0 else "", fontsize=9)
            axis.margins(y=0.15)
            axis.spines[["top", "right"]].set_visible(False)
            if not row:
                axis.set_title(task.title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, default=Path("quickstart.png"), help="where the plot goes")
    parser.add_argument("--rounds", type=int, default=9, help="timed batches per net (the median is shown)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")

    console = Console()
    if not console.is_terminal:
        console = Console(width=112)
    tasks = [digits(), events()]
    pairs = [(task, variants(task)) for task in tasks]
    with Progress(console=console, transient=True) as progress:
        for task, results in pairs:
            bar = progress.add_task(task.title, total=len(results) + args.rounds)
            measure(results, task, args.rounds, lambda bar=bar: progress.advance(bar))
    for task, results in pairs:
        console.print(tabulate(task, results))
    console.print(
        f"One checkpoint per table, no fine-tuning. Agreement: same prediction as {SOURCE}.\n"
        f"Speed-up: against the faster of the two SpikingJelly rows, eager, median of {args.rounds} interleaved batches\n"
        f"of {BATCH}, {torch.get_num_threads()} CPU threads ({platform.machine()}), torch {torch.__version__}, "
        f"SpikingJelly {version('spikingjelly')}, sj_tac {sj_tac.__version__}.\n"
    )
    console.print(sj_tac.report(pairs[1][1][-1].net))
    if plot(pairs, args.png):
        console.print(f"Plot: {args.png}")
    else:
        console.print("No plot: matplotlib is not installed (pip install matplotlib).")


if __name__ == "__main__":
    main()
