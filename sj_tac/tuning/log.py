"""The log of a search: one JSON line for each candidate, safe against kills, another's log, and a full disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sj_tac.errors import SearchError, WriteError
from sj_tac.support import machine
from sj_tac.tuning.batches import Batch

KIND = "sj_tac search log"
# What the figures of a log depend on, in words.
PARTS = {
    "model": "the model (its structure or its weights)",
    "batches": "the batches",
    "space": "the policy space (layers, ks, modes)",
    "metric": "the metric (or decode)",
    "match": "whether candidates are matched",
    "seed": "the seed",
    "speed": "how speed is measured (backend, rounds, cost)",
    "machine": "the machine (processor, threads, versions)",
}


def fingerprint(model: nn.Module, batches: Sequence[Batch]) -> dict[str, str]:
    """Hashes of what the model is and of what it is shown."""
    net, data = hashlib.sha256(str(model).encode()), hashlib.sha256()
    for name, tensor in model.state_dict().items():
        net.update(name.encode())
        if isinstance(tensor, Tensor):
            net.update(_bytes(tensor))
    for batch in batches:
        data.update(str(list(batch.frames.shape)).encode() + _bytes(batch.frames))
        data.update(b"" if batch.labels is None else _bytes(batch.labels))
    return {"model": net.hexdigest()[:16], "batches": data.hexdigest()[:16]}


def this_machine() -> str:
    """What times depend on, but for the date."""
    found = machine.describe()
    return ", ".join(f"{key} {value}" for key, value in found.items() if key != "date")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Log:
    """Entries as they are added, on disk where there is a path. A kill leaves at most half a last line, which is cut."""

    def __init__(self, path: str | os.PathLike[str] | None, header: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.header = {"kind": KIND, "version": 1, **header}
        self.entries: list[dict[str, Any]] = []
        self.file: Any = None

    def __enter__(self) -> Self:
        if self.path is None:
            return self
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a+b", buffering=0)  # what cannot be written must not be tried again on closing
        except OSError as error:
            raise WriteError(f"search log {self.path} cannot be opened ({error})") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self.file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()

    def _lock(self) -> None:
        try:
            fcntl = importlib.import_module("fcntl")
        except ImportError:  # no such thing on Windows
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SearchError(
                f"search log {self.path} is in use by another search; give this one a log of its own"
            ) from None

    def _read(self) -> None:
        self.file.seek(0)
        content: bytes = self.file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and not json.dumps(self.header).encode().startswith(content):
            raise self._foreign()
        lines = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                lines.append(json.loads(line))
            except (ValueError, RecursionError):
                if number == 1:
                    raise self._foreign() from None
                raise SearchError(
                    f"{self.path} is damaged in line {number}; give the search another path, or delete it"
                ) from None
            if number == 1:
                self._check(lines[0])
        # Only of a file that is this search's log: of any other, what stands behind the last newline is somebody's.
        if len(whole) < len(content):
            self.file.truncate(len(whole))
        if not lines:
            self._write(self.header)
        self.entries = lines[1:]

    def _foreign(self) -> SearchError:
        return SearchError(f"{self.path} is no search log, and is left as it is; give the search another path")

    def _check(self, header: Any) -> None:
        if not isinstance(header, dict) or header.get("kind") != KIND:
            raise self._foreign()
        if header.get("version") != self.header["version"]:
            raise SearchError(f"{self.path} is a search log of version {header.get('version')}; this one writes version 1")
        for part, words in PARTS.items():
            if header.get(part) != self.header.get(part):
                raise SearchError(
                    f"{self.path} is the log of another search: {words} differs, {header.get(part)!r} there and "
                    f"{self.header.get(part)!r} here; give this search a log of its own"
                )

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append one entry; on disk before this returns. Raises WriteError: what was logged before stays whole."""
        self._write(entry)
        self.entries.append(dict(entry))

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self.file is None:
            return
        end = self.file.seek(0, os.SEEK_END)
        try:
            left = memoryview(json.dumps(entry).encode() + b"\n")
            while left:
                left = left[self.file.write(left) :]
            os.fsync(self.file.fileno())
        except OSError as error:
            self._cut(end)
            raise WriteError(
                f"search log {self.path} cannot be written ({error}); the {len(self.entries)} entries before are safe: "
                "make room and run the same search again"
            ) from error

    def _cut(self, end: int) -> None:
        """Take half a line back. Where even that fails, the next reader cuts it."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.file.fileno(), end)
