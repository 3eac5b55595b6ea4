"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sj_tac.errors import WriteError


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """``write(temporary)``, moved to ``path`` once it is done: a reader, a kill or a full disk never leaves half a file.

    Raises:
        WriteError: the system could not write it; a file that stood at ``path`` is as it was.
    """
    target = Path(path)
    draft: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        name = target.with_name(f".{target.name}.{secrets.token_hex(4)}{target.suffix}")
        # With the rights of any new file, which temporary ones do not have.
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        draft = name
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
