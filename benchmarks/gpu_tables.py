"""Tables of what was measured on a GPU, from what ``benchmarks.gpu`` leaves in all.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.tables import rows, where


def _where(content: dict[str, Any]) -> str:
    machine = content["machine"]
    return f"{machine['gpu']}, CUDA {machine['cuda']}, CuPy {machine['cupy']}; {where(machine)}"


def gpu_bandwidth(content: dict[str, Any]) -> str:
    """Bytes a second of ``fire``, beside the fastest copy of the run."""
    copy = max(row["copy GB/s"] for row in content["bandwidth"])
    lines = [
        [row["name"], f"{row['ms']:.3f}", f"{row['GB/s']}", f"{100 * row['GB/s'] / copy:.0f} %"]
        for row in content["bandwidth"]
    ]
    return f"{_where(content)}. The fastest copy: {copy} GB/s.\n\n" + rows(["", "ms", "GB/s", "of the fastest copy"], lines)


def gpu_overhead(content: dict[str, Any]) -> str:
    """What a layer costs where the device waits for Python."""
    lines = [[row["name"], f"{row['us a layer']:.0f}"] for row in content["overhead"]]
    return f"{_where(content)}.\n\n" + rows(["", "us a layer"], lines)


def _nets(content: dict[str, Any], kind: str) -> str:
    text = f"Medians of {content['rounds']} calls. {_where(content)}.\n"
    for title, found in content.items():
        if not title.startswith(kind):
            continue
        ms = {row["name"]: 1e3 * statistics.median(row["seconds"]) for row in found}
        best = min(value for name, value in ms.items() if name.startswith("SpikingJelly"))
        lines = [
            [row["name"], f"{ms[row['name']]:.2f}", f"{best / ms[row['name']]:.2f}x", f"{row['peak MB']:.0f}"]
            for row in found
        ]
        head = [title.removeprefix(f"{kind} "), "ms", "to the best SpikingJelly here", "peak, MB"]
        text += "\n" + rows(head, lines)
    return text


def gpu_inference(content: dict[str, Any]) -> str:
    """Every configuration of a net's inference."""
    return _nets(content, "inference")


def gpu_training(content: dict[str, Any]) -> str:
    """Every configuration of a net's training step."""
    return _nets(content, "training")


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "gpu_bandwidth": gpu_bandwidth,
    "gpu_overhead": gpu_overhead,
    "gpu_inference": gpu_inference,
    "gpu_training": gpu_training,
}
