"""Tables of what was measured on a GPU, from what ``benchmarks.gpu`` leaves in all.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.measure import LAST
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


def gpu_first_layers(content: dict[str, Any]) -> str:
    """First layers by cuDNN and ``fire``, and in one kernel; that of channels_last where it was measured."""
    lines, found = [], content["first layer"]
    both = f"one kernel{LAST}, ms" in found[0]
    for row in found:
        one, two, last = (row[f"{how}, ms"] for how in ("one kernel", "cuDNN, fire", f"cuDNN, fire{LAST}"))
        differ = f"{100 * row['outputs that differ']:.2g} %" if row["outputs that differ"] else "none"
        more = [f"{row[f'one kernel{LAST}, ms']:.3f}", f"{row[f'ratio{LAST}']:.2f}x"] if both else []
        lines.append(
            [row["name"], f"{two:.3f}", f"{last:.3f}", f"{one:.3f}", *more[:1], f"{two / one:.2f}x", *more[1:], differ]
        )
    head = [
        "layer",
        "cuDNN, fire, ms",
        f"the same{LAST}, ms",
        "one kernel, ms",
        *([f"the same{LAST}, ms"] if both else []),
        "two kernels over one",
        *([f"the same{LAST}"] if both else []),
        "outputs that differ",
    ]
    return f"{_where(content)}. T = 16, batch 16, CUDA graphs.\n\n" + rows(head, lines)


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
    "gpu_first_layers": gpu_first_layers,
    "gpu_overhead": gpu_overhead,
    "gpu_inference": gpu_inference,
    "gpu_training": gpu_training,
}
