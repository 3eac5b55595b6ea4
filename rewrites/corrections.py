"""What was put in the place of a source's own statistics after a conversion: noted, so that it can be taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac.runtime.layers import Norm


@dataclass(frozen=True)
class Correction:
    """Tensors of one module before and after it was corrected.

    Attributes:
        by: RECALIBRATE or MATCH. before, after: running mean and variance [C] of a BatchNorm, or a bias [C], by name.
        moved: whether training on aggregated frames had moved a BatchNorm's statistics before.
    """

    by: str
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor] = field(default_factory=dict)
    moved: bool = False


RECALIBRATE, MATCH = "recalibrate", "match"
STATISTICS = ("running_mean", "running_var")


def held(module: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of these tensors of a module."""
    return {name: getattr(module, name).detach().clone() for name in names}


def put(module: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write values into these tensors of a module, in place."""
    with torch.no_grad():
        for name, value in tensors.items():
            getattr(module, name).copy_(value)


def is_as_made(module: Any, correction: Correction) -> bool:
    """True where nothing has moved what a correction made."""
    return all(torch.equal(getattr(module, name), value) for name, value in correction.after.items())


def take_back(converted: nn.Module, corrected: dict[str, Correction], names: Iterable[str]) -> None:
    """What these modules had before, in place; ``corrected`` notes them no longer."""
    for name in list(names):
        module: Any = converted.get_submodule(name)
        correction = corrected.pop(name)
        put(module, correction.before)
        role = module.__dict__.get("_tac")
        if isinstance(role, Norm):
            role.moved, role.matched = correction.moved, ""
