"""What the commands write and show."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

import sj_tac
from sj_tac.cli.named import UsageError
from sj_tac.errors import MeasurementInterrupted
from sj_tac.support.files import own_descriptor, write_whole


def check_can_be_whole(net: Any, out: Path | None) -> None:
    """Raise UsageError where ``write`` could not write the net: before it is measured for an hour."""
    if out is not None and not _plain(out):
        _pickled(net, out)


def write(net: Any, out: Path | None) -> None:
    """A converted net: as plain tensors where the suffix says so, otherwise whole."""
    if out is None:
        return
    if _plain(out):
        sj_tac.save(net, out)
    else:
        content = _pickled(net, out)
        write_whole(out, lambda draft: draft.write_bytes(content))
    _told(out)


def write_html(found: Any, path: Path | None) -> None:
    """The report as a page."""
    if path is not None:
        found.to_html(path)
        _told(path)


def save(found: Any, out: Path | None) -> None:
    """Figures, as they are saved."""
    if out is not None:
        found.save(out)
        _told(out)


def show(result: Any, as_json: bool, *written: Path | None) -> None:
    """On stdout; on stderr where one of the files that are written is stdout, which then holds nothing else."""
    taken = any(path is not None and own_descriptor(path) == 1 for path in written)
    with redirect_stdout(sys.stderr if taken else sys.stdout):
        if as_json:
            print(result.to_json())
        else:
            console = Console()
            (console if console.is_terminal else Console(width=125)).print(*result.parts())


@contextmanager
def what_there_is(as_json: bool, out: Path | None, keep: Callable[[Any], object] | None = None) -> Iterator[None]:
    """Write (``keep``) and show what an interrupted measurement has finished, name it, and end with 130."""
    try:
        yield
    except MeasurementInterrupted as stopped:
        if stopped.found is not None:
            if keep is not None:
                keep(stopped.found)
            show(stopped.found, as_json, out)
        print(f"sj-tac: {stopped}", file=sys.stderr)
        raise typer.Exit(130) from None


def _plain(out: Path) -> bool:
    from sj_tac.support import archive

    return out.suffix in archive.SAFETENSORS


def _pickled(net: Any, out: Path) -> bytes:
    import torch

    content = io.BytesIO()  # into a file of a name, torch writes the name as well
    try:
        torch.save(net, content)
    except Exception as error:  # a lambda, a local class, a lock: pickle raises what it likes
        raise UsageError(
            f"--out {out}: the net cannot be written whole ({type(error).__name__}: {error}); with a name that ends in "
            ".safetensors its tensors and policy are written, which sj_tac.load reads"
        ) from error
    return content.getvalue()


def _told(path: Path) -> None:
    print(f"Written: {path}", file=sys.stderr)
