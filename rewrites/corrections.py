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
    """True where nothing has moved what a correction made; a net that changed device or precision since has not."""
    return all(
        torch.equal(getattr(module, name), value.to(getattr(module, name))) for name, value in correction.after.items()
    )


def is_loaded(module: Any, correction: Correction) -> bool:
    """True where a checkpoint has taken the place of what ``match`` wrote."""
    return correction.by == MATCH and not module._tac.matched


def loaded_matched(converted: nn.Module, corrected: Mapping[str, Correction]) -> dict[str, str]:
    """Modules whose values came matched in a checkpoint, and for what: what stood there before is not known."""
    roles = ((name, getattr(module.__dict__.get("_tac"), "matched", "")) for name, module in converted.named_modules())
    return {name: matched for name, matched in roles if matched and name not in corrected}


def take_back(converted: nn.Module, corrected: dict[str, Correction], names: Iterable[str]) -> list[str]:
    """What these modules had before, in place; ``corrected`` notes them no longer. Returns those that had any.

    What a checkpoint replaced stays. Statistics that training moved on stay. A bias that training moved on loses the shift.
    """
    done = []
    for name in list(names):
        module: Any = converted.get_submodule(name)
        correction, role = corrected.pop(name), module._tac
        if not is_loaded(module, correction):
            if is_as_made(module, correction):
                put(module, correction.before)
                if isinstance(role, Norm):
                    role.moved = correction.moved
                done.append(name)
            elif "bias" in correction.before:
                shift = correction.after["bias"] - correction.before["bias"]
                put(module, {"bias": module.bias - shift.to(module.bias)})
                done.append(name)
        role.matched = ""
    return done
