"""Model code and checkpoints of other SpikingJelly versions, on the installed one (docs/compat.md).

Importing this changes nothing. ``import sj_tac.compat.clock_driven`` and ``import sj_tac.compat.backends`` do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sj_tac.compat.keys import remap_keys

__all__ = ["remap_keys"]


def __getattr__(name: str) -> Any:
    if name != "remap_keys":
        raise AttributeError(f"module 'sj_tac.compat' has no attribute {name!r}")
    globals()[name] = found = import_module("sj_tac.compat.keys").remap_keys
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
