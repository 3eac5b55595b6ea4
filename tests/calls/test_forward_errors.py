"""Which forward convert traces, and the error for a forward that it cannot trace."""

import pytest
import torch
from definition import define
from spikingjelly.activation_based import functional
from test_forwards import Assigned, Base, Optional, Plain, Rectified, Wrapped, X, bare, made, settings
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError, SjTacError


def verdicts(net, example=None):
    return [(v.layer, v.status, v.reason, v.detail) for v in sj_tac.plan(net, k=2, example_input=example).verdicts]


@pytest.mark.parametrize("example", [X, None], ids=["sample", "symbols"])
def test_the_forward_of_an_instance_is_what_is_judged(example):
    """Its class has the same without ReLU in front of the neuron."""

    class Instance(Plain):
        def __init__(self):
            super().__init__()
            self.forward = self.rectified

    found = verdicts(made(Instance), example)
    assert found == verdicts(made(Rectified), example)
    assert [(name, status, str(reason)) for name, status, reason, _ in found][1] == ("conv2", "refused", "NOT_AFFINE")
    converted = sj_tac.convert(made(Instance), k=2, example_input=example)
    torch.testing.assert_close(converted(X), define(made(Instance), settings(2, 1))(X), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [Wrapped, Assigned])
def test_restore_gives_the_forward_back(kind):
    net = made(kind)
    before, wanted = dict(vars(net)), net(X)
    functional.reset_net(net)
    sj_tac.convert(net, k=2, example_input=X, inplace=True)
    assert type(net) is kind
    sj_tac.restore(net, inplace=True)
    functional.reset_net(net)
    assert vars(net).get("forward") == before.get("forward")
    assert vars(net).keys() == before.keys()
    assert torch.equal(net(X), wanted)


class Needs(Base):
    @torch.no_grad()
    def forward(self, x, *, gain):
        return self.run(x * gain)


class Fails(Base):
    def forward(self, x):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("kind", "example", "message"),
    [
        (Needs, X, r"Needs does not take example_input.*'gain'.*give the others a default"),
        (Optional, (), "missing a required argument: 'x'"),
        (Optional, {"x": X}, "example_input of shape .*TypeError: .*'dict'"),
        (Plain, [X] * 5, "too many positional arguments"),
        (Plain, torch.ones(()), r"does not run on example_input of shape \[\[\]\]"),
        (Plain, (X.numpy(),), r"NumPy array for 'x'.*: give torch.from_numpy of it"),
        (Fails, X, "ValueError: mine"),
    ],
)
def test_what_cannot_be_traced_says_why(kind, example, message):
    with pytest.raises(SjTacError, match=message):
        sj_tac.convert(made(kind), k=2, example_input=example)


def with_an_empty_cell(net):
    """A forward whose closure holds a name without a value before the net's."""

    def forward(x):
        return net.run(x if net.training is not None else absent)

    if net is None:
        absent = None
    return forward


@pytest.mark.parametrize(
    "make",
    [lambda net: bare(net.run), lambda net: lambda x: net.run(x), with_an_empty_cell],
    ids=["decorated", "lambda", "empty cell"],
)
def test_a_forward_that_a_copy_shares_with_its_source(make):
    """It would run the source's modules, whatever becomes of the copy's."""
    net = made(Plain)
    net.forward = make(net)
    assert len(sj_tac.plan(net, k=2, example_input=X).converted) == 2
    with pytest.raises(ConversionError, match="inplace=True"):
        sj_tac.convert(net, k=2, example_input=X)
    sj_tac.convert(net, k=2, example_input=X, inplace=True)
    torch.testing.assert_close(net(X), define(made(Plain), settings(2, 1, 2))(X), rtol=0, atol=1e-9)


def test_another_model_that_a_forward_asks_is_no_part_of_it():
    net, teacher = made(Plain), made(Plain)
    net.forward = lambda x: net.run(x) + 0 * teacher.conv1.weight.sum()
    sj_tac.convert(net, k=2, example_input=X, inplace=True)
    assert len(sj_tac.report(net).converted) == 2


@pytest.mark.exhaustive
# torch asks a tensor for a gradient that it then warns about.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_what_torch_compile_made_of_forward_is_looked_into():
    kind = type("Compiled", (Base,), {"forward": torch.compile(Plain.forward, backend="eager")})
    assert verdicts(made(kind), X) == verdicts(made(Plain), X)


def test_deep_nets_are_followed():
    net = made(Plain)
    for _ in range(200):
        net = nn.Sequential(nn.Identity(), net)
    assert len(sj_tac.report(sj_tac.convert(net, k=2, example_input=X, inplace=True)).converted) == 2
