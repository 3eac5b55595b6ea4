"""What a user may do to a net between two calls: a captured net at k = 1 gives what its source gives, untouched, does."""

import copy
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from captured import graphs
from defined import given, same
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import awake, conv, frames, node, norm, only_v2
from torch import nn
from torch.nn.utils import parametrizations, prune

import sj_tac
from sj_tac.errors import CaptureWarning

pytestmark = [only_v2, pytest.mark.captured]
X, Y = (frames(6, 2, 2, 8, 8, dtype=torch.float64, seed=seed) for seed in (3, 4))
FACTOR = 1.0


def block(i, o):
    return nn.Sequential(conv(i, o, padding=1), norm(o), node("lif"))


class Net(nn.Module):
    """Three blocks, and a flag, a factor and a list that forward reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = block(2, 6), block(6, 6), block(6, 6)
        self.flag, self.scale, self.factors, self.calls = False, 1.0, [1.0], 0

    def forward(self, x):
        x = self.b(self.a(x)) * self.scale
        if self.flag:
            x = x * 0.5
        return self.c(x * self.factors[0] * FACTOR * float(os.environ.get("SJ_TAC_FACTOR", "1")))


def made():
    torch.manual_seed(0)
    return awake(Net().double().eval(), X)


def half(module, args, *output):
    return output[0] * 0.5 if output else (args[0] * 0.5,)


def hook(path, kind="register_forward_hook", function=half):
    return lambda net: getattr(net.get_submodule(path), kind)(function)


def swapped(net):
    net.b, net.c = net.c, net.b


def other_block(net):
    torch.manual_seed(7)
    net.b[0], net.b[1] = conv(6, 6, padding=1).double(), norm(6).double().eval()


def rebuilt(net):
    torch.manual_seed(7)
    net.b = awake(block(6, 6).double().eval(), net.a(X))
    functional.reset_net(net)


def doubled(module, name="weight"):
    getattr(module, name).data.mul_(2)


def with_numbers(**values):
    def change(net):
        for name, value in values.items():
            setattr(net.b[2], name, value)

    return change


def loaded(net):
    net.load_state_dict({name: x * 1.3 if x.is_floating_point() else x for name, x in net.state_dict().items()})


def trained(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    net.train()
    for x in (X, Y):
        functional.reset_net(net)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()


def patched(net):
    net.b[1].forward = lambda x: x * 2


def in_mode(mode):
    def change(net):
        with mode():
            functional.reset_net(net)
            net(Y)

    return change


CHANGES = {
    "hook on a convolution": hook("b.0"),
    "hook on a neuron": hook("b.2"),
    "hook on a block": hook("b"),
    "hook on the net": hook(""),
    "pre-hook on a convolution": hook("b.0", "register_forward_pre_hook"),
    "pre-hook on the net": hook("", "register_forward_pre_hook"),
    "hook that changes nothing": hook("b", function=lambda m, a, o: None),
    "hook added and removed": lambda net: hook("b")(net).remove(),
    "blocks exchanged": swapped,
    "layers replaced": other_block,
    "a block replaced": rebuilt,
    "a layer cut out": lambda net: net.b.__delitem__(1),
    "a layer put in": lambda net: net.b.insert(2, nn.Identity()),
    "weights": lambda net: doubled(net.b[0]),
    "weight.data": lambda net: setattr(net.b[0].weight, "data", net.b[0].weight.data * 2),
    "a new parameter": lambda net: setattr(net.b[0], "weight", nn.Parameter(net.b[0].weight.detach() * 2)),
    "tied weights": lambda net: setattr(net.c[0], "weight", net.b[0].weight),
    "pruned": lambda net: prune.l1_unstructured(net.b[0], "weight", 0.5),
    "weight_norm": lambda net: parametrizations.weight_norm(net.b[0]),
    "a checkpoint": loaded,
    "trained": trained,
    "a frozen layer": lambda net: net.b.requires_grad_(False),
    "running_mean": lambda net: doubled(net.b[1], "running_mean"),
    "eps": lambda net: setattr(net.b[1], "eps", 0.3),
    "one norm in training mode": lambda net: net.b[1].train(),
    "training mode": lambda net: net.train(),
    "tau": with_numbers(tau=3.5),
    "threshold": with_numbers(v_threshold=0.3),
    "soft reset": with_numbers(v_reset=None),
    "reset voltage": with_numbers(v_reset=-0.5),
    "no decay of inputs": with_numbers(decay_input=False),
    "detached reset": with_numbers(detach_reset=True),
    "another surrogate": with_numbers(surrogate_function=surrogate.Sigmoid()),
    "another alpha": with_numbers(surrogate_function=surrogate.ATan(alpha=5.0)),
    "voltages kept": with_numbers(store_v_seq=True),
    "a voltage": lambda net: setattr(net.b[2], "v", torch.full((2, 6, 8, 8), 0.4).double()),
    "a neuron of another class": lambda net: net.b.__setitem__(2, neuron.IFNode(v_threshold=0.7, step_mode="m")),
    "a flag": lambda net: setattr(net, "flag", True),
    "a factor": lambda net: setattr(net, "scale", 0.25),
    "a list": lambda net: net.factors.__setitem__(0, 0.25),
    "an instance's forward": patched,
    "inference mode": in_mode(torch.inference_mode),
    "no_grad": in_mode(torch.no_grad),
    "gradients": in_mode(torch.enable_grad),
    "channels_last": lambda net: net.to(memory_format=torch.channels_last),
    "a copy": copy.copy,
}


def check(of, x, training=True):
    """The net is handed ``x`` itself, whose strides a copy would not have."""
    found, expected = (given(net, x.detach(), training, lambda _, net=net: net(x), reset=False) for net in of)
    same(found, expected, rtol=1e-8, atol=1e-8)
    return expected["output 0"]


@pytest.fixture
def both():
    source = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield sj_tac.convert(source, "preserve", 1, example_input=X), source


# Three captures each.
SOME = [name if i % 2 else pytest.param(name, marks=pytest.mark.exhaustive) for i, name in enumerate(CHANGES)]


@pytest.mark.parametrize("what", SOME)
def test_a_change_between_two_calls(both, what):
    training = what not in ("inference mode", "a voltage")
    check(both, X, training)
    for net in both:
        CHANGES[what](net)
        if what != "a voltage":
            functional.reset_net(net)
    check(both, Y, training)
    assert check(both, X, training).mean() > 0.005, "carried on, and awake"


def test_what_forward_reads_outside_of_the_net(both, monkeypatch):
    check(both, X)
    for change in (
        lambda: monkeypatch.setitem(globals(), "FACTOR", 0.5),
        lambda: monkeypatch.setenv("SJ_TAC_FACTOR", "0.5"),
        lambda: monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda self, x, w, b: F.conv2d(x, w * 2, b, padding=1)),
        lambda: monkeypatch.setattr(layer.BatchNorm2d, "forward", lambda self, x: x * 2),
        monkeypatch.undo,
    ):
        change()
        for net in both:
            functional.reset_net(net)
        check(both, X)


GIVEN = [
    X[::2], X[:1], X[:, :1], X.transpose(3, 4), X.flip(0), X[:1].expand(6, -1, -1, -1, -1), X[:, :, :, 1:, 1:],
    frames(12, 2, 2, 8, 8, dtype=torch.float64)[::2], X.clone().requires_grad_(), nn.Parameter(X.clone()),
    X.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3),
]  # fmt: skip
# A capture each, or two.
ODD = [x if i % 2 else pytest.param(x, marks=pytest.mark.exhaustive) for i, x in enumerate(GIVEN)]


@pytest.mark.parametrize("given", ODD, ids=range(11))
def test_inputs_of_other_shapes_and_layouts(both, given):
    check(both, X)
    for net in both:
        functional.reset_net(net)
    check(both, given)
    check(both, given)


def test_an_output_may_be_written_into(both):
    for net in both:
        with torch.no_grad():
            net(X).zero_()
    check(both, Y)


def test_watchers_of_a_call_are_served_by_the_definition(both):
    fast, source = both

    class Watched(torch.Tensor):
        pass

    handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: o * 0.9 if isinstance(m, layer.Conv2d) else None)
    check(both, X)
    handle.remove()
    for net in both:
        functional.reset_net(net)
    number = len(graphs(fast))
    with torch.no_grad():
        torch.testing.assert_close(fast(X.as_subclass(Watched)).as_subclass(torch.Tensor), source(X))
    assert len(graphs(fast)) == number


def test_hooks_on_gradients_see_those_of_the_definition(both):
    kept = []
    for net in both:
        net.b.register_full_backward_hook(lambda m, into, outof: kept.append(outof[0].clone()))
        net.c[0].register_full_backward_pre_hook(lambda m, outof: (outof[0] * 3,))
    check(both, X)
    torch.testing.assert_close(*kept)
