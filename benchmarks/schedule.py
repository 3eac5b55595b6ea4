"""What training with k as a schedule saves, and costs: python -m benchmarks.schedule --cache FOLDER --mnist FOLDER ...

Two runs of one seed take turns, epoch by epoch: one at k = 1 throughout, one by ``sj_tac.KSchedule``. Both are fused, have
the same initial weights, batches and learning rates, and both are tested as the plain net that ``restore`` gives. Seconds
are of training alone, with the re-estimation of statistics. After a kill the same command goes on with what is missing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import datasets
import nets
import training
from datasets import Frames, RateCoded

import sj_tac
from benchmarks import measure
from benchmarks.matching_nets import split
from sj_tac.support import machine
from sj_tac.support.files import write_text

T, BATCH, ESTIMATING = 16, 32, 4
WHOLE, SCHEDULED = "k=1", "scheduled"


@dataclass(frozen=True)
class Task:
    """A net, its data and how it is trained. ``ks``: {epoch: k}; ``weights``: of the frames of a group."""

    build: Callable[[], nn.Module]
    data: Callable[[Namespace], tuple[training.Data, training.Data]]
    epochs: int
    ks: dict[int, int]
    rate: float = 3e-3
    weights: str = "decay"


def images(name: str) -> Callable[[Namespace], tuple[training.Data, training.Data]]:
    def read(options: Namespace) -> tuple[training.Data, training.Data]:
        folder = getattr(options, name)
        if folder is None:
            raise SystemExit(f"--{name} FOLDER is missing: the four idx.gz files")
        train, test = datasets.mnist(folder, "train"), datasets.mnist(folder, "t10k")
        counts = (512, 200) if options.quick else (6000, 5000)
        return tuple(RateCoded(x[:n], y[:n], T) for (x, y), n in zip((train, test), counts, strict=True))  # type: ignore[return-value]

    return read


def events(name: str) -> Callable[[Namespace], tuple[training.Data, training.Data]]:
    def read(options: Namespace) -> tuple[training.Data, training.Data]:
        train, test = split(name, options.nmnist, options.cache, options.quick, tested=1100)
        return Frames(*train, 2), Frames(*test)

    return read


TASKS = {
    "MNIST": Task(nets.DigitNet, images("mnist"), 8, {0: 8, 4: 4, 7: 1}),
    "Fashion-MNIST": Task(nets.DigitNet, images("fashion"), 8, {0: 8, 4: 4, 7: 1}),
    "N-MNIST": Task(nets.EventNet, events("nmnist"), 16, {0: 4, 8: 2, 13: 1}),
    "gestures": Task(lambda: nets.GestureNet(11, 24, 4, 32), events("gestures"), 16, {0: 4, 8: 2, 13: 1}),
}


def tested(net: nn.Module, test: training.Data) -> float:
    predictions, labels = training.predict(net, test, 100)
    return 100 * (predictions == labels).double().mean().item()


def run(name: str, seed: int, options: Namespace) -> dict[str, Any]:
    """Both runs of one seed."""
    task = TASKS[name]
    train, test = task.data(options)
    ks = {0: 4, 1: 1} if options.quick else task.ks
    recipe = training.Recipe(2 if options.quick else task.epochs, BATCH, task.rate, "rate", seed)
    rows = list(torch.linspace(0, len(train) - 1, ESTIMATING * BATCH).long().split(BATCH))
    estimating = [frames for frames, _ in train.load(rows, [seed] * len(rows))]
    trained: dict[str, nn.Module] = {}
    for kind in (WHOLE, SCHEDULED):
        torch.manual_seed(seed)
        policy = {"default": {"mode": "preserve", "k": 1, "weights": task.weights}}
        trained[kind] = sj_tac.convert(task.build(), policy)
    schedule = sj_tac.KSchedule(trained[SCHEDULED], ks, batches=estimating)
    runs = {kind: training.epochs(net, train, recipe) for kind, net in trained.items()}
    spent, curves = dict.fromkeys(runs, 0.0), {kind: [] for kind in runs}  # type: ignore[var-annotated]
    for epoch in range(-1, recipe.epochs):
        for kind, steps in runs.items():
            begun = time.perf_counter()
            if kind == SCHEDULED and epoch >= 0:
                schedule.step(epoch)
            history = next(steps)
            if epoch >= 0:
                spent[kind] += time.perf_counter() - begun
                curves[kind].append(history.rows[-1] | {"seconds": spent[kind]})
    for steps in runs.values():
        next(steps, None)
    found = {"task": name, "seed": seed, "ks": ks, "epochs": recipe.epochs, "train": len(train), "test": len(test)}
    for kind, net in trained.items():
        accurate = tested(sj_tac.restore(net), test)
        found[kind] = {"accuracy": accurate, "seconds": spent[kind], "curve": curves[kind]}
    return found


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and standard deviations over seeds, and of the differences of the same seed."""
    made = []
    for name in dict.fromkeys(row["task"] for row in found):
        same = [row for row in found if row["task"] == name]
        entry = {key: same[0][key] for key in ("task", "ks", "epochs", "train", "test")} | {"seeds": len(same)}
        for kind in (WHOLE, SCHEDULED):
            values = [row[kind]["accuracy"] for row in same]
            entry[kind] = [statistics.mean(values), statistics.pstdev(values)]
        entry["difference"] = statistics.mean(row[SCHEDULED]["accuracy"] - row[WHOLE]["accuracy"] for row in same)
        entry["seconds"] = statistics.median(row[WHOLE]["seconds"] for row in same)
        entry["time"] = statistics.median(row[SCHEDULED]["seconds"] / row[WHOLE]["seconds"] for row in same)
        made.append(entry)
    return made


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Training accuracy over seconds of training, a panel a task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["task"] for row in found))
    figure, axes = pyplot.subplots(1, len(names), figsize=(3.6 * len(names), 3.4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for row in (row for row in found if row["task"] == name):
            for kind, color in ((WHOLE, "#8c8c8c"), (SCHEDULED, "#2a6fbb")):
                curve = row[kind]["curve"]
                label = kind if row["seed"] == found[0]["seed"] else None
                points = ([point[key] for point in curve] for key in ("seconds", "train_accuracy"))
                axis.plot(*points, ".-", color=color, label=label)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("seconds of training", fontsize=8)
        axis.set_ylabel("training accuracy %", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def arguments() -> Namespace:
    made = measure.parser(__doc__ or "")
    made.add_argument("--cache", type=Path, required=True, help="folder of finished runs and generated data")
    made.add_argument("--mnist", type=Path, help="folder of MNIST's four idx.gz files")
    made.add_argument("--fashion", type=Path, help="folder of Fashion-MNIST's four idx.gz files")
    made.add_argument("--nmnist", type=Path, help="an archive of N-MNIST recordings (default: the shipped 100)")
    made.add_argument("--task", action="append", choices=list(TASKS), help="only these (default: all)")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--quick", action="store_true", help="few samples, two epochs: a trial of the script")
    return measure.parsed(made)


def main() -> None:
    options = arguments()
    options.cache.mkdir(parents=True, exist_ok=True)
    out = options.out or measure.RESULTS / f"schedule-cpu-{date.today().isoformat()}.json"
    console, found = Console(width=125), []
    for name in options.task or TASKS:
        for seed in options.seeds:
            kept = options.cache / f"schedule-{name}-{seed}{'-quick' if options.quick else ''}.json"
            if not kept.exists():
                write_text(kept, json.dumps(run(name, seed, options)))
            found.append(json.loads(kept.read_text()))
            row = found[-1]
            console.print(
                f"{name}, seed {seed}: k=1 {row[WHOLE]['accuracy']:.2f} % in {row[WHOLE]['seconds']:.0f} s, scheduled "
                f"{row[SCHEDULED]['accuracy']:.2f} % in {row[SCHEDULED]['seconds']:.0f} s"
            )
    content = {"kind": "schedule", "machine": machine.describe(), "summary": summary(found), "rows": found}
    write_text(out, json.dumps(content, indent=1) + "\n")
    draw(found, out.with_suffix(".png"))
    console.print(f"Written: {out}")


if __name__ == "__main__":
    main()
