"""What a command line names as ``package.module:name``. Nothing here takes long to import: a slip is told at once."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sj_tac.errors import SjTacError, WriteError
from sj_tac.support.files import beside, check_place, is_special
from sj_tac.support.words import nearest


class UsageError(SjTacError, ValueError):
    """What a command line names does not exist, or is something else."""


def check_outputs(written: Mapping[str, Any], *, pictures: Sequence[str] = (), **read: Any) -> None:
    """Before anything is read: every file can be written, and none replaces what the command reads or writes elsewhere.

    Args:
        written: paths by the names of their options. pictures: those that have a PNG beside them.
        read: what options name, as a path, a list of them, or package.module:factory.

    Raises:
        UsageError: it is not so; the message names both options.
    """
    places = [place for option, path in written.items() if path for place in _places(option, path, option in pictures)]
    for i, (name, place) in enumerate(places):
        for given, path in _files(read):
            if _same(place, path):
                raise UsageError(f"{name} is the file that {given} reads, and would be overwritten; name another")
        for other, elsewhere in places[:i]:
            if _same(place, elsewhere):
                raise UsageError(f"{name} and {other} are one file, of which only the last would be left; name another")


def _places(option: str, path: Path, pictured: bool) -> Iterator[tuple[str, Path]]:
    """Files that an option has written, by what an error calls them; not what can hold any number of them, as a pipe."""
    try:
        check_place(path)
        if not is_special(path):
            yield f"--{option} {path}", path
        if pictured:
            picture = beside(path, ".png")
            check_place(picture)
            yield f"the picture of --{option}, {picture},", picture
    except WriteError as error:
        raise UsageError(f"--{option}: {error}") from None


def _files(read: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Files that are there, with what names them."""
    for option, given in read.items():
        name = "the model" if option == "model" else f"--{option}"
        for one in given if isinstance(given, list) else [given]:
            if one is None:
                continue
            path, colon, _ = str(one).partition(":")
            source = os.path.join(*path.split(".")) + ".py" if colon and path else ""
            for found in (str(one), *(os.path.join(folder, source) for folder in (os.getcwd(), *sys.path) if source)):
                if os.path.isfile(found):
                    yield name, found


def _same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    # Names that differ, of one file: where case does not count, or by a hard link.
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def check(spec: str, what: str) -> str:
    """The module of ``package.module:name``, after a look whether there is one. Raises UsageError."""
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise UsageError(f"{what} {spec!r} is not written as package.module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    top = module_name.partition(".")[0]
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"{what} {spec!r}: {module_name!r} is no module's name, such as package.module; a path is none")
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise _no_module(spec, what, f"No module named {top!r}")
    return module_name


def _no_module(spec: str, what: str, why: str) -> UsageError:
    return UsageError(
        f"{what} {spec!r}: {spec.partition(':')[0]} cannot be imported ({why}); modules are looked for in the current "
        "folder, in PYTHONPATH and among installed packages"
    )


def factory(spec: str, what: str) -> Any:
    """The object of ``package.module:name``; the current folder is searched first. Raises UsageError."""
    module_name, attribute = check(spec, what), spec.partition(":")[2]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise _no_module(spec, what, f"{error}{_place(error)}") from error
    except Exception as error:
        raise _users_own(spec, what, error, "cannot be imported") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(module) if not name.startswith("_")]
            raise UsageError(f"{what} {spec!r}: {module_name} has no {attribute!r}; {nearest(attribute, names)}")
        found = getattr(found, part)
    return found


def called(found: Callable[[], Any], spec: str, what: str) -> Any:
    """What a factory makes. Raises UsageError: it needs arguments, or it fails; then with the user's line."""
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UsageError(
            f"{what} {spec!r} cannot be called without arguments ({error}); name a function that can"
        ) from error
    except ValueError:  # of what is not written in Python
        pass
    try:
        return found()
    except SjTacError:
        raise
    except Exception as error:
        raise _users_own(spec, what, error, "failed") from error


def function(spec: str, what: str) -> Any:
    """A function of the user's that the library calls; what it raises becomes a UsageError with the user's line."""
    found = factory(spec, what)
    if not callable(found):
        raise UsageError(f"{what} {spec!r} is a {type(found).__name__}; name a function")

    @functools.wraps(found, updated=())
    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except SjTacError:
            raise
        except Exception as error:
            raise _users_own(spec, what, error, "failed") from error

    # A log knows the metric by its name.
    calling.__qualname__ = getattr(found, "__qualname__", type(found).__name__)
    return calling


def listed(found: Iterable[Any], spec: str, what: str) -> list[Any]:
    """All that a factory's iterable gives. Raises UsageError: it fails on the way; then with the user's line."""
    try:
        return list(found)
    except SjTacError:
        raise
    except Exception as error:
        raise _users_own(spec, what, error, "failed") from error


def _users_own(spec: str, what: str, error: BaseException, failed: str) -> UsageError:
    told = " ".join(str(error).split())
    return UsageError(f"{what} {spec!r} {failed} with {type(error).__name__}: {told[:600]}{_place(error)}")


def _place(error: BaseException) -> str:
    """The last line of the user's own that an error went through; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    libraries = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((*libraries, ours, "<")):
            found = f" ({code.co_filename}, line {trace.tb_lineno}, in {code.co_name})"
        trace = trace.tb_next
    return found
