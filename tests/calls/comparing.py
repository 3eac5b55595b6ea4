"""One call of a net in a given way; converted nets compared with the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from defined import given, same
from definition import adopt, define, margins, planned_neurons, settings_of
from forwards import spikes_in
from torch import Tensor, nn

import sj_tac

Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How a net is called. ``grad``: "grad", "no_grad" or "inference"."""

    grad: str = "grad"
    train: bool = False


WAYS = (Way(), Way(train=True), Way("no_grad"), Way("inference"))
Call = Callable[[nn.Module, Tensor], Any]


def run(net: nn.Module, x: Tensor, way: Way = Way(), call: Call | None = None) -> Outcome:
    """One call from rest, with a backward where the way has gradients."""
    net.train(way.train)
    with torch.inference_mode(way.grad == "inference"):
        return given(net, x, way.grad == "grad", (lambda x: call(net, x)) if call else None)


def policy_of(mode: str, k: int) -> dict[str, Any]:
    return {"default": {"mode": mode, "k": k}}


def definitions(source: nn.Module, fast: nn.Module, edit: Callable[..., Any]) -> list[nn.Module]:
    """What the converted net may compute: the definition, and its other reading where the definition leaves a choice.

    The choice: modules that were put in or left alone may pass a collapse's mark on, or read frames.
    """
    report = sj_tac.report(fast)
    settings = settings_of(source, report)
    choices = []
    for generous in (True, False) if any(s.mode == "collapse" for s in settings.values()) else (True,):
        net = define(source, settings, None if generous else planned_neurons(settings, report))
        edit(net)
        if generous:
            adopt(net)
        choices.append(net)
    return choices


def nothing(net: nn.Module) -> None:
    """No edit."""


def agrees(
    source: nn.Module, mode: str, k: int, call: Call | None = None, edit: Callable[..., Any] = nothing,
    defined: Callable[..., Any] | None = None, ways: tuple[Way, ...] = WAYS,
) -> None:  # fmt: skip
    """The converted net gives what the definition gives, in every way of calling.

    Args:
        edit: what is done to both after convert. defined: to the definition, where that is something else.
    """
    x, fast = spikes_in(), sj_tac.convert(copy.deepcopy(source), policy_of(mode, k))
    others = definitions(source, fast, defined or edit)
    edit(fast)
    expected: dict[Way, list[Outcome]] = {}
    for way in ways:
        # The definition knows no inference mode.
        asked = Way("no_grad", way.train) if way.grad == "inference" else way
        if asked not in expected:
            with margins(others[0]) as distances:
                expected[asked] = [run(net, x, asked, call) for net in others]
            if distances and min(distances) < 1e-9:
                pytest.fail("a voltage of the definition lies on its threshold: choose another net")
        same_as_one(run(fast, x, way, call), expected[asked], str(way))


def same_as_one(got: Outcome, expected: list[Outcome], what: str) -> None:
    """Equal to one of the readings; the error is that of the first."""
    for other in expected[1:]:
        try:
            return same(got, other, what)
        except AssertionError:
            pass
    return same(got, expected[0], what)
