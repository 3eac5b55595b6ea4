"""One module's change of class, and back.

A swap changes ``module.__class__`` and adds one plain attribute, ``_tac``, so the module keeps its path, its parameters and
their names. Every class is static and importable, which is what pickling needs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from sj_tac import host
from sj_tac.runtime.conv_swaps import DRIVE_SWAPS
from sj_tac.runtime.convs import LOGITS, DriveModule
from sj_tac.runtime.drives import Drive
from sj_tac.runtime.layers import LAYER_SWAPS, Affine, AffineModule, Norm, NormModule, Pool
from sj_tac.runtime.neurons import UNIT_SWAPS, Unit, UnitModule

SWAPS = UNIT_SWAPS | LAYER_SWAPS
_SOURCES = {new: old for swaps in (SWAPS, *DRIVE_SWAPS.values()) for old, new in swaps.items()}

# Where a class made of one of ours and one of the user's names the latter.
_USERS = "_tac_users_class"

# What swapped classes add to the host's.
_OURS = (DriveModule, UnitModule, NormModule, AffineModule)
_HOSTS = {"single_step_forward", "multi_step_forward", "materialize_states"}
_RESERVED = {"_tac", LOGITS} | {
    name for cls in _OURS for name in vars(cls) if not (name.startswith("__") or hasattr(nn.Module, name) or name in _HOSTS)
}

Role = Drive | Unit | Norm | Pool | Affine


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without the one that a parametrization puts in front of it."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def users_class(module: nn.Module) -> type[nn.Module]:
    """The class of the module in the source net, be it a subclass of the user's."""
    kind = own_class(module)
    users: type[nn.Module] = kind.__dict__.get(_USERS) or _SOURCES.get(kind, kind)
    return users


def source_class(module: nn.Module) -> type[nn.Module]:
    """The known class that the module behaved as in the source net."""
    if is_swapped(module):
        static = own_class(module)
        static = static.__bases__[0] if _USERS in static.__dict__ else static
        return _SOURCES.get(static) or host.known_class(users_class(module))
    if not parametrize.is_parametrized(module):
        return host.kind(module)
    known = host.known_class(users_class(module))
    return known if known in SWAPS else host.weighted_base(known)


def clash(module: nn.Module) -> str:
    """The name of something of the user's that a swapped class would hide, or the other way round; else empty."""
    kind, held = type(module), module.__dict__
    known = host.weighted_base(kind) if host.has_own_forward(module) else host.known_class(kind)
    for name in sorted(_RESERVED):
        if name in held or any(name in vars(cls) for cls in kind.__mro__ if cls not in known.__mro__):
            return name
    return ""


def is_affine(module: nn.Module) -> bool:
    """True for a module of a registered affine class that is swapped."""
    return isinstance(module, AffineModule)


def is_swapped(module: nn.Module) -> bool:
    """True for the modules of a converted chain."""
    kind = own_class(module)
    return kind in _SOURCES or _USERS in kind.__dict__


def _swapped_class(static: type[nn.Module], users: type[nn.Module]) -> type[nn.Module]:
    """What a module of a class of the user's becomes: ``static``, or a class that is both."""
    return static if _SOURCES.get(static) is users else _both(static, users)  # type: ignore[arg-type]


@functools.cache
def _both(static: Any, users: Any) -> type[nn.Module]:
    """``static`` and the user's subclass of the same host class, in one: still an instance of the user's class."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _empty, (static, users), self.__dict__

    names = {_USERS: users, "__module__": static.__module__, "__doc__": static.__doc__, "__reduce_ex__": __reduce_ex__}
    return type(f"{static.__name__}Of{users.__name__}", (static, users), names)


def _empty(static: type[nn.Module], users: type[nn.Module]) -> Any:
    """An instance without attributes, for unpickling to fill."""
    kind: Any = _both(static, users)  # type: ignore[arg-type]
    return kind.__new__(kind)


def absorb(module: nn.Module, role: Role) -> None:
    """Change the class of one module (a source class or swapped already) and give it its role."""
    swaps = DRIVE_SWAPS[role.mode] if isinstance(role, Drive) else SWAPS
    old = module.__dict__.get("_tac")
    if isinstance(role, Norm) and isinstance(old, Norm):
        role.frozen, role.moved = old.frozen, old.moved
    if isinstance(role, (Norm, Drive)) and isinstance(old, (Norm, Drive)):
        role.matched = old.matched
    static = AffineModule if isinstance(role, Affine) else swaps[source_class(module)]
    _become(module, _swapped_class(static, users_class(module)))
    module._tac = role  # type: ignore[assignment]
    if isinstance(role, Drive):
        _fit_logits(module)


def release(module: nn.Module) -> None:
    """Undo ``absorb``."""
    _become(module, users_class(module))
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
