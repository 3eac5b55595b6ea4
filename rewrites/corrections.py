"""What was put in the place of a source's own statistics after a conversion: noted, so that it can be taken back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac.definition.noted import NotedNorm


@dataclass(frozen=True)
class Correction:
    """Tensors of one module before and after it was corrected.

    Attributes:
        by: RECALIBRATE or MATCH. before, after: running mean and variance [C] of a BatchNorm, or a bias [C], by name.
        moved: whether training on aggregated frames had moved a BatchNorm's statistics before.
    """

    by: str
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    moved: bool


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


def corrected_module(converted: nn.Module, name: str) -> Any:
    """The module that was corrected; None where the user has put another in its place since."""
    found = dict(converted.named_modules()).get(name)
    return found if found is not None and "_tac" in found.__dict__ else None


def is_as_made(converted: nn.Module, name: str, correction: Correction) -> bool:
    """True where nothing has moved what a correction made, in whatever dtype and on whatever device it now is."""
    module = corrected_module(converted, name)
    return module is not None and all(
        torch.equal(getattr(module, key), value.to(getattr(module, key))) for key, value in correction.after.items()
    )


def loaded_matched(converted: nn.Module, corrected: Mapping[str, Correction]) -> dict[str, str]:
    """Modules whose values came matched in a checkpoint, and for what: what stood there before is not known."""
    roles = ((name, getattr(module.__dict__.get("_tac"), "matched", "")) for name, module in converted.named_modules())
    return {name: matched for name, matched in roles if matched and name not in corrected}


def take_back(converted: nn.Module, corrected: dict[str, Correction], names: Iterable[str]) -> list[str]:
    """What these modules had before, in place; ``corrected`` notes them no longer. Returns those that had any.

    What a checkpoint or another module replaced stays. Statistics that training moved on stay; a bias loses the shift.
    """
    done = []
    for name in list(names):
        correction, module = corrected.pop(name), corrected_module(converted, name)
        if module is None:
            continue
        role = module._tac
        loaded = correction.by == MATCH and not role.matched
        if not loaded and is_as_made(converted, name, correction):
            put(module, correction.before)
            if isinstance(module, NotedNorm):
                role.moved = correction.moved
            done.append(name)
        elif not loaded and "bias" in correction.before:
            shift = correction.after["bias"] - correction.before["bias"]
            put(module, {"bias": module.bias - shift.to(module.bias)})
            done.append(name)
        role.matched = ""
    return done
