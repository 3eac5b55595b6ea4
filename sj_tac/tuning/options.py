"""The options by keyword that measuring functions share, and their defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict

from sj_tac.errors import PolicyError, refuse_unknown
from sj_tac.tuning.measure import Decode
from sj_tac.tuning.trials import Cost


class MeasurementOptions(TypedDict, total=False):
    """How nets are run and timed. See ``Measurement``."""

    rounds: int
    decode: Decode | None
    backend: str
    seed: int
    progress: bool


class SearchOptions(MeasurementOptions, total=False):
    """What a search may try, and where it writes. See ``Search``."""

    ks: Sequence[int] | None
    modes: Sequence[str]
    layers: Sequence[str]
    cost: Cost | None
    log: str | os.PathLike[str] | None
    out: str | os.PathLike[str] | None
    match: bool
    holdout: float | None


@dataclass(frozen=True)
class Measurement:
    """How nets are run and timed.

    Attributes:
        rounds: timed rounds, all nets in turns. decode: from the net's output to class scores [N, C], where it is not
            [T, N, C] or [N, C]. backend: as ``sj_tac.convert``. seed: of random encoders in the net. progress: show a bar.
    """

    rounds: int
    decode: Decode | None = None
    backend: str = "auto"
    seed: int = 0
    progress: bool = True

    @classmethod
    def read(cls, caller: str, rounds: int, given: Mapping[str, Any]) -> Self:
        """The options that ``caller`` was given. Raises TypeError for an unknown one, PolicyError for one out of range."""
        refuse_unknown(caller, given, (field.name for field in fields(cls)))
        made = cls(**({"rounds": rounds} | dict(given)))
        if made.rounds < 1:
            raise PolicyError(f"{caller}: rounds={made.rounds} must be at least 1")
        return made


@dataclass(frozen=True)
class Search(Measurement):
    """What a search may try, and where it writes. ``sj_tac.search`` says what the attributes mean."""

    ks: Sequence[int] | None = None
    modes: Sequence[str] = ("preserve", "collapse")
    layers: Sequence[str] = ("conv",)
    cost: Cost | None = None
    log: str | os.PathLike[str] | None = None
    out: str | os.PathLike[str] | None = None
    match: bool = True
    holdout: float | None = None
