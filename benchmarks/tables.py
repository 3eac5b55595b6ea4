"""Markdown of tables: what the generated pages share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS

# The paper's own figures stand beside the folder of what was measured here.
PLACES = (RESULTS, RESULTS.parent)


def read(name: str) -> dict[str, Any]:
    """A JSON file of benchmarks/results, or benchmarks/paper.json. Raises FileNotFoundError."""
    path: Path = next((place / name for place in PLACES if (place / name).exists()), RESULTS / name)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def rows(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, ["---"] * len(head), *lines])


def where(machine: dict[str, Any]) -> str:
    """Machine and versions, in one line."""
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "spikingjelly", "numba", "sj_tac") if name in machine
    )
    return f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {versions}, {machine['date']}"


def plus_minus(mean: float, spread: float | None) -> str:
    return f"{mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
