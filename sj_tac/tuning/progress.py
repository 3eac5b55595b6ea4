"""What is being measured, on stderr: a bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Seconds between two lines, where they are no bar that is drawn again.
BETWEEN = 5.0


class Bar:
    """Counts steps; ``shown=False`` does nothing. ``expect`` says how many there will be, as far as is known."""

    def __init__(self, title: str, total: int | None, shown: bool) -> None:
        console = Console(stderr=True)
        # rich draws in a notebook through ipywidgets, and warns at every call where they are not installed.
        drawn = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"),
            TimeRemainingColumn(), TextColumn("{task.fields[best]}{task.fields[what]}"),
        )  # fmt: skip
        self.progress = Progress(*columns, console=console, transient=True, disable=not (shown and drawn))
        self.task = self.progress.add_task(title, total=total, what="", best="")
        self.title, self.total, self.lines = title, total, shown and not drawn
        self.done, self.best = 0, ""
        self.begun = self.said = time.perf_counter()

    def expect(self, total: int) -> None:
        """What the total is now thought to be; never less than what is done."""
        self.total = max(total, self.done + 1)
        self.progress.update(self.task, total=self.total)

    def note(self, best: str) -> None:
        """The best so far."""
        self.best = f"best so far: {best}; "
        self.progress.update(self.task, best=self.best)

    def step(self, what: str) -> None:
        self.done += 1
        if self.total is not None and self.done > self.total:
            self.expect(self.done)
        self.progress.update(self.task, advance=1, what=what)
        now = time.perf_counter()
        if self.lines and now - self.said >= BETWEEN:
            self.said = now
            print(self.line(what, now), file=sys.stderr, flush=True)

    def line(self, what: str, now: float) -> str:
        """Where things stand, in a line."""
        taken = now - self.begun
        left = "" if self.total is None else f", about {_clock(taken / self.done * (self.total - self.done))} left"
        of = "" if self.total is None else f" of about {self.total}"
        return f"{self.title}: {self.done}{of} in {_clock(taken)}{left}; {self.best}{what}"

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02}"
