"""Surrogate functions of one's own: where somebody vouches for their spikes, inference runs in the compiled kernels.

Before 2.0 the host's neurons ask no surrogate in eval mode, so that there is nothing to vouch for.
"""

import copy

import pytest
import torch
from defined import given, same
from spikingjelly.activation_based import functional, surrogate
from support import awake, csnn, frames, node, only_v2
from torch import nn

import sj_tac
from sj_tac.host import registry
from sj_tac.kernels.layout import RUNS

pytestmark = pytest.mark.captured
X = frames(8, 4, 2, 8, 8, dtype=torch.float64)


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0].abs() < 0.5)


class Own(nn.Module):
    """As published code has it: a module that calls an autograd.Function."""

    spiking = True
    at = 0.0

    def forward(self, x):
        return Step.apply(x - self.at) if self.spiking else torch.sigmoid(x)


class Derived(surrogate.Sigmoid):
    """One of the host's with a forward of its own."""

    def forward(self, x):
        return Step.apply(x) if self.spiking else torch.sigmoid(x)


def function(x):
    return Step.apply(x)


KINDS = {
    "module": (Own, Own()),
    "derived": (Derived, Derived()),
    "function": (function, function),
    "apply": (Step.apply,) * 2,
}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = set(registry.SURROGATES)
    yield
    registry.SURROGATES.clear()
    registry.SURROGATES.update(before)


def net_of(made):
    return awake(csnn(make=lambda: node("lif", surrogate_function=made)).double(), X)


def runs(net):
    """Outputs, voltages, and how often the compiled kernel ran, without gradients."""
    functional.reset_net(net)
    before = sum(RUNS.values()) - sum(n for (_, kernel), n in RUNS.items() if kernel == "reference")
    with torch.no_grad():
        y = net(X).clone()
    after = sum(RUNS.values()) - sum(n for (_, kernel), n in RUNS.items() if kernel == "reference")
    return y, [m.v for m in net.modules() if hasattr(m, "v_threshold")], after - before


@only_v2
@pytest.mark.parametrize(("kind", "k"), [("module", 1), ("derived", 2), ("function", 1), ("apply", 2)])
def test_who_is_vouched_for_runs_compiled_and_says_the_same(kind, k):
    told, made = KINDS[kind]
    source = net_of(made)
    expected, voltages, none = runs(sj_tac.convert(source, "preserve", k, fuse=False))
    y, v, by_itself = runs(sj_tac.convert(source, "preserve", k))
    torch.testing.assert_close(y, expected)
    assert sj_tac.register_surrogate(told) is told
    y, v, compiled = runs(sj_tac.convert(source, "preserve", k))
    assert compiled > by_itself >= none
    torch.testing.assert_close(y, expected)
    for a, b in zip(v, voltages, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_derivative_trains(kind):
    told, made = KINDS[kind]
    sj_tac.register_surrogate(told)
    source = net_of(made).train()
    expected = given(source, X)
    same(given(sj_tac.convert(source, "preserve", 1), X), expected, rtol=1e-7, atol=1e-7)
    assert expected["gradient of 0.weight"].abs().max() > 0


@only_v2
@pytest.mark.parametrize(("change", "k"), [("analog", 1), ("another threshold", 2), ("a forward of its own", 1)])
def test_a_promise_that_no_longer_holds_is_seen(change, k):
    sj_tac.register_surrogate(Own)
    source = sj_tac.convert(net_of(Own()), "preserve", k, fuse=False)
    fast = sj_tac.convert(net_of(Own()), "preserve", k)
    _, _, compiled = runs(fast)
    for net in (source, fast):
        for m in net.modules():
            if isinstance(m, Own):
                if change == "analog":
                    m.spiking = False
                elif change == "another threshold":
                    m.at = 0.2
                else:
                    m.forward = torch.tanh
    expected, voltages, _ = runs(source)
    y, v, fewer = runs(fast)
    torch.testing.assert_close(y, expected)
    for a, b in zip(v, voltages, strict=True):
        torch.testing.assert_close(a, b)
    assert fewer < compiled


@only_v2
def test_a_hook_on_it_is_called():
    sj_tac.register_surrogate(Own)
    fast, seen = sj_tac.convert(net_of(Own()), "preserve", 2), []
    shared = copy.deepcopy(fast)
    next(m for m in shared.modules() if isinstance(m, Own)).register_forward_hook(lambda *args: seen.append(1))
    torch.testing.assert_close(runs(shared)[0], runs(fast)[0])
    assert seen


@only_v2
def test_the_report_names_it_and_what_to_do():
    for made, told in ((Own(), r"register_surrogate\(Own\)"), (function, r"register_surrogate\(function\)")):
        report = sj_tac.plan(net_of(made), "preserve", 2)
        assert all(told.replace("\\", "") in verdict.detail for verdict in report if verdict.status == "converted")
    sj_tac.register_surrogate(Own)
    for made in (Own(), surrogate.Rect()):
        assert "register_surrogate" not in str(sj_tac.plan(net_of(made), "preserve", 2).to_dict())


@pytest.mark.parametrize("what", [Own(), "Own"])
def test_what_is_no_class_is_refused(what):
    with pytest.raises(
        TypeError, match=r"register_surrogate takes a class of modules, or a function, got .*not an instance"
    ):
        sj_tac.register_surrogate(what)


def test_it_decorates():
    @sj_tac.register_surrogate()
    class Decorated(Own):
        pass

    assert registry.is_registered_surrogate(Decorated())
    assert not registry.is_registered_surrogate(Own())
