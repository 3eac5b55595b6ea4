"""Accuracy over k, speed-up over k, and the one against the other, from a study's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {"TAC (paper)": "#c0504d", "TAC-TP (paper)": "#e0913a", "preserve": "#2a6fbb", "collapse": "#4f9a5b"}
STYLES = {"scratch": ":", "converted": "-", "fine-tuned": "--"}


def draw(content: dict[str, Any], path: Path) -> bool:
    """Write a PNG. False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, (accuracy, speed, pareto) = pyplot.subplots(1, 3, figsize=(14, 4.2))
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in content["rows"]:
        lines.setdefault((entry["name"], entry["how"]), []).append(entry)
    base = lines.pop(("baseline", "scratch"))[0]
    lines = {key: entries for key, entries in lines.items() if entries[0]["macs"]}
    for axis in (accuracy, pareto):
        axis.axhline(base["accuracy"], color="#8c8c8c", linewidth=1, label="baseline")
    for (name, how), entries in lines.items():
        style = {
            "color": COLORS.get(name, "#7f5fa8"),
            "linestyle": STYLES[how],
            "marker": "o",
            "markersize": 4,
            "linewidth": 1.5,
        }
        ks = [e["k"] for e in entries]
        accuracy.errorbar(
            ks, [e["accuracy"] for e in entries], [e["spread"] or 0 for e in entries], label=f"{name}, {how}", **style
        )
        timed = [e for e in entries if e["speed_up"]]
        if how == "converted" and timed:
            speed.plot([e["k"] for e in timed], [e["speed_up"] for e in timed], label=name, **style)
        if timed:
            pareto.plot([e["speed_up"] for e in timed], [e["accuracy"] for e in timed], label=f"{name}, {how}", **style)
    speed.axhline(1, color="#8c8c8c", linewidth=1)
    for axis, across, up in (
        (accuracy, "k", "accuracy %"),
        (speed, "k", "speed-up over the faster SpikingJelly"),
        (pareto, "speed-up over the faster SpikingJelly", "accuracy %"),
    ):
        axis.set_xscale("log", base=2)
        axis.set_xlabel(across)
        axis.set_ylabel(up)
        axis.spines[["top", "right"]].set_visible(False)
        ticks = sorted({e["k"] for es in lines.values() for e in es}) if across == "k" else [1, 2, 4, 8, 16]
        axis.set_xticks(ticks, [str(t) for t in ticks])
    accuracy.legend(fontsize=7, frameon=False)
    figure.suptitle(f"{content['title']} ({content['protocol']['name']})", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
