"""The outermost module's forward is looked at as PyTorch runs it: of the instance, decorated, with whatever it takes."""

import functools
import types
from math import sqrt

import pytest
import torch
from definition import Setting, define
from spikingjelly.activation_based import functional, layer, neuron
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError, TraceError


def lif():
    node = neuron.LIFNode(v_threshold=0.15, step_mode="m")
    return node.train()  # the older host differentiates no neuron in eval mode


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.lif1 = layer.Conv2d(2, 8, 3, padding=1), layer.BatchNorm2d(8), lif()
        self.conv2, self.bn2, self.lif2 = layer.Conv2d(8, 8, 3, padding=1), layer.BatchNorm2d(8), lif()
        functional.set_step_mode(self, "m")

    def run(self, x, scale=1.0):
        return self.lif2(self.bn2(self.conv2(self.lif1(self.bn1(self.conv1(x)))))) * scale

    def rectified(self, x):
        return self.lif2(torch.relu(self.bn2(self.conv2(self.lif1(self.bn1(self.conv1(x)))))))


class Plain(Base):
    def forward(self, x):
        return self.run(x)


class Rectified(Base):
    def forward(self, x):
        return self.rectified(x)


def wrapped(forward):
    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return call


def lying(forward):
    """Says that it takes what it wraps."""

    @functools.wraps(forward)
    def call(self, x):
        return forward(self, x, 1.0)

    return call


def bare(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs)


def bare_with_self(forward):
    return lambda self, *args, **kwargs: forward(self, *args, **kwargs)


class NoGrad(Base):
    @torch.no_grad()
    def forward(self, x, *, scale=1.0):
        return self.run(x, scale)


class Autocast(Base):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x, mask=None, **more):
        return self.run(x, **more)


class Wrapped(Base):
    @wrapped
    def forward(self, x, *rest, scale: float = 1.0):
        return self.run(x, *rest) * scale


class Lying(Base):
    @lying
    def forward(self, frames, scale):
        return self.run(frames, scale)


class Bare(Base):
    @bare
    def forward(self, x):
        return self.run(x)


class BareWithSelf(Base):
    @bare_with_self
    def forward(self, x):
        return self.run(x)


class Super(Plain):
    @torch.no_grad()
    def forward(self, x):
        assert type(self) is Super
        assert __class__ is Super
        return super().forward(x)


class Partial(Base):
    forward = functools.partialmethod(Base.run, scale=1.0)


class Property(Base):
    @property
    def forward(self):
        return self.run


class Assigned(Base):
    def __init__(self):
        super().__init__()
        self.forward = self.run


class AssignedPartial(Base):
    def __init__(self):
        super().__init__()
        self.forward = functools.partial(self.run, scale=1.0)


class Patched(Rectified):
    def __init__(self):
        super().__init__()
        self.forward = types.MethodType(Plain.forward, self)


class HandsOn(Base):
    def forward(self, x, *args, **kwargs):
        return self.run(x, *args, **kwargs)


class Instance(Plain):
    """Its class has another forward."""

    def __init__(self):
        super().__init__()
        self.forward = self.rectified


KINDS = [
    *(NoGrad, Autocast, Wrapped, Lying, Bare, BareWithSelf, Super, Partial, Property, Assigned, AssignedPartial, Patched),
    HandsOn,
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def frames(steps=6):
    torch.manual_seed(3)
    return (torch.rand(steps, 2, 2, 8, 8) < 0.4).double()


def made(kind):
    torch.manual_seed(1)
    return kind().double()


def settings(k, *names):
    return {f"conv{i}": Setting("preserve", k, f"lif{i}") for i in names}


def verdicts(net, example=None):
    return [(v.layer, v.status, v.reason, v.detail) for v in sj_tac.plan(net, k=2, example_input=example).verdicts]


@every_kind
@pytest.mark.parametrize("example", [True, False], ids=["sample", "symbols"])
def test_the_verdicts_are_those_of_a_plain_class(kind, example):
    sample = frames() if example else None
    found = verdicts(made(kind), sample)
    assert found == verdicts(made(Plain), sample)
    assert [status for _, status, *_ in found] == ["converted", "converted"]


@every_kind
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("k", [1, 2])
def test_it_computes_what_its_definition_does(kind, fuse, k):
    x, net = frames(), define(made(kind), settings(k, 1, 2))
    wanted = net(x)
    assert 0.05 < wanted.mean() < 0.6
    for example in (x, None):
        converted = sj_tac.convert(made(kind), k=k, fuse=fuse, example_input=example)
        seen = converted(x)
        torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-9)
        assert seen.requires_grad is wanted.requires_grad is (kind not in (NoGrad, Super))


@every_kind
def test_restore_gives_everything_back(kind):
    net = made(kind)
    before, x = dict(vars(net)), frames()
    wanted = net(x)
    functional.reset_net(net)
    sj_tac.convert(net, k=2, example_input=x, inplace=True)
    assert type(net) is kind
    sj_tac.restore(net, inplace=True)
    functional.reset_net(net)
    assert vars(net).get("forward") == before.get("forward")
    assert vars(net).keys() == before.keys()
    assert torch.equal(net(x), wanted)


@pytest.mark.parametrize("example", [True, False], ids=["sample", "symbols"])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_the_forward_of_an_instance_is_what_is_judged(fuse, example):
    """Its class has the same without ReLU in front of the neuron: verdicts were about that one, and outputs wrong."""
    x, sample = frames(), frames() if example else None
    found = verdicts(made(Instance), sample)
    assert found == verdicts(made(Rectified), sample)
    assert [(name, status, str(reason)) for name, status, reason, _ in found][1] == ("conv2", "refused", "NOT_LINEAR")
    converted = sj_tac.convert(made(Instance), k=2, fuse=fuse, example_input=sample)
    torch.testing.assert_close(converted(x), define(made(Instance), settings(2, 1))(x), rtol=0, atol=1e-9)


class Optional(Base):
    @wrapped
    def forward(self, x, gain=None, times: int = 1, *rest):
        for _ in range(times):
            x = x * 1.0
        x = x if gain is None else x * gain
        return self.run(x) + sum(rest)


@pytest.mark.parametrize(
    "more", [(), (None,), (None, 2), (torch.ones(()),), (torch.ones(()), 2, torch.ones(()), torch.zeros(()), 3)], ids=len
)
def test_arguments_are_those_of_the_sample(more):
    x = frames()
    converted = sj_tac.convert(made(Optional), k=2, example_input=(x, *more))
    wanted = define(made(Optional), settings(2, 1, 2))(x, *more)
    torch.testing.assert_close(converted(x, *more), wanted, rtol=0, atol=1e-9)


class Needs(Base):
    @torch.no_grad()
    def forward(self, x, *, gain):
        return self.run(x * gain)


def test_a_keyword_that_must_be_given():
    converted = sj_tac.convert(made(Needs), k=2)
    wanted = define(made(Needs), settings(2, 1, 2))(frames(), gain=1.0)
    torch.testing.assert_close(converted(frames(), gain=1.0), wanted, rtol=0, atol=1e-9)
    with pytest.raises(TraceError, match=r"does not take example_input.*'gain'.*give the others a default"):
        sj_tac.convert(made(Needs), k=2, example_input=frames())


class Folded(Plain):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def run(self, x, scale=1.0):
        for conv, norm, node in ((self.conv1, self.bn1, self.lif1), (self.conv2, self.bn2, self.lif2)):
            x = node(norm(conv(x.flatten(0, 1))).unflatten(0, (x.shape[0], x.shape[1])))
        return x * scale


@every_kind
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_folded_nets_know_their_axes(kind, fuse):
    folded = type(kind.__name__, (kind, Folded), {"run": Folded.run})
    if kind in (Super, Partial):  # one asks for its class, one was made of another run
        folded = type(kind.__name__, (Folded,), {"forward": torch.no_grad()(Folded.forward)})
    mine, plain = (sj_tac.convert(made(c), k=2, fuse=fuse, example_input=frames()) for c in (folded, Folded))
    assert len(sj_tac.report(mine).converted) == 2
    assert mine._sj_tac.plan.axes[1:] == plain._sj_tac.plan.axes[1:] == ((5,), (0, 0), (0, 1))
    for steps in (6, 5):
        assert torch.equal(mine(frames(steps)), plain(frames(steps)))
        functional.reset_net(mine)
        functional.reset_net(plain)
    if kind is not Bare and kind is not BareWithSelf:  # which name nothing
        assert torch.equal(mine(x=frames()), plain(x=frames()))


class Asks(Base):
    @torch.no_grad()
    def forward(self, x):
        return self.run(x) * sqrt(x.shape[1])


class PlainlyAsks(Base):
    def forward(self, x):
        return self.run(x) * sqrt(x.shape[1])


def test_functions_that_torch_fx_wraps_are_those_of_the_code_that_runs():
    """The decorator's own names have no sqrt."""
    assert verdicts(made(Asks)) == verdicts(made(PlainlyAsks))


class Compiled(Base):
    @functools.partial(torch.compile, backend="eager")
    def forward(self, x):
        return self.run(x)


def test_what_torch_compile_made_of_forward_is_looked_into():
    assert verdicts(made(Compiled), frames()) == verdicts(made(Plain), frames())


@pytest.mark.parametrize(
    "make",
    [lambda net: bare(net.run), lambda net: torch.compile(net.run, backend="eager"), lambda net: lambda x: net.run(x)],
    ids=["decorated", "compiled", "lambda"],
)
def test_a_forward_that_a_copy_shares_with_its_source(make):
    """It would run the source's modules, whatever becomes of the copy's."""
    net = made(Plain)
    net.forward = make(net)
    for sample in (frames(), None):
        with pytest.raises(TraceError, match=r"this Plain runs another one's modules.*inplace=True"):
            sj_tac.plan(net, k=2, example_input=sample)
        with pytest.raises(ConversionError, match="inplace=True"):
            sj_tac.convert(net, k=2, example_input=sample)
    if "compile" not in make.__code__.co_names:
        sj_tac.convert(net, k=2, example_input=frames(), inplace=True)
        torch.testing.assert_close(net(frames()), define(made(Plain), settings(2, 1, 2))(frames()), rtol=0, atol=1e-9)


def test_another_model_that_a_forward_asks_is_no_part_of_it():
    net, teacher = made(Plain), made(Plain)
    net.forward = lambda x: net.run(x) + 0 * teacher.conv1.weight.sum()
    sj_tac.convert(net, k=2, example_input=frames(), inplace=True)
    assert len(sj_tac.report(net).converted) == 2


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["raises", "interrupted"])
@pytest.mark.parametrize("example", [True, False], ids=["sample", "symbols"])
def test_everything_is_as_before_afterwards(error, example):
    net, called = made(Instance), nn.Module.__call__

    def forward(self, x):
        self.seen = x
        raise error

    net.forward = types.MethodType(forward, net)
    before, names = dict(vars(net)), dict(vars(Instance))
    with pytest.raises((TraceError, KeyboardInterrupt)):
        sj_tac.convert(net, k=2, example_input=frames() if example else None, inplace=True)
    assert type(net) is Instance
    assert vars(net) == before
    assert dict(vars(Instance)) == names
    assert nn.Module.__call__ is called


def test_a_forward_of_which_nobody_can_say_what_it_takes():
    net = made(Plain)
    net.forward = None
    for sample in (frames(), None):
        with pytest.raises(TraceError, match="nobody can say what the forward of Plain takes: None is not a callable"):
            sj_tac.convert(net, k=2, example_input=sample)


class Unfollowed(Base):
    def forward(self, x):
        return self.run(torch.vmap(torch.neg)(x))


class Fails(Base):
    def forward(self, x):
        raise ValueError("mine")


class FailsOtherwise(Base):
    def forward(self, x):
        if type(x) is torch.Tensor:
            raise ValueError("only when called")
        return self.run(torch.vmap(torch.neg)(x))


def test_the_error_says_whether_the_model_runs():
    place = r"'return self.run\(torch.vmap\(torch.neg\)\(x\)\)' \(test_forwards.py, line \d+\)"
    advice = "wrap what it does there in a module of its own, which then becomes one node"
    with pytest.raises(
        TraceError, match=rf"tracing failed .*; the model runs on it, but torch.fx cannot follow {place}: {advice}$"
    ):
        sj_tac.plan(made(Unfollowed), k=2, example_input=frames())
    with pytest.raises(TraceError, match=r"ValueError: mine; check that model.eval\(\).*called with tensors$"):
        sj_tac.plan(made(Fails), k=2, example_input=frames())
    with pytest.raises(TraceError, match=r"check that .*\(called, the model raises ValueError: only when called\)$"):
        sj_tac.plan(made(FailsOtherwise), k=2, example_input=frames())
