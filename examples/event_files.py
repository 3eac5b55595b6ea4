"""Checks of the event files that a user hands in, before they are counted into frames.

A reader gives its columns to ``checked``, and an archive of several recordings to ``check_archive``. What cannot be right
raises DataError with the file, the field, the place and the value; events out of order are sorted, with a warning.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

DIGITS = 10
_PIXEL = ", outside the sensor of {sensor} x {sensor} pixels"
_OUTSIDE = {"x": _PIXEL, "y": _PIXEL, "p": "; polarity is 0 (off) or 1 (on)"}
ARCHIVE = ("x", "y", "p", "dt_us", "offsets", "label", "is_test")


class DataError(ValueError):
    """Data that is missing or damaged: the file, what is wrong with it, and what to do."""


class DataWarning(UserWarning):
    """Data that was changed before use: the file, and how it was changed."""


def check_integers(found: np.ndarray, field: str, where: str) -> None:
    """Raise DataError where a field is no row of integers [n], or one of them does not fit int64."""
    if found.ndim != 1:
        raise DataError(f"{where}: {field} has shape {list(found.shape)}; one integer for each event [n] is expected")
    if found.dtype.kind not in "iub":
        unit = " (microseconds)" if field in ("t", "dt_us") else ""
        raise DataError(
            f"{where}: {field} has dtype {found.dtype}; integers{unit} are expected: convert it before you save it"
        )
    if found.dtype == np.uint64:
        _within(found, field, where, 0, 2**63 - 1)


def _within(values: np.ndarray, field: str, where: str, low: int, high: int, what: str = "") -> None:
    """Raise DataError for the first value that is not in low..high."""
    wrong = (values < low) | (values > high)
    if wrong.any():
        i = int(wrong.argmax())
        found = f"{values[i]:.15g}" if values.dtype.kind == "f" else values[i]
        raise DataError(f"{where}: {field}[{i}] is {found}{what or f'; it must be in {low}..{high}'}")


def checked(columns: Mapping[str, Any], sensor: int, where: str) -> dict[str, np.ndarray]:
    """Return the events of one recording as int64 columns in order of time.

    Args:
        columns: t (microseconds), x, y (pixels) and p (0 off, 1 on), each [events].
        sensor: how many pixels the camera has in each direction.
        where: how errors call the recording.

    Raises:
        DataError: no event, columns of different lengths, no integers, a pixel outside the sensor, a polarity other than
            0 and 1, or a negative time.

    Warns:
        DataWarning: the events were out of order and have been sorted (events of one time stay as they stand).
    """
    events = {name: np.asarray(columns[name]) for name in ("t", "x", "y", "p")}
    for name, values in events.items():
        check_integers(values, name, where)
    events = {name: values.astype(np.int64) for name, values in events.items()}
    lengths = {name: len(values) for name, values in events.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"{where}: its columns have different lengths, {lengths}; copy the file again")
    if not lengths["t"]:
        raise DataError(f"{where} has no events; leave this recording out")
    for name, largest in {"x": sensor - 1, "y": sensor - 1, "p": 1}.items():
        _within(events[name], name, where, 0, largest, _OUTSIDE[name].format(sensor=sensor))
    # Frames multiply times by T: 2^50 us, 35 years, leaves room for that in int64.
    _within(events["t"], "t", where, 0, 2**50, "; times are microseconds from 0 to 2^50")
    backwards = np.diff(events["t"]) < 0
    if not backwards.any():
        return events
    t, i = events["t"], int(backwards.argmax()) + 1
    warnings.warn(
        f"{where}: events are not in order of time (t[{i}] is {t[i]}, after {t[i - 1]}); they are sorted",
        DataWarning,
        stacklevel=3,
    )
    order = np.argsort(events["t"], kind="stable")
    return {name: values[order] for name, values in events.items()}


def check_table(values: np.ndarray, sensor: int, where: str) -> None:
    """Raise DataError where a table of events [events, 4] cannot be right.

    Its columns are x, y, p and milliseconds, as tonic stores DVS128 Gesture. tonic's reader casts them to int16 and bool:
    a pixel of 65541 becomes 5, half a pixel none, and a polarity of 3 or -1 on.
    """
    if values.ndim != 2 or values.shape[1] != 4 or values.dtype.kind not in "iuf":
        raise DataError(
            f"{where}: an array {list(values.shape)} of {values.dtype}; a table [events, 4] of numbers is expected, its "
            "columns x, y, p and milliseconds"
        )
    for name, column in zip("xyp", values.T, strict=False):
        parts = column != np.floor(column)  # NaN is not NaN
        if parts.any():
            i = int(parts.argmax())
            raise DataError(f"{where}: {name}[{i}] is {column[i]}; whole numbers are expected")
        _within(column, name, where, *((0, 1) if name == "p" else (0, sensor - 1)), _OUTSIDE[name].format(sensor=sensor))
    t = values[:, 3]
    most = 2**50 // 1000 if t.dtype.kind == "f" else min(2**50, np.iinfo(t.dtype).max) // 1000
    fits = (t >= 0) & (t <= most)
    if not fits.all():
        i = int(fits.argmin())
        raise DataError(
            f"{where}: t[{i}] is {t[i]}; times are milliseconds from 0 to {most}, which {t.dtype} holds as microseconds"
        )


def check_archive(archive: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    """Return the arrays of an archive of recordings (``datasets.read_recordings``), known to fit each other.

    Raises:
        DataError: an array is missing, holds no integers, or does not fit the others; a recording without events.
    """
    missing = [name for name in ARCHIVE if name not in archive]
    if missing:
        raise DataError(f"{where} lacks {', '.join(sorted(missing))}; it has {', '.join(sorted(archive))}")
    found = {name: np.asarray(values) for name, values in archive.items()}
    for name in ARCHIVE:
        check_integers(found[name], name, where)
    offsets, recordings = found["offsets"].astype(np.int64), len(found["label"])
    if not recordings:
        raise DataError(f"{where} has no recordings")
    if len(offsets) != recordings + 1 or len(found["is_test"]) != recordings:
        raise DataError(
            f"{where}: {recordings} labels do not fit {len(offsets)} offsets (one more than recordings) and "
            f"{len(found['is_test'])} values of is_test"
        )
    _check_offsets(offsets, where)
    events = int(offsets[-1])
    lengths = {name: len(found[name]) for name in ("x", "y", "dt_us")}
    if set(lengths.values()) != {events}:
        raise DataError(f"{where}: {lengths} events do not fit its offsets, which end at {events}")
    packed = -(-events // 8)
    if found["p"].dtype != np.uint8 or len(found["p"]) != packed:
        raise DataError(
            f"{where}: p has {len(found['p'])} values of {found['p'].dtype}; the polarities of {events} events are packed "
            f"bits, {packed} bytes of uint8" + ("; pack them: numpy.packbits(p)" if len(found["p"]) == events else "")
        )
    _within(found["label"], "label", where, 0, DIGITS - 1, "; labels are class indices, the digits 0 to 9")
    _within(found["is_test"], "is_test", where, 0, 1, "; it is 1 (test) or 0 (train)")
    return found


def _check_offsets(offsets: np.ndarray, where: str) -> None:
    """Raise DataError where a recording does not begin behind the one before, or has no events."""
    if offsets[0] != 0:
        raise DataError(f"{where}: offsets[0] is {offsets[0]}; recordings begin at event 0")
    for i, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end < begin:
            raise DataError(f"{where}: offsets[{i + 1}] is {end}, before offsets[{i}] = {begin}; offsets only grow")
        if end == begin:
            raise DataError(f"{where}: recording {i} has no events (offsets[{i}:{i + 2}] are both {end}); leave it out")
