"""What a search tried and found: every candidate with its figures, the Pareto frontier, and what was chosen and why."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from sj_tac.support.files import beside, write_text
from sj_tac.support.printing import Shown
from sj_tac.tuning.diagnosis import Diagnosis
from sj_tac.tuning.plots import frontier_plot

if TYPE_CHECKING:  # which measures what this shows
    from sj_tac.tuning.holding import HeldOut


@dataclass(frozen=True)
class Trial:
    """One policy, measured on the whole converted net.

    Attributes:
        choices: "keep", "preserve 2" ... of every layer; name: the same in short. uniform: all layers alike.
        metric: of the whole net on all batches. speedup: source / candidate of medians of interleaved runs (or of ``cost``).
            Candidates are timed in turns with one converted net, and that with the source.
        ms: that median; None where a ``cost`` was given. macs: of the convolutions, per sample. work: macs, and what the
            outputs' way through memory is worth in them.
        matched: what ``sj_tac.match`` kept before the metric was measured: "none", "moments", "rates"; empty without it.
        refused: why there is no such net; metric and speedup are then NaN, and missing from plain data.
    """

    choices: dict[str, str]
    name: str
    uniform: bool
    metric: float = float("nan")
    speedup: float = float("nan")
    ms: float | None = None
    macs: int = 0
    work: int = 0
    matched: str = ""
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which JSON can hold; ``Trial(**values)`` reads it back."""
        return {key: value for key, value in asdict(self).items() if value == value}


def frontier(trials: Iterable[Trial]) -> list[Trial]:
    """Those that no other beats in both metric and speed-up, the fastest first."""
    best: list[Trial] = []
    for trial in sorted((t for t in trials if not t.refused), key=lambda t: (-t.speedup, -t.metric)):
        if not best or trial.metric > best[-1].metric:
            best.append(trial)
    return best


@dataclass(frozen=True)
class Evidence(Shown):
    """Everything a search measured. ``print`` shows the frontier; ``save`` writes JSON and a picture.

    Attributes:
        objective: what was asked for, in words.
        metric: its name.
        source_metric: of the source on the same batches.
        trials: in the order they were tried.
        chosen: the name of the one whose policy was returned.
        final: milliseconds of the finalists and the source ("source"), measured side by side at the end.
        samples: how many it was measured on.
        seconds: of the whole search.
        machine: what it ran on.
        stopped: why it ended early, or "".
        notes: what to know about the figures.
        diagnosis: of the batches, where it was asked for.
        held_out: the choice on samples that had no say in it, if any.
    """

    objective: str
    metric: str
    source_metric: float
    trials: tuple[Trial, ...]
    chosen: str
    final: dict[str, float]
    samples: int
    seconds: float
    stopped: str
    notes: tuple[str, ...]
    machine: dict[str, Any]
    diagnosis: Diagnosis | None = None
    held_out: HeldOut | None = None

    def __getitem__(self, name: str) -> Trial:
        """The trial of that name. Raises KeyError."""
        for trial in self.trials:
            if trial.name == name:
                return trial
        raise KeyError(f"nothing named {name!r} was tried; there are {[t.name for t in self.trials]}")

    @property
    def frontier(self) -> list[Trial]:
        """The Pareto frontier over everything tried, the fastest first."""
        return frontier(self.trials)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        trials = [trial.to_dict() for trial in self.trials]
        return asdict(self) | {"trials": trials, "frontier": [t.name for t in self.frontier]}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """JSON at ``path``, the Pareto plot as a PNG beside it. Returns the PNG's path.

        Raises:
            WriteError: a file could not be written, or ``path`` is that of the PNG itself, or of a pipe.
            ImportError: no matplotlib.
        """
        picture = beside(path, ".png")
        write_text(path, self.to_json() + "\n")
        tried = [t for t in self.trials if not t.refused]
        chosen = next((t for t in tried if t.name == self.chosen), None)
        frontier_plot(picture, self.objective, self.metric, tried, self.frontier, chosen)
        return picture

    def __rich__(self) -> Group:
        return Group(self._table(), *self._words())

    def _table(self) -> Table:
        table = Table(title=f"Searched: {self.objective}", title_justify="left")
        for column in ("", "policy", self.metric, "to source", "speed-up", "conv MACs"):
            table.add_column(column, justify="left" if column in ("", "policy") else "right")
        on_it = {t.name for t in self.frontier}
        shown = [t for t in self.trials if not t.refused and (t.name in on_it or t.uniform or t.name == self.chosen)]
        for t in sorted(shown, key=lambda t: -t.speedup):
            mark = "*" if t.name == self.chosen else "·" if t.name in on_it else ""
            drop = f"{t.metric - self.source_metric:+.4f}"
            table.add_row(mark, t.name, f"{t.metric:.4f}", drop, f"{t.speedup:.2f}x", f"{t.macs / 1e6:.1f} M")
        return table

    def _words(self) -> list[str]:
        tried = f"{len(self.trials)} policies tried in {self.seconds:.0f} s on {self.samples} samples"
        told = f"* chosen, · on the Pareto frontier. {tried}"
        words = [f"{told}; {self.stopped}" if self.stopped else f"{told}."]
        if len(self.final) > 1:
            source = self.final["source"]
            ranked = sorted((ms, name) for name, ms in self.final.items() if name != "source")
            best = "; ".join(f"{name} {ms:.1f} ms ({source / ms:.2f}x)" for ms, name in ranked[:4])
            words.append(f"Side by side at the end: source {source:.1f} ms; {best}.")
        words += self.notes
        return [*words, *(self.diagnosis.reasons if self.diagnosis is not None else ())]


def simplicity(trial: Trial) -> tuple[Any, ...]:
    """Between equals: fewer layers left alone, fewer different choices, the name."""
    said = list(trial.choices.values())
    return said.count("keep"), len(set(said)), trial.name
