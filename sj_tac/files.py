"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sj_tac.errors import WriteError


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """``write(temporary)``, moved to ``path`` once it is done: a reader, a kill or a full disk never leaves half a file.

    Raises:
        WriteError: the system could not write it; a file that stood at ``path`` is as it was.
    """
    target, draft = Path(path), None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix)
        os.close(handle)
        draft = Path(name)
        write(draft)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException as error:
        if draft is not None:
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WriteError(f"{target} cannot be written ({error}); what was there before is unchanged") from error
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """``text`` as a whole UTF-8 file. Raises WriteError."""
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))
