"""Files that are written whole or not at all; pipes, terminals and /dev/stdout, which can only be written into."""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from sj_tac.errors import WriteError

# The names of a process's own open files, which /dev/stdout and /dev/stderr are links to.
_OWN = re.compile(r"/(?:dev|proc/self)/fd/([0-9]+)")
_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """``write(temporary)``, moved to ``path`` once it is done: a reader, a kill or a full disk never leaves half a file.

    Of a link, the file that it points to is written. A pipe, a terminal or /dev/stdout is handed the bytes.

    Raises:
        WriteError: the system could not write it, or a folder or a block device stands there; a file that stood at ``path``
            is as it was.
    """
    target = Path(path)
    special = False
    try:
        special = is_special(target)
        if special:
            _pour(target, write)
        else:
            _replace(Path(os.path.realpath(target)), write)
    except WriteError:
        raise
    except OSError as error:
        kept = "" if special else "; what was there before is unchanged"
        raise WriteError(f"{target} cannot be written ({error}){kept}") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """``text`` as a whole UTF-8 file. Raises WriteError."""
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def check_place(path: str | os.PathLike[str]) -> None:
    """What can be known before hours of work: whether there can be a file. Raises WriteError: as ``write_whole``."""
    target = Path(path)
    if is_special(target):
        return
    folder = Path(os.path.realpath(target)).parent
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if not os.path.isdir(folder):
        raise WriteError(f"{target} cannot be written: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise WriteError(f"{target} cannot be written: no right to make a file in {folder}")


def beside(path: str | os.PathLike[str], suffix: str) -> Path:
    """The place of a picture beside a file. Raises WriteError: there is none, or it is that of the file itself."""
    target = Path(path)
    if is_special(target):
        raise WriteError(f"{target} is no file, beside which the {suffix} could stand; name a file")
    if target.suffix.lower() == suffix:
        raise WriteError(f"{target} would be replaced by the picture that is written beside it; name a .json, say")
    return target.with_suffix(suffix)


def own_descriptor(path: str | os.PathLike[str]) -> int | None:
    """The number of this process's open file that a path names: 1 of /dev/stdout. None of any other path."""
    name = os.fspath(path)
    found = _OWN.fullmatch(name)
    return int(found[1]) if found else _STANDARD.get(name)


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether bytes are to be written into what stands there. Raises WriteError: nothing can be written there at all."""
    target = Path(path)
    if own_descriptor(target) is not None:
        return True
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):  # or a link to what is not there yet
        return False
    except OSError as error:
        raise WriteError(f"{target} cannot be written ({error})") from error
    if stat.S_ISREG(mode):
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return True
    what = "a folder" if stat.S_ISDIR(mode) else "a block device" if stat.S_ISBLK(mode) else "no file"
    raise WriteError(f"{target} cannot be written: it is {what}; name a file")


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}{target.suffix}")
    # With the rights of any new file, which temporary ones do not have.
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        write(draft)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _pour(target: Path, write: Callable[[Path], Any]) -> None:
    """All bytes at once, after they were written whole elsewhere: who draws may want a path, and go back and forth in it."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / f"draft{target.suffix}"
        write(draft)
        content = draft.read_bytes()
    with _opened(target) as file:
        file.write(content)


def _opened(target: Path) -> BinaryIO:
    number = own_descriptor(target)
    if number is None:
        return target.open("wb")
    # What was printed comes first. The open file itself: of a file that stdout was sent to, opening it anew would cut it.
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fdopen(os.dup(number), "wb")
