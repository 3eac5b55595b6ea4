"""What a command line names as ``package.module:name``. Nothing here takes long to import: a slip is told at once."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any

from sj_tac.errors import SjTacError
from sj_tac.support.words import nearest


class UsageError(SjTacError, ValueError):
    """What a command line names does not exist, or is something else."""


def check_outputs(written: Mapping[str, Any], **read: Any) -> None:
    """Raise UsageError where a file that would be written is one that is read; all by the names of their options."""
    for output, path in written.items():
        for given, other in read.items():
            if path is not None and other is not None and os.path.realpath(path) == os.path.realpath(other):
                raise UsageError(
                    f"--{output} {path} is the file that --{given} reads, and would be overwritten; name another"
                )


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
