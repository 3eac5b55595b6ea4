"""Which ``spikingjelly`` Python finds, and whether old modules of it are loaded already."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import spikingjelly


def refuse_vendored() -> None:
    """Raise ImportError where ``import spikingjelly`` finds an old copy instead of the installed host."""
    found = Path(next(iter(spikingjelly.__path__))).resolve()
    try:
        here = distribution("spikingjelly")
    except PackageNotFoundError:
        version, installed = "none", None
    else:
        version, installed = here.version, Path(str(here.locate_file("spikingjelly"))).resolve()
    shadowed = installed is not None and installed.is_dir() and installed != found
    # A checkout of the host on the path is the user's choice; a copy with clock_driven in it is an old one of a model's.
    if (found / "activation_based").is_dir() and not (shadowed and (found / "clock_driven").is_dir()):
        return
    if shadowed:
        raise ImportError(
            f"'import spikingjelly' finds the copy in {found}, which hides the installed SpikingJelly {version} in "
            f"{installed}: rename or remove that folder, or start Python where it is not on sys.path"
        )
    raise ImportError(
        f"the SpikingJelly in {found} (installed version: {version}) has no activation_based: it is 0.0.0.0.12 or older. "
        "Install the host beside it: pip install 'spikingjelly>=0.0.0.0.14'"
    )


def refuse_loaded(names: Iterable[str], ours: str) -> None:
    """Raise ImportError where one of the modules ``names`` is loaded and was not made by ``ours``."""
    for name in names:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__made_by__", None) != ours:
            raise ImportError(
                f"{name} was imported before {ours} (from {getattr(module, '__file__', None)}), so modules hold classes of "
                f"it: put 'import {ours}' in front of the first import of {name.partition('.')[0]} and of the model's code"
            )
