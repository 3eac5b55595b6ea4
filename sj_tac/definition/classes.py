"""Classes of converted modules, a mixin in front of the module's own class, by whose name the new one goes; their hooks."""

from __future__ import annotations

from typing import Any

from torch import nn

# Tools that look a class up show its qualified name when they do not know it (NIR's exporter, torch's quantizers). No comma:
# torch.export writes these names into lists.
UNKNOWN = "(converted by sj_tac: give this tool sj_tac.restore(net) instead)"
# By mixin and own class.
_MADE: dict[tuple[type, type], type[nn.Module]] = {}


class Swapped(nn.Module):
    """Base of the mixins. A module pickles by its mixin and its own class, from which loading makes the new class again."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, kind = super().__reduce_ex__(protocol), type(self)
        is_ours = len(kind.__bases__) == 2 and _MADE.get((kind.__bases__[0], kind.__bases__[1])) is kind
        return (_new, kind.__bases__, *made[2:]) if is_ours else made


def mixed(mixin: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Return the class of ``mixin`` and ``own``, the same one each time."""
    if (mixin, own) not in _MADE:
        names = {"__module__": own.__module__, "__qualname__": f"{own.__qualname__} {UNKNOWN}", "__doc__": own.__doc__}
        _MADE[mixin, own] = type(own.__name__, (mixin, own), names)
    return _MADE[mixin, own]


def own_class(made: type[nn.Module]) -> type[nn.Module]:
    """Return the class that ``mixed`` put behind a mixin."""
    own: type[nn.Module] = made.__bases__[1]
    return own


def drop_hooks(module: nn.Module, *kinds: type) -> None:
    """Take a module's forward hooks of these classes away."""
    tables: list[list[dict[int, Any]]] = [
        [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs],
        [module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called],
    ]
    for hooks, *flags in tables:
        for number in [number for number, hook in hooks.items() if isinstance(hook, kinds)]:
            for held in (hooks, *flags):
                held.pop(number, None)


def _new(mixin: type[nn.Module], own: type[nn.Module]) -> nn.Module:
    made = mixed(mixin, own)
    return made.__new__(made)
