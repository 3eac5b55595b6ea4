"""What a file of a converted net says of its tensors."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sj_tac.errors import CheckpointError

# Of what is written. One that is newer is not read.
FORMAT = 2


class Corrected(BaseModel):
    """A ``Correction`` without its tensors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    by: str
    moved: bool
    names: list[str]


class Manifest(BaseModel):
    """What a file says of its tensors.

    Attributes:
        layers: what every converted layer does; constants: what the class fixed, by module; None of a net by hand: policy.
        tied: keys of tensors that are another key's, and whether they are the same object; strides: where not the usual.
        extra: values of the state_dict that are no tensors; local: the state_dict's metadata, by module.
        checksum: of the tensors, as ``archive.checksum``; empty in files of format 1.
        frozen, moved: BatchNorms; corrected, matched: what ``match`` and ``recalibrate`` wrote; notes: of the report.
        freezes: though none is frozen yet, those are to be that another k stretches.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int
    model: str
    versions: dict[str, str]
    policy: dict[str, Any] | None
    fused: bool
    layers: dict[str, dict[str, Any]]
    constants: dict[str, dict[str, Any]]
    tied: dict[str, tuple[str, bool]]
    strides: dict[str, list[int]]
    extra: dict[str, Any]
    local: dict[str, dict[str, Any]]
    frozen: list[str]
    moved: list[str]
    corrected: dict[str, Corrected]
    matched: str
    notes: list[str]
    checksum: str = ""
    freezes: bool = False


def parse(path: Any, text: str) -> Manifest:
    """The text of a file. Raises CheckpointError: it is of a newer version, or damaged."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: what it says of itself cannot be read ({error}); it is damaged") from None
    newest = values.get("format") if isinstance(values, dict) else None
    if isinstance(newest, int) and newest > FORMAT:
        made = values.get("versions")
        raise CheckpointError(
            f"{path} is of format {newest}, written by sj_tac {made.get('sj_tac') if isinstance(made, dict) else '?'}; this "
            f"is sj_tac {version('sj_tac')}, which reads up to format {FORMAT}: pip install --upgrade sj_tac"
        )
    try:
        # As JSON, where a pair is a list.
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:100]
        raise CheckpointError(
            f"{path}: what it says of itself is wrong at {where!r} ({first['msg']}); it is damaged"
        ) from None
