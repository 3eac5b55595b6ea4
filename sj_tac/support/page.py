"""A report as one HTML page that needs no network: verdicts, MACs, rates and times by layer, the search's frontier."""

from __future__ import annotations

import os
from importlib.resources import files
from typing import Any

from sj_tac.support import machine
from sj_tac.support.files import write_text

# The plot's frame in the page's own units.
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 620, 20, 320


def short(count: float) -> str:
    """A count with three digits and a unit: 16.3 M."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g}"


def write(path: str | os.PathLike[str], report: Any) -> None:
    """Write the page of a Report. Raises WriteError."""
    # Whatever stands in a name is text in the page.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(files("sj_tac.support").joinpath("report.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        title=report.title,
        about=_about(),
        tiles=_tiles(report),
        notes=report.notes,
        verdicts=[_verdict(v) for v in report.verdicts],
        layers=[_layer(row) for row in report.layers],
        search=None if report.evidence is None else _search(report.evidence),
    )
    # A name may hold half a surrogate pair, which is no text.
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))


def _about() -> str:
    found = machine.describe()
    names = ("sj_tac", "spikingjelly", "torch")
    versions = ", ".join(f"{name} {found[name]}" for name in names if name in found)
    return f"{versions}; {found.get('gpu', found['cpu'])}, {found['threads']} CPU threads; {found['date']}"


def _tiles(report: Any) -> list[tuple[str, str]]:
    tiles = [(kind, str(len(getattr(report, kind)))) for kind in ("converted", "stretched", "kept", "refused")]
    known = [v for v in report.verdicts if v.macs_before is not None and v.macs_after is not None]
    if known:
        before, after = sum(v.macs_before for v in known), sum(v.macs_after for v in known)
        tiles.append(("conv MACs per sample", f"{short(before)} → {short(after)}"))
    return tiles


def _verdict(v: Any) -> dict[str, Any]:
    known = v.macs_before is not None and v.macs_after is not None
    why = [f"{v.reason}: {v.detail}" if v.reason else v.detail]
    return {
        "layer": v.layer,
        "status": v.status,
        "mode": v.mode or "",
        "k": v.k or "",
        "kernel": v.kernel or "",
        "before": short(v.macs_before) if known else "",
        "after": short(v.macs_after) if known else "",
        "share": round(100 * v.macs_after / v.macs_before, 1) if known and v.macs_before else None,
        "why": "; ".join(said for said in why if said),
        "hint": v.hint,
    }


def _layer(row: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "rates": ["" if rate is None else f"{rate:.4f}" for rate in (row.rate_before, row.rate_after)],
        "times": ["" if ms is None else f"{ms:.3f}" for ms in (row.ms_before, row.ms_after)],
    }


def _search(evidence: Any) -> dict[str, Any]:
    tried = [t for t in evidence.trials if not t.refused]
    best = {t.name for t in evidence.frontier}

    def kind(t: Any) -> str:
        return "chosen" if t.name == evidence.chosen else "best" if t.name in best else "tried"

    across, up = _Scale([t.speedup for t in tried], _LEFT, _RIGHT), _Scale([t.metric for t in tried], _BOTTOM, _TOP)
    stopped = f"; {evidence.stopped}" if evidence.stopped else ""
    words = (
        f"{evidence.objective}. {len(evidence.trials)} policies tried in {evidence.seconds:.0f} s on {evidence.samples} "
        f"samples{stopped}. The source has {evidence.metric} {evidence.source_metric:.4f}. {' '.join(evidence.notes)}"
    )
    return {
        "words": words,
        "metric": evidence.metric,
        "across": [(x, f"{value:.2f}x") for x, value in across.ticks()],
        "up": [(y + 4, f"{value:.3f}") for y, value in up.ticks()],
        "line": " ".join(f"{across(t.speedup)},{up(t.metric)}" for t in evidence.frontier),
        # The chosen one last, on top of the others.
        "points": [
            {
                "name": f"{t.name}: {t.metric:.4f}, {t.speedup:.2f}x",
                "x": across(t.speedup),
                "y": up(t.metric),
                "kind": kind(t),
            }
            for t in sorted(tried, key=lambda t: t.name == evidence.chosen)
        ],
        "trials": [
            {
                "kind": kind(t),
                "name": t.name,
                "metric": f"{t.metric:.4f}",
                "drop": f"{t.metric - evidence.source_metric:+.4f}",
                "speedup": f"{t.speedup:.2f}x",
                "ms": "" if t.ms is None else f"{t.ms:.2f}",
                "macs": short(t.macs),
            }
            for t in sorted(tried, key=lambda t: -t.speedup)
        ],
    }


class _Scale:
    """Where numbers come to stand between two ends of the plot."""

    def __init__(self, numbers: list[float], start: float, end: float) -> None:
        low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
        room = 0.05 * (high - low) or 0.05
        self.low, self.high, self.start, self.end = low - room, high + room, start, end

    def __call__(self, number: float) -> float:
        return round(self.start + (number - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[float, float]]:
        values = [self.low + (self.high - self.low) * i / 4 for i in range(5)]
        return [(self(value), value) for value in values]
