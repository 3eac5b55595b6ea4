"""Two pretrained SpikingJelly nets, converted without fine-tuning, on real data: what it costs and what it buys.

    python examples/quickstart.py

Rate-coded MNIST digits and N-MNIST event recordings; the nets are plain SpikingJelly (nets.py), their checkpoints were
trained by train.py. Every row is the same checkpoint. Prints a table for each and writes quickstart.png. It takes about
--seconds: rounds are timed while there is time, one in any case.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import nets
import torch
from rich.console import Console
from spikingjelly.activation_based import functional

import sj_tac
from sj_tac.tuning import plots
from sj_tac.tuning.bench import SOURCE, Bench, bench

HERE = Path(__file__).resolve().parent
MIXED = HERE / "policies" / "mixed.yaml"
BATCH = 25


@dataclass
class Task:
    """One net with its data: frames [T, N, C, H, W] and labels [N]."""

    title: str
    net: torch.nn.Module
    frames: torch.Tensor
    labels: torch.Tensor

    @property
    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.frames.split(BATCH, dim=1), self.labels.split(BATCH), strict=True))


def load(net: torch.nn.Module, name: str) -> torch.nn.Module:
    """The net with its shipped checkpoint, ready to predict."""
    path = HERE / "checkpoints" / f"{name}.pt"
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net.eval()


def digits(count: int = 1000) -> Task:
    images, labels = (part[:count] for part in datasets.shipped_digits())
    frames = datasets.rate_code(images, nets.DIGITS_T, torch.Generator().manual_seed(1))
    return Task(f"{len(labels):,} MNIST test digits, rate-coded", load(nets.DigitNet(), "digits"), frames, labels)


def events() -> Task:
    frames, labels = datasets.shipped_events(nets.EVENTS_T)
    return Task("100 N-MNIST test recordings, event frames", load(nets.EventNet(), "events"), frames, labels)


def digit_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For the command line: --data quickstart:digit_batches."""
    return digits().batches


def event_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For the command line: --data quickstart:event_batches."""
    return events().batches


def policies(task: Task) -> Mapping[str, tuple[Any, int]]:
    """The rows of the table: a policy, and the k where it does not say one."""
    steps = len(task.frames)
    return {
        "preserve k=2": ("preserve", 2),
        "preserve k=4": ("preserve", 4),
        "collapse k=4": ("collapse", 4),
        f"collapse k=T={steps}": ("collapse", steps),
        f"policies/{MIXED.name}": (MIXED, 2),
    }


def measured(task: Task, rounds: int, seconds: float | None = None) -> Bench:
    """The source net, SpikingJelly's own conv-BN folding of it, and the converted nets, side by side."""
    return bench(task.net, task.batches, policies(task), title=task.title, rounds=rounds, time_limit=seconds)


def predict(net: torch.nn.Module, frames: torch.Tensor) -> torch.Tensor:
    """Class votes averaged over time, for one batch; the neurons start at rest."""
    functional.reset_net(net)
    return net(frames).mean(0).argmax(1)


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, default=Path("quickstart.png"), help="where the plot goes")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of every net, at most; medians are shown")
    parser.add_argument("--seconds", type=float, default=20.0, help="what both tables may take, as far as rounds decide")
    parser.add_argument("--digits", type=int, default=300, help="how many of the 1,000 digits")
    args = parser.parse_args()
    if args.rounds < 1 or not args.seconds > 0 or not 1 <= args.digits <= 1000:
        parser.error("at least one round, more than no second, 1 to 1000 digits")

    console = Console()
    if not console.is_terminal:
        console = Console(width=112)
    tasks = [digits(args.digits), events()]
    # What becomes of the layers can be said before anything is compiled or timed.
    console.print(sj_tac.plan(tasks[1].net, MIXED, example_input=tasks[1].frames[:, :1]))
    tables = []
    for i, task in enumerate(tasks):
        print(f"{task.title} ...", file=sys.stderr, flush=True)
        left = args.seconds - (time.monotonic() - begun)
        tables.append(measured(task, args.rounds, max(left / (len(tasks) - i), 0.1)))
        console.print(tables[-1])
    console.print(
        f"One checkpoint per table, no fine-tuning; {SOURCE} runs eager, {torch.get_num_threads()} CPU threads "
        f"({platform.machine()}),\ntorch {torch.__version__}, SpikingJelly {version('spikingjelly')}, sj_tac "
        f"{sj_tac.__version__}.\n"
    )
    try:
        plots.bars(args.png, tables)
        console.print(f"Plot: {args.png}")
    except ImportError as error:
        console.print(str(error))


if __name__ == "__main__":
    main()
