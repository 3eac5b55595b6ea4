"""A progress bar on stderr that says what is being measured."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """Counts steps; ``shown=False`` does nothing. The total may grow as more work is found."""

    def __init__(self, title: str, total: int | None, shown: bool) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[what]}"),
        )  # fmt: skip
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self.task = self.progress.add_task(title, total=total, what="")

    def step(self, what: str) -> None:
        self.progress.update(self.task, advance=1, what=what)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()
