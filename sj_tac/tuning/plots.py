"""Pictures: the heat map of a sensitivity analysis, the Pareto frontier of a search. matplotlib is imported when drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sj_tac.support.files import write_whole

BLUE, GREY, RED = "#2a6fbb", "#8c8c8c", "#c0392b"


def require() -> Any:
    """matplotlib's Figure. Raises ImportError: not installed.

    Not pyplot: that draws with the backend of the whole process, which is the user's to choose, in a notebook above all.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('no picture: matplotlib is not installed; pip install "sj_tac[plots]"') from None
    return Figure


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    write_whole(path, lambda draft: figure.savefig(draft, dpi=130, format="png"))


def heat_map(path: Path, effects: Sequence[Any]) -> None:
    """Layers x k: one map for the predictions that change, one for the milliseconds saved; a row of maps for each mode.

    A setting that was not measured stays empty.
    """
    make = require()
    modes = list(dict.fromkeys(e.mode for e in effects)) or ["preserve"]
    layers, ks = list(dict.fromkeys(e.layer for e in effects)), sorted({e.k for e in effects})
    size = (2 * (2.2 + 0.9 * len(ks)), len(modes) * (1.4 + 0.42 * max(1, len(layers))))
    figure = make(figsize=size)
    axes = figure.subplots(len(modes), 2, squeeze=False)
    shown = (("predictions changed, %", "Reds", "disagreement", 100), ("ms saved", "Blues", "ms_saved", 1))
    for row, mode in enumerate(modes):
        for column, (title, colours, figure_of, unit) in enumerate(shown):
            axis = axes[row][column]
            of_mode = [e for e in effects if e.mode == mode]
            values = {(e.layer, e.k): unit * getattr(e, figure_of) for e in of_mode if not e.refused}
            refused = {(e.layer, e.k) for e in of_mode if e.refused}
            grid = [[values.get((layer, k), float("nan")) for k in ks] for layer in layers]
            top = max(1e-9, *values.values()) if values else 1.0
            axis.imshow(grid, cmap=colours, aspect="auto", vmin=0, vmax=top)
            for y, layer in enumerate(layers):
                for x, k in enumerate(ks):
                    number = values.get((layer, k))
                    text = f"{number:.1f}" if number is not None else "refused" if (layer, k) in refused else ""
                    colour = "white" if number is not None and number > 0.6 * top else "black"
                    axis.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
            axis.set_xticks(range(len(ks)), [f"k={k}" for k in ks], fontsize=8)
            axis.set_yticks(range(len(layers)), layers if column == 0 else [], fontsize=7)
            axis.set_title(f"{mode}: {title}", fontsize=9)
    _save(figure, path)


def bars(path: Path, tables: Sequence[Any]) -> None:
    """Accuracy (agreement where there are no labels) and speed-up of every row, a column for each table."""
    figure = require()(figsize=(6 * len(tables), 6.5))
    axes = figure.subplots(2, len(tables), squeeze=False, sharey="row")
    for column, table in enumerate(tables):
        rows = table.rows
        names = [r.name.replace(", ", ",\n") for r in rows]
        labelled = rows[0].accuracy is not None
        right = [100 * (r.accuracy if labelled else r.agreement) for r in rows]
        kinds = (
            ("accuracy %" if labelled else "agreement %", right, "%.1f"),
            (
                "speed-up over the best SpikingJelly row",
                [math.nan if r.speedup is None else r.speedup for r in rows],
                "%.2fx",
            ),
        )
        for row, (label, values, form) in enumerate(kinds):
            axis = axes[row][column]
            colours = [GREY if r.host else BLUE for r in rows]
            told = ["" if math.isnan(value) else form % value for value in values]
            axis.bar_label(axis.bar(range(len(names)), values, color=colours), labels=told, padding=2, fontsize=8)
            axis.set_xticks(range(len(names)), names if row else [], rotation=35, ha="right", fontsize=8)
            axis.set_ylabel(label if column == 0 else "", fontsize=9)
            axis.margins(y=0.15)
            axis.spines[["top", "right"]].set_visible(False)
            if not row:
                axis.set_title(table.title, fontsize=10)
    _save(figure, path)


def frontier_plot(path: Path, title: str, metric: str, points: Sequence[Any], best: Sequence[Any], chosen: Any) -> None:
    """Speed-up against metric: everything tried, uniform policies as squares, the frontier as a line, what was chosen."""
    figure = require()(figsize=(7, 4.6))
    axis = figure.subplots()
    for uniform, marker, colour, label in ((False, "o", GREY, "tried"), (True, "s", BLUE, "the same in every layer")):
        some = [p for p in points if p.uniform == uniform]
        axis.plot([p.speedup for p in some], [p.metric for p in some], marker, color=colour, markersize=4, label=label)
    axis.plot([p.speedup for p in best], [p.metric for p in best], "-", color=GREY, linewidth=1, label="Pareto frontier")
    if chosen is not None:
        axis.plot([chosen.speedup], [chosen.metric], "*", color=RED, markersize=13, label="chosen")
    axis.set_xlabel("speed-up over the source (1 = source)", fontsize=9)
    axis.set_ylabel(metric, fontsize=9)
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)
