"""One call of a net in a given way; converted nets compared with the definition and ``fuse=False``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from definition import adopt, define, margins, planned_neurons, settings_of, unmark
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn

import sj_tac
from sj_tac import host

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True}


@dataclass(frozen=True)
class Way:
    """How a net is called. ``grad``: "grad", "input" (the input's gradient too), "no_grad" or "inference"."""

    grad: str = "grad"
    train: bool = False

    def __str__(self) -> str:
        return f"{self.grad}, {'train' if self.train else 'eval'}"


WAYS = [Way("input"), Way(train=True), Way("no_grad"), Way("inference")]


@contextmanager
def grad_mode(grad: str, marks: bool = False) -> Iterator[None]:
    """The grad mode of a way; the definition (``marks``) runs without gradients where the net runs in inference mode."""
    if grad == "inference" and not marks:
        with torch.inference_mode():
            yield
    else:
        with torch.set_grad_enabled(grad in ("grad", "input")):
            yield


@dataclass
class Outcome:
    """What a call gave: values, gradients by name, voltages by name, the norms' running statistics by name."""

    values: list[Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    voltages: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)


def forward(net: nn.Module, x: Any) -> Any:
    return net(x)


def run(net: nn.Module, x: Any, way: Way = Way(), call: Callable[..., Any] = forward, marks: bool = False) -> Outcome:
    """One call from rest, with a backward where the way has gradients. Running statistics are as before, afterwards."""
    net.train(way.train)
    if way.grad in ("grad", "input"):
        learning(net)
    reset(net)
    before = {n: b.clone() for n, b in net.named_buffers()}
    net.zero_grad()
    x = torch.utils._pytree.tree_map(lambda t: t.clone().requires_grad_(way.grad == "input"), x)
    torch.manual_seed(5)
    with grad_mode(way.grad, marks):
        values = flat(unmark(call(net, x)))
        if call is forward:
            assert all(type(v) is Tensor for v in values), "outputs of a net are ordinary tensors"
        wanted = [v for v in values if v.requires_grad]
        if wanted:
            sum(v.square().sum() + v.sum() for v in wanted).backward()
    gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    if way.grad == "input":
        gradients |= {f"input {i}": t.grad.clone() for i, t in enumerate(flat(x)) if t.grad is not None}
    outcome = Outcome([read(v) for v in values], gradients, voltages(net), {n: b.clone() for n, b in net.named_buffers()})
    for name, buffer in net.named_buffers():
        buffer.copy_(before[name])
    return outcome


def learning(net: nn.Module) -> None:
    """Under the older host a neuron passes gradients in training mode only; a neuron does nothing else differently there."""
    if not host.IS_V2:
        for node in net.modules():
            if isinstance(node, neuron.BaseNode):
                node.train()


def reset(net: nn.Module) -> None:
    """``reset_net`` that also finds neurons which were put in since the last one: the host remembers a net's neurons."""
    getattr(functional, "invalidate_reset_cache", lambda net: None)(net)
    functional.reset_net(net)


def voltages(net: nn.Module) -> dict[str, Tensor]:
    nodes = {n: m for n, m in net.named_modules() if isinstance(m, neuron.BaseNode)}
    return {n: m.v.detach().clone() for n, m in nodes.items() if isinstance(m.v, Tensor)}


def flat(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


def read(x: Tensor) -> Tensor:
    """The value as anybody would read it, in a tensor of its own."""
    return torch.cat([x.detach().reshape(-1)]).reshape(x.shape).clone()


def same(got: Outcome, expected: Outcome, what: str = "", close: dict[str, Any] = CLOSE) -> None:
    """Equal outputs, gradients and voltages, or an AssertionError that says which."""
    assert [v.shape for v in got.values] == [v.shape for v in expected.values], f"{what}: shapes of the outputs"
    for i, (a, b) in enumerate(zip(got.values, expected.values, strict=True)):
        torch.testing.assert_close(a, b, **close, msg=lambda m, i=i: f"{what}: output {i}: {m}")
    for kind in ("gradients", "voltages"):
        a, b = getattr(got, kind), getattr(expected, kind)
        assert set(a) == set(b), f"{what}: {kind} of {sorted(set(a) ^ set(b))} on one side only"
        for name in b:
            torch.testing.assert_close(a[name], b[name], **close, msg=lambda m, n=name, k=kind: f"{what}: {k} of {n}: {m}")
    for name, statistic in expected.statistics.items():
        # The unbiased variance of repeated frames counts them, or their groups: n / (n - 1) differs by less than this.
        slack = {"rtol": 0.005, "atol": 0.0, "equal_nan": True} if name.endswith("running_var") else close
        found = got.statistics[name]
        torch.testing.assert_close(found, statistic, **slack, msg=lambda m, n=name: f"{what}: {n}: {m}")


def fused_and_defined(net: nn.Module, policy: Any, x: Any = None) -> list[nn.Module]:
    """Copies of the net, fused and with ``fuse=False``; changed in place, as nobody asks what they gain on the sample."""
    made = []
    for fuse in (True, False):
        made.append(sj_tac.convert(copy.deepcopy(net), policy, example_input=x, fuse=fuse, inplace=True))
    return made


def agree(net: nn.Module, policy: Any, x: Tensor, edit: Callable[..., Any] | None = None, close: Any = CLOSE) -> nn.Module:
    """The fused net gives what the definition gives, recorded and not, after the same edit. Returns it."""
    fused, defined = fused_and_defined(net, policy, x)
    for each in (fused, defined) if edit is not None else ():
        edit(each)
    for way in (Way("input"), Way("no_grad")):
        same(run(fused, x, way), run(defined, x, way), str(way), close)
    return fused


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
    x: Any
    call: Callable[..., Any] = forward
    edit: Callable[[nn.Module], Any] = nothing
    defined: Callable[[nn.Module], Any] | None = None
    ways: tuple[Way, ...] = tuple(WAYS)


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
                expected[asked] = [run(net, case.x, asked, case.call, marks=True) for net in others]
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
