"""One call of a net in a given way; converted nets compared with the definition and ``fuse=False``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from defined import given, same
from definition import adopt, define, margins, planned_neurons, settings_of
from torch import Tensor, nn

import sj_tac

Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How a net is called. ``grad``: "grad", "no_grad" or "inference"."""

    grad: str = "grad"
    train: bool = False

    def __str__(self) -> str:
        return f"{self.grad}, {'train' if self.train else 'eval'}"


WAYS = (Way(), Way(train=True), Way("no_grad"), Way("inference"))
Call = Callable[[nn.Module, Tensor], Any]


def run(net: nn.Module, x: Tensor, way: Way = Way(), call: Call | None = None) -> Outcome:
    """One call from rest, with a backward where the way has gradients."""
    net.train(way.train)
    with torch.inference_mode(way.grad == "inference"):
        return given(net, x, way.grad == "grad", (lambda x: call(net, x)) if call else None)


def policy_of(mode: str, k: int, spikes: str = "count") -> dict[str, Any]:
    return {"default": {"mode": mode, "k": k, "spikes": spikes}}


def definitions(
    source: nn.Module, fast: nn.Module, edit: Callable[..., Any], spikes: str = "count", **more: Any
) -> list[nn.Module]:
    """What the converted net may compute: the definition, and its other reading where the definition leaves a choice.

    The choice: modules that were put in or left alone may pass a collapse's mark on, or read frames.
    """
    report = sj_tac.report(fast)
    settings = settings_of(source, report, spikes=spikes, **more)
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


@dataclass(frozen=True)
class Situation:
    """A source net, what is done to it after convert, and how it is called.

    ``defined``: what is done to the definition instead, where that is something else.
    """

    source: nn.Module
    x: Tensor
    call: Call | None = None
    edit: Callable[[nn.Module], Any] = nothing
    defined: Callable[[nn.Module], Any] | None = None
    ways: tuple[Way, ...] = WAYS


def agrees(case: Situation, mode: str, k: int, spikes: str = "count") -> None:
    """The converted net gives what the definition gives, in every way of calling; so does ``fuse=False`` in the first."""
    policy = policy_of(mode, k, spikes)
    fast = sj_tac.convert(copy.deepcopy(case.source), policy)
    plain = sj_tac.convert(case.source, policy, fuse=False) if mode == "preserve" else None
    others = definitions(case.source, fast, case.defined or case.edit, spikes)
    case.edit(fast)
    if plain is not None:
        case.edit(plain)
    expected: dict[Way, list[Outcome]] = {}
    for way in case.ways:
        # The definition knows no inference mode.
        asked = Way("no_grad", way.train) if way.grad == "inference" else way
        if asked not in expected:
            with margins(others[0]) as distances:
                expected[asked] = [run(net, case.x, asked, case.call) for net in others]
            if distances and min(distances) < 1e-9:
                pytest.fail("a voltage of the definition lies on its threshold: choose another net")
        if plain is not None and way == case.ways[0]:
            same(run(plain, case.x, way, case.call), expected[asked][0], f"fuse=False, {way}")
        same_as_one(run(fast, case.x, way, case.call), expected[asked], str(way))


def same_as_one(got: Outcome, expected: list[Outcome], what: str) -> None:
    """Equal to one of the readings; the error is that of the first."""
    for other in expected[1:]:
        try:
            return same(got, other, what)
        except AssertionError:
            pass
    return same(got, expected[0], what)
