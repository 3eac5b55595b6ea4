"""What a figure was measured on: processor, threads, memory mode, versions, date."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sj_tac.support import memory

PACKAGES = ("spikingjelly", "sj_tac")


def version_of(package: str) -> str:
    """The version of a package; empty where it is not known, as that of a checkout that nobody installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        found: str = getattr(sys.modules.get(package), "__version__", "")
        return found


def describe() -> dict[str, Any]:
    """Processor, cores, threads, memory mode, Python, date and the versions of what runs; and the GPU, if any."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    device: dict[str, Any] = {}
    if torch.cuda.is_available():
        device = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        with contextlib.suppress(PackageNotFoundError):
            device["cuda-bindings"] = version("cuda-bindings")
        with contextlib.suppress(Exception):  # a broken one raises whatever it likes
            device["cupy"] = importlib.import_module("cupy").__version__
    versions = {name: found for name in PACKAGES if (found := version_of(name))}
    return device | {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "memory": memory.mode(),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "torch": str(torch.__version__),  # unlike its package's version it names the CUDA release
        **versions,
    }
