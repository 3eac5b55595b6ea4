"""Forwards in every form that models give them: each converts as the same net with a plain forward does."""

import dataclasses
import functools
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from definition import Setting, define
from spikingjelly.activation_based import functional, layer, neuron
from torch import nn

import sj_tac

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch would rather have it compiled: published nets have it scripted

    @torch.jit.script
    def scaled(x: torch.Tensor, factor: float = 0.5) -> torch.Tensor:
        return x * factor


@dataclasses.dataclass
class Out:
    last: Any
    features: Any


def lif():
    node = neuron.LIFNode(v_threshold=0.15, step_mode="m")
    return node.train()  # the older host differentiates no neuron in eval mode


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.lif1 = layer.Conv2d(2, 8, 3, padding=1), layer.BatchNorm2d(8), lif()
        self.conv2, self.bn2, self.lif2 = layer.Conv2d(8, 8, 3, padding=1), layer.BatchNorm2d(8), lif()
        functional.set_step_mode(self, "m")

    def spikes(self, x):
        return self.lif1(self.bn1(self.conv1(x)))

    def drive(self, x):
        return self.bn2(self.conv2(self.spikes(x)))

    def run(self, x, scale=1.0):
        return self.lif2(self.drive(x)) * scale

    def rectified(self, x):
        return self.lif2(torch.relu(self.drive(x)))


class Plain(Base):
    def forward(self, x):
        return self.run(x)


class Rectified(Base):
    def forward(self, x):
        return self.rectified(x)


# ---- what stands around a forward ------------------------------------------------------------------------------------


def wrapped(forward):
    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return call


def bare(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs)


class NoGrad(Base):
    @torch.no_grad()
    def forward(self, x, *, scale=1.0):
        return self.run(x, scale)


class Wrapped(Base):
    @wrapped
    def forward(self, x, *rest, scale: float = 1.0, **more):
        return self.run(x, *rest, **more) * scale


class Bare(Base):
    @bare
    def forward(self, x):
        return self.run(x)


class Property(Base):
    @property
    def forward(self):
        return self.run


class Assigned(Base):
    def __init__(self):
        super().__init__()
        self.forward = functools.partial(self.run, scale=1.0)


AROUND = {kind.__name__: kind for kind in (NoGrad, Wrapped, Bare, Property, Assigned)}

# ---- what a forward does with its values -----------------------------------------------------------------------------


def between(ask):
    """A class whose forward does something to the spikes between its two chains."""

    def forward(self, x):
        return self.lif2(self.bn2(self.conv2(ask(self, self.spikes(x)))))

    return type("Between", (Base,), {"forward": forward})


def before_the_neuron(change):
    """A class whose forward does something to its second drive."""
    return type("Before", (Base,), {"forward": lambda self, x: self.lif2(change(self.drive(x)))})


def _formatted(net, x):
    net.text = f"{x.mean():.3f} " + f"{x.max():.2f}"
    assert 1.0 in x[0] or 0.0 in x[0]
    return x


def _asserted(net, x):
    assert isinstance(x, (list, torch.Tensor))
    assert not isinstance(x, (list, tuple))
    assert torch.is_tensor(x)
    return x


def _by_values(net, x):
    """What symbols cannot decide: shapes, loops over them, unpacking, a test of the data."""
    t, n = x.shape[:2]
    assert len(x) == t
    for _ in range(int(t) % 2 + 1):
        x = x + 0
    first, *rest = torch.split(x, [1, t - 1])
    return torch.cat([first, *rest]).reshape(t, n, *x.shape[2:]) if float(x.detach().mean()) >= 0 else -x


ASKS = {
    "formats": between(_formatted),
    "asserts": between(_asserted),
    "branches": between(lambda net, x: x * 0.5 if isinstance(x, torch.Tensor) else x[0]),
    "asks for parameters": between(lambda net, x: x * 0.5 if isinstance(net.conv1.weight, nn.Parameter) else x),
    "scripted": between(lambda net, x: scaled(x, factor=0.7)),
    "branches by values": between(_by_values),
    "a number of NumPy in front": between(lambda net, x: np.float32(1.5) * x),
    "a number of NumPy behind": between(lambda net, x: x * np.int64(2)),
    "other names in place": before_the_neuron(lambda x: x.multiply_(1.5).divide_(1.2).true_divide_(0.9).subtract_(0.01)),
}

# ---- what a forward takes and gives ----------------------------------------------------------------------------------


class OfRecords(Base):
    def forward(self, batch):
        y = self.spikes(batch.frames)
        return Out(self.lif2(self.bn2(self.conv2(y))), features=[y])


class Mapped(nn.Module):
    """A module on every step by vmap; time is behind all else."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.vmap(self.inner, -1, -1)(x.movedim(0, -1)).movedim(-1, 0)


class OfVmap(Base):
    def __init__(self):
        super().__init__()
        self.mapped = Mapped(nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x):
        return self.lif2(self.bn2(self.conv2(self.mapped(self.spikes(x)))))


class OfDict(Base):
    def forward(self, batch):
        assert isinstance(batch, dict)
        return self.run({key: value for key, value in batch.items()}["x"] * batch.get("scale", 1))


class OfList(Base):
    def forward(self, items):
        return SimpleNamespace(last=self.run(torch.stack([*items]) if len(items) > 2 else items[0]), features=[])


class Optional(Base):
    @wrapped
    def forward(self, x, gain=None, times: int = 1, *rest):
        for _ in range(times):
            x = x * 1.0
        return self.run(x if gain is None else x * gain) * (1 + sum(rest))


def frames(steps=6):
    torch.manual_seed(3)
    return (torch.rand(steps, 2, 2, 8, 8) < 0.4).double()


X = frames()
ONE = torch.ones(())
TAKES = {
    "frames for vmap": (OfVmap, (X,)),
    "a record": (OfRecords, (SimpleNamespace(frames=X),)),
    "a dict": (OfDict, ({"x": X, "scale": 2.0},)),
    "a list of two": (OfList, ([X, X],)),
    "a list of frames": (OfList, ([*X],)),
    "None": (Optional, (X, None, 2)),
    "more than it names": (Optional, (X, ONE, 2, ONE, torch.zeros(()), 3)),
}
FORMS = {name: (kind, (X,)) for name, kind in (AROUND | ASKS).items()} | TAKES


def made(kind):
    torch.manual_seed(1)
    return kind().double()


def settings(k, *names):
    return {f"conv{i}": Setting("preserve", k, f"lif{i}") for i in names}


def called(net, given):
    """Tensors that a net gives, and gradients of its parameters by name."""
    out = net(*given)
    found = [out] if isinstance(out, torch.Tensor) else [out.last, *out.features]
    assert all(type(x) is torch.Tensor for x in found)
    if found[0].requires_grad:
        (found[0] * torch.linspace(-1, 1, found[0].numel(), dtype=torch.float64).view_as(found[0])).sum().backward()
    return [x.detach() for x in found], {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("form", FORMS)
def test_it_computes_what_its_definition_does(form):
    kind, given = FORMS[form]
    converted = sj_tac.convert(made(kind), k=2, example_input=given)
    assert [v.layer for v in sj_tac.report(converted).converted] == ["conv1", "conv2"]
    found, gradients = called(converted, given)
    expected, wanted = called(define(made(kind), settings(2, 1, 2)), given)
    assert 0.05 < (expected[0] > 0).double().mean() < 0.6
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert (len(wanted) > 0) == (kind is not NoGrad)
    torch.testing.assert_close(gradients, wanted, rtol=1e-7, atol=1e-9)


def folded(self, x, scale=1.0):
    for conv, norm, node in ((self.conv1, self.bn1, self.lif1), (self.conv2, self.bn2, self.lif2)):
        x = node(norm(conv(x.flatten(0, 1))).unflatten(0, (x.shape[0], x.shape[1])))
    return x * scale


@pytest.mark.parametrize("kind", [Wrapped, Bare, Property])
def test_a_folded_net_knows_where_time_is_in_whatever_form(kind):
    def of(kind):
        net = made(type(kind.__name__, (kind,), {"run": folded}))
        for i, inputs in ((1, 2), (2, 8)):
            setattr(net, f"conv{i}", nn.Conv2d(inputs, 8, 3, padding=1).double())
            setattr(net, f"bn{i}", nn.BatchNorm2d(8).double())
        return net

    mine, plain = (sj_tac.convert(of(c), k=2, example_input=X) for c in (kind, Plain))
    assert len(sj_tac.report(mine).converted) == 2
    for steps in (6, 5):
        torch.testing.assert_close(mine(frames(steps)), plain(frames(steps)), rtol=0, atol=1e-9)
        functional.reset_net(mine)
        functional.reset_net(plain)
    if kind is not Bare:  # which names nothing
        torch.testing.assert_close(mine(x=X), plain(x=X), rtol=0, atol=1e-9)


def test_a_scripted_drive_is_measured_and_a_division_that_rounds_is_refused():
    assert not sj_tac.plan(made(before_the_neuron(scaled)), k=2, example_input=X).refused
    rounds = made(before_the_neuron(lambda x: torch.divide(x, 0.5, rounding_mode="floor")))
    assert [v.layer for v in sj_tac.plan(rounds, k=2, example_input=X).refused] == ["conv2"]


def test_a_voltage_that_a_forward_writes():
    class Started(Base):
        def forward(self, x):
            y = self.bn1(self.conv1(x))
            self.lif1.v = torch.full_like(y[0], 0.1)
            y = self.lif1(y)
            self.rates = [float(y.detach().mean())]
            return self.lif2(self.bn2(self.conv2(y)))

    converted = sj_tac.convert(made(Started), k=2, example_input=X)
    assert len(sj_tac.report(converted).converted) == 2
    torch.testing.assert_close(converted(X), define(made(Started), settings(2, 1, 2))(X), rtol=0, atol=1e-9)
