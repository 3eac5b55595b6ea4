"""One module's change of class, and back.

A swap changes ``module.__class__`` and adds one plain attribute, ``_tac``, so the module keeps its path, its parameters and
their names. Every class is static and importable, which is what pickling needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from sj_tac.runtime.convs import DRIVE_SWAPS, LOGITS, DriveModule
from sj_tac.runtime.drives import Drive
from sj_tac.runtime.layers import LAYER_SWAPS, Norm, Pool
from sj_tac.runtime.neurons import UNIT_SWAPS, Unit

SWAPS = UNIT_SWAPS | LAYER_SWAPS
_SOURCES = {new: old for swaps in (SWAPS, *DRIVE_SWAPS.values()) for old, new in swaps.items()}

Role = Drive | Unit | Norm | Pool


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without the one that a parametrization puts in front of it."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def source_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module in the source net."""
    kind = own_class(module)
    return _SOURCES.get(kind, kind)


def is_swapped(module: nn.Module) -> bool:
    """True for the modules of a converted chain."""
    return own_class(module) in _SOURCES


def absorb(module: nn.Module, role: Role) -> None:
    """Change the class of one module (a source class or swapped already) and give it its role."""
    swaps = DRIVE_SWAPS[role.mode] if isinstance(role, Drive) else SWAPS
    old = module.__dict__.get("_tac")
    if isinstance(role, Norm) and isinstance(old, Norm):
        role.frozen, role.moved = old.frozen, old.moved
    _become(module, swaps[source_class(module)])
    module._tac = role  # type: ignore[assignment]
    if isinstance(role, Drive):
        _fit_logits(module)


def release(module: nn.Module) -> None:
    """Undo ``absorb``."""
    _become(module, source_class(module))
    module.__dict__.pop("_tac", None)
    module._parameters.pop(LOGITS, None)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class; one that a parametrization made for it stays in front of that."""
    if parametrize.is_parametrized(module):
        kind = type(f"Parametrized{kind.__name__}", (kind,), _own_members(type(module)))
    module.__class__ = kind


def _own_members(made: type) -> dict[str, Any]:
    """What torch's parametrization added to the class it made."""
    return {name: member for name, member in vars(made).items() if name not in ("__dict__", "__weakref__", "__doc__")}


def _fit_logits(conv: Any) -> None:
    """Give the conv the logits its weights need: as many as frames in a group, none where nothing is aggregated."""
    drive = conv._tac
    wanted = drive.frames if drive.weights == "learned" and drive.frames > 1 else 0
    held = conv._parameters.get(LOGITS)
    if held is not None and len(held) == wanted:
        return
    conv._parameters.pop(LOGITS, None)
    if wanted:
        conv.register_parameter(LOGITS, nn.Parameter(conv.initial_logits()))


def has_trained_logits(conv: nn.Module) -> bool:
    """True where learned weights are no longer the decay weights they started at."""
    held = conv._parameters.get(LOGITS)
    return held is not None and isinstance(conv, DriveModule) and not torch.equal(held, conv.initial_logits())
