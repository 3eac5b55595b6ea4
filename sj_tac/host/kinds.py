"""The class that a module behaves as: its own, or the known one that it only constructs otherwise."""

from __future__ import annotations

from types import FunctionType

from torch import nn

from sj_tac.host import types

# Classes of one's own that add nothing to the host's may say so of themselves; the compatibility classes do.
NOTHING_ADDED = "_adds_nothing"
# What a class statement leaves behind by itself, and what does not change how a module computes.
_IDLE = {
    *(
        "__module__",
        "__qualname__",
        "__doc__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
    ),
    *("__init__", "extra_repr", "__repr__", "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__"),
    *("__constants__", "__dict__", "__weakref__", "__slots__", "__annotations_cache__", NOTHING_ADDED),
}
# Plain values, which nothing looks up in a class behind a module's back.
_CONSTANTS = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))


class Unknown(nn.Module):
    """Stands for the class of a module whose own attributes hide what its class does."""


# Classes that were registered.
_LEARNED: set[type[nn.Module]] = set()
# What was found of classes. It keeps classes that a program makes at run time alive, which live long anyway.
_METHODS: dict[type[nn.Module], frozenset[str]] = {}
_FOUND: dict[type[nn.Module], tuple[type[nn.Module] | None, frozenset[str]]] = {}


def know(cls: type[nn.Module]) -> None:
    """Count a class among the known ones from now on."""
    _LEARNED.add(cls)
    _FOUND.clear()


def kind(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` behaves as.

    That is the nearest class which sj_tac knows, where every class between adds only a constructor, a representation, or
    plain functions and constants of names that the known one lacks. Otherwise it is the module's
    own class, or ``Unknown`` where attributes of the instance hide methods (``module.forward = ...``).
    """
    own = type(module)
    known, added = _known(own)
    if known is None:
        return own
    held = module.__dict__
    if any(name in known_methods(known) for name in held):
        return Unknown
    hidden = (held.get("_parameters"), held.get("_buffers"), held.get("_modules"), held.get("_memories"))
    if added and any(name in names for names in hidden if names for name in added):
        return own
    return known


def _known(own: type[nn.Module]) -> tuple[type[nn.Module] | None, frozenset[str]]:
    """The known class that ``own`` is or only constructs otherwise, and the names that the classes between add."""
    # Not functools.lru_cache: torch.compile, which may look in here, warns of one.
    if own not in _FOUND:
        _FOUND[own] = _look(own)
    return _FOUND[own]


def _look(own: type[nn.Module]) -> tuple[type[nn.Module] | None, frozenset[str]]:
    added: set[str] = set()
    for cls in own.__mro__:
        if cls in types.KNOWN or cls in _LEARNED:
            clear = not any(_exists(cls, name) for name in added)
            return (cls, frozenset(added)) if clear else (None, frozenset())
        if cls in types.STANDARDISED and not any(_exists(cls, name) for name in added):
            return types.STANDARDISED[cls], frozenset(added)
        if cls.__dict__.get(NOTHING_ADDED):
            continue
        for name, member in vars(cls).items():
            if name in _IDLE:
                continue
            if not isinstance(member, (FunctionType, *_CONSTANTS)):
                return None, frozenset()
            added.add(name)
    return None, frozenset()


def _exists(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__)


def known_methods(known: type[nn.Module]) -> frozenset[str]:
    """Names of everything that can be called in a class: an attribute of the instance by such a name would hide it."""
    if known not in _METHODS:
        members = [item for cls in known.__mro__ for item in vars(cls).items()]
        _METHODS[known] = frozenset(name for name, m in members if isinstance(m, (FunctionType, classmethod, staticmethod)))
    return _METHODS[known]


def known_class(own: type[nn.Module]) -> type[nn.Module]:
    """The known class that a class is or only constructs otherwise; itself where there is none."""
    return _known(own)[0] or own
