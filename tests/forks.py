"""Processes that are killed as any other, and begin at once: a server that has imported torch forks them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest


def start(monkeypatch: pytest.MonkeyPatch, function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that calls a module's function, with one thread."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support", "torch._dynamo"])
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def script(said: Path, path: Path, *arguments: str) -> None:
    """A script as ``python path arguments`` runs it, in the folder of ``said``, where all that it says is written."""
    os.chdir(said.parent)
    with open(said, "a", buffering=1) as stream:
        sys.stdout = sys.stderr = stream
        sys.argv = [str(path), *arguments]
        runpy.run_path(str(path), run_name="__main__")
