"""Objects that are nothing but names for what they hold: a batch, an output."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch


def is_record(x: Any) -> bool:
    """True for an instance of a dataclass and for a SimpleNamespace, not for what is a container or a module besides."""
    kind = type(x)
    return kind is SimpleNamespace or (hasattr(x, "__dict__") and all(map(dataclasses.is_dataclass, kind.__mro__[:-1])))


def record_like(x: Any, held: Mapping[str, Any]) -> Any:
    """Another object of its class that holds something else."""
    made = copy.copy(x)
    put_record(made, held)
    return made


def put_record(x: Any, held: Mapping[str, Any]) -> None:
    """Set its names, in a frozen one, too."""
    for name, value in held.items():
        object.__setattr__(x, name, value)


def opened(x: Any) -> Any:
    """Any nest of containers with dicts in the place of records."""
    return torch.utils._pytree.tree_map(lambda leaf: opened(vars(leaf)) if is_record(leaf) else leaf, x)
