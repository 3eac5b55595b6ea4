"""Whether the process keeps the memory it frees, or gives it back and every large tensor fetches its pages anew."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
# The largest number that mallopt takes: blocks up to 2 GiB come from memory that stays, and none of it is given back.
LARGEST = 2**31 - 1
# Where glibc's own limits come to lie once a process has freed a large block, which raises them; and its number of maps.
USUAL = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20, M_MMAP_MAX: 65_536}
# Variables that say the same to glibc before Python starts.
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
DEFAULT = "default"

# "kept" once keep_memory has done something.
_SAID: list[str] = []


def _glibc() -> Any:
    """The C library where it is glibc and its own allocator is the one in use; else None."""
    try:
        process, library = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
        # musl and macOS have no such functions; jemalloc and tcmalloc put a malloc of theirs before glibc's.
        _, _ = library.gnu_get_libc_version, library.mallopt
        used, own = (ctypes.cast(found.malloc, ctypes.c_void_p).value for found in (process, library))
    except (OSError, TypeError, AttributeError):
        return None
    return library if used == own else None


def keep_memory() -> bool:
    """Make the process keep the memory it frees, so that large tensors need no new pages from the system in each call.

    By default glibc gives blocks above 32 MiB back as soon as they are freed, and the next call pays for every page of 4 KiB
    again. This sets its limits (``mallopt``) so that blocks up to 2 GiB stay. It makes plain SpikingJelly faster as well,
    and more so than sj_tac, which moves less memory. It is for the whole process and cannot be undone. Resident memory stays
    at its peak, which may rise by some of the largest blocks while the allocator settles.
    Best called before the first large tensor. Threads other than the main one have arenas of at most 64 MiB: there larger
    blocks still go back, unless ``MALLOC_ARENA_MAX=1`` is set before Python starts. On the GPU it changes nothing.

    Returns:
        Whether it did anything. False, and nothing is changed, where the allocator is not glibc's: musl, macOS, Windows,
        or jemalloc and the like in its place. It raises nothing.
    """
    library = _glibc()
    if library is None or not _keep(library):
        return False
    _SAID[:] = ["kept"]
    return True


def _keep(library: Any) -> bool:
    # Older releases refuse thresholds above 32 MiB; there, no block at all is to be mapped by itself.
    stays = library.mallopt(M_MMAP_THRESHOLD, LARGEST) or library.mallopt(M_MMAP_MAX, 0)
    return bool(stays and library.mallopt(M_TRIM_THRESHOLD, LARGEST))


@contextmanager
def kept_meanwhile() -> Iterator[None]:
    """``keep_memory`` for as long as it takes; then glibc's usual limits, and what is free goes back to the system.

    Nothing is done where ``keep_memory`` was called, or the environment says something of it.
    """
    library = _glibc() if mode() == DEFAULT else None
    if library is None:
        yield
        return
    try:
        _keep(library)
        yield
    finally:
        if mode() == DEFAULT:  # nobody has asked for it to stay so
            for what, value in USUAL.items():
                library.mallopt(what, value)
            library.malloc_trim(0)


def mode() -> str:
    """What is known of it: "kept" behind ``keep_memory``, what the environment says to glibc, or "default"."""
    if _SAID:
        return _SAID[0]
    found = {name: os.environ.get(name, "") for name in VARIABLES}
    given = [f"{name}={value}" for name, value in found.items() if value and "malloc" in f"{name}={value}".lower()]
    return " ".join(given) or DEFAULT
