"""Shared frames that say what a neuron behind is to do with collapsed time: the mark that values carry, and others lack."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sj_tac.runtime.expressions import SharedExpression
from sj_tac.runtime.groups import single
from sj_tac.runtime.values import Shared, settle


def is_collapsed(x: Any) -> bool:
    """True for shared frames with a mark: a neuron behind gives means of its steps, or one step stands for many frames."""
    groups = x.expression.groups
    return x.means is not None or x.merges or groups.frames is not groups.steps


def apart(x: Shared) -> Shared:
    """The same with a compact frame for every frame, so that each has a gradient of its own."""
    frames = x.frames()
    unfolded = frames if x.folded is None else frames.reshape(x.steps, x.folded, *frames.shape[1:])
    made = Shared.of(SharedExpression(unfolded, single(x.steps)), x.means, x.folded)
    made.maker = x.maker
    return made


def defined(x: Shared) -> Tensor:
    """What the definition hands on: the frames themselves, with their mark where there is one."""
    if not is_collapsed(x):
        return x.frames()
    groups = x.expression.groups
    if groups.frames is groups.steps and not x.merges:
        settle(x)
    return x
