"""The tables of docs/speed.md: SpikingJelly's configurations and sj_tac, measured in turns in one run."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import LAST
from benchmarks.tables import rows, where

BARE = "bare convolutions"


def _about(content: dict[str, Any]) -> str:
    """Where, how often, in which of the two memory modes and in which precision it was measured."""
    memory = " The process keeps its memory." if content["machine"].get("memory") == "kept" else ""
    kind = f" Everything in {content['precision']}." if "precision" in content else ""
    turns = " Each timed run behind one of its own, as in a loop." if content.get("again") else ""
    return f"{where(content['machine'])}; medians of {content['rounds']} interleaved rounds.{turns}{memory}{kind}"


def measured(content: dict[str, Any]) -> str:
    """Every configuration of every net: milliseconds, to the best of SpikingJelly, to the convolutions alone, memory."""
    text = f"{_about(content)}\n"
    for net, found in content["results"].items():
        saved = [("saved MB", "saved for backward, MB")] if "saved MB" in found[0] else []
        more = [*saved, ("peak MB", "peak MB")]
        lines = []
        for row in found:
            if not row["name"].startswith(BARE):
                floor = f"{row['to_floor']:.2f}x" if row["to_floor"] else ""
                sizes = ["" if row[key] is None else f"{row[key]:.0f}" for key, _ in more]
                lines.append([row["name"], f"{row['ms']:.1f}", f"{row['to_best']:.2f}x", floor, *sizes])
        head = [net, "ms", "against the best SpikingJelly", "against the bare convolutions", *(word for _, word in more)]
        text += "\n" + rows(head, lines)
    return text


def compared(content: dict[str, Any]) -> str:
    """A line a net: how much faster than the best of SpikingJelly, contiguous / channels_last."""
    nets = {net: {row["name"]: row for row in found} for net, found in content["results"].items()}
    ks = [k for k in (1, 2, 4, 8) if any(f"sj_tac preserve k={k}" in found for found in nets.values())]
    lines = []
    for net, found in nets.items():
        best = next(row for name, row in found.items() if name.startswith("SpikingJelly") and row["to_best"] == 1)
        cells = [net, f"{best['ms']:.1f}", best["name"].removeprefix("SpikingJelly ")]
        for name in (f"sj_tac preserve k={k}" for k in ks):
            both = [f"{found[kind]['to_best']:.2f}x" for kind in (name, name + LAST) if kind in found]
            cells.append(" / ".join(both))
        for name in (f"sj_tac collapse k={k}" for k in ks if k > 1):
            cells.append(f"{found[name]['to_best']:.2f}x" if name in found else "")
        lines.append(cells)
    head = ["net", "best SpikingJelly, ms", "which", *(f"preserve k={k}" for k in ks)]
    about = f"{_about(content)}\n\n"
    return about + rows([*head, *(f"collapse k={k}" for k in ks if k > 1)], lines)


def steps(content: dict[str, Any]) -> str:
    """A training step of one net in several ways, with SpikingJelly's as the measure."""
    (found,) = content["results"].values()
    lines = [[row["name"], f"{row['ms']:.1f}", f"{row['to_best']:.2f}x"] for row in found]
    about = f"{_about(content)}\n\n"
    return about + rows(["", "ms", "to SpikingJelly"], lines)


def idioms(content: dict[str, Any]) -> str:
    """Miniature nets, by k: how much faster than the source itself."""
    ks = [key for key in content["rows"][0] if key.startswith("k=")]
    lines = [[row["name"], f"{row['ms']:.2f}", *(f"{row[k]:.2f}x" for k in ks)] for row in content["rows"]]
    about = f"{_about(content)}\n\n"
    return about + rows(["idiom", "SpikingJelly eager, ms", *ks], lines)


def bandwidth(content: dict[str, Any]) -> str:
    """``fire`` beside a copy of as many bytes, by k, and what a neuron's step takes at the largest k."""
    ks = [key.removeprefix("fire ") for key in content["rows"][0] if key.startswith("fire ")]

    def cell(row: dict[str, Any], k: str) -> str:
        fire, copy = row[f"fire {k}"], row[f"copy {k}"]
        return f"{fire:.0f} / {copy:.0f} = {100 * fire / copy:.0f} %"

    lines = [[row["name"], *(cell(row, k) for k in ks), f"{row[f'step {ks[-1]}']:.0f}"] for row in content["rows"]]
    about = f"{_about(content)} Gigabytes a second of `fire` / of a copy.\n\n"
    return about + rows(["128 channels, batch 4, T = 16", *ks, f"a step at {ks[-1]}, ps"], lines)


TABLES = {
    "bandwidth": bandwidth,
    "idioms": idioms,
    "measured": measured,
    "compared": compared,
    "steps": steps,
}
