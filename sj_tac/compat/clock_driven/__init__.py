"""Makes ``spikingjelly.clock_driven`` (SpikingJelly up to 0.0.0.0.12) importable on the installed host.

Import it before the model's code. It registers ``spikingjelly.clock_driven.{base, encoding, functional, lava_exchange,
layer, neuron, rnn, surrogate}`` and ``spikingjelly.cext.neuron``, in front of those that 0.0.0.0.14 still ships: the host's
``activation_based`` classes, or subclasses of them with no more than a constructor, under the old names, signatures and
defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import spikingjelly

from sj_tac.compat import shadow

# The old package, and which module of this one (or of the host) stands for each of its modules.
HOMES = {
    "spikingjelly.clock_driven": {
        name: f"{__name__}.{name}"
        for name in ("base", "encoding", "functional", "lava_exchange", "layer", "neuron", "surrogate")
    }
    | {"rnn": "spikingjelly.activation_based.rnn"},
    "spikingjelly.cext": {"neuron": f"{__name__}.cext"},
}


class _Missing(MetaPathFinder):
    """Names the modules that have no counterpart, also where 0.0.0.0.14 has files of that name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        for package, modules in HOMES.items():
            if fullname.startswith(f"{package}."):
                # Without name=, or "from package import module" would swallow the message.
                raise ModuleNotFoundError(
                    f"{fullname}: sj_tac.compat.clock_driven covers {', '.join(sorted(modules))} of {package} and nothing "
                    "else; take it from spikingjelly.activation_based, where it exists, or leave it out"
                )


def _install() -> None:
    shadow.refuse_vendored()
    shadow.refuse_loaded(HOMES, __name__)
    made: dict[str, ModuleType] = {}
    for package, modules in HOMES.items():
        made[package] = ModuleType(package, f"The old {package} on the installed host, by {__name__}.")
        # A package with nothing in it, so that no file of 0.0.0.0.14 is found.
        vars(made[package]).update(__path__=[], __made_by__=__name__)
        for name, home in modules.items():
            made[f"{package}.{name}"] = import_module(home)
    # All of it or nothing: imports above may raise.
    sys.modules.update(made)
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        setattr(made.get(parent, spikingjelly), child, module)
    if not any(type(finder).__qualname__ == _Missing.__qualname__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Missing())


def lost(module: str, names: dict[str, str]) -> Any:
    """The ``__getattr__`` of an old module: says what became of ``names``."""

    def __getattr__(name: str) -> Any:
        if name in names:
            # Not an AttributeError: "from module import name" would replace its message.
            raise ImportError(f"{module}.{name} has no counterpart in the installed SpikingJelly: {names[name]}")
        raise AttributeError(
            f"{module} of SpikingJelly 0.0.0.0.12 has no {name!r} (on the installed host, by sj_tac.compat)"
        )

    return __getattr__


_install()
