"""Edits and calls from outside after convert: the result is that of the definition with the same edit."""

import pairs
import pytest
import torch
from comparing import Situation, Way, agrees, agrees_at_one
from forwards import C, build, spikes_in, straight
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")


def made(*modules):
    """A new part, the same at every call, in the nets' dtype and step mode."""
    torch.manual_seed(2)
    part = modules[0]() if len(modules) == 1 else nn.Sequential(*(m() for m in modules))
    functional.set_step_mode(part, "m")
    return part.double().eval()


def new_conv():
    return layer.Conv2d(C, C, 3, padding=1)


def new_norm():
    norm = layer.BatchNorm2d(C)
    nn.init.constant_(norm.weight, 2.0)
    norm.running_mean.fill_(-0.3)
    return norm


def new_if():
    return neuron.IFNode(v_threshold=1.5, surrogate_function=surrogate.ATan(), detach_reset=True)


def put(path, part):
    def edit(net):
        parent, _, name = path.rpartition(".")
        setattr(net.get_submodule(parent), name, made(part))

    return edit


def freeze(net):
    net.b.requires_grad_(False)


def other_tau(net):
    net.c[2].tau = 3.5
    net.c[2].v_threshold *= 0.8


def swapped_blocks(net):
    net.b, net.c = net.c, net.b


def shared_neuron(net):
    net.c[2] = net.b[2]


EDITS = {
    "another norm": put("b.1", new_norm),
    "another neuron": put("b.2", new_if),
    "another conv": put("c.0", new_conv),
    "no norm": put("b.1", nn.Identity),
    "no neuron": put("b.2", nn.Identity),
    "no conv": put("c.0", nn.Identity),
    "an average pool for a MaxPool": put("d.3", lambda: layer.AvgPool2d(2, 2)),
    "no block": put("c", nn.Identity),
    "blocks in another order": swapped_blocks,
    "frozen": freeze,
    "another tau": other_tau,
}


# Whether the input's gradient is asked for, and inference mode, hang on nothing that was edited.
FEW = (Way(), Way(train=True), Way("no_grad"))
MODES = {"mode": ["preserve", "collapse"], "k": [2, 3]}


@pairs.parametrize(name=EDITS, **MODES)
def test_an_edit(name, mode, k):
    agrees(Situation(build(), spikes_in(), edit=EDITS[name], ways=FEW), mode, k)


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_at_one(name):
    agrees_at_one(Situation(build(), spikes_in(), edit=EDITS[name], ways=FEW))


@pytest.mark.parametrize("mode", ["preserve", "collapse"])
def test_one_neuron_at_two_places(mode):
    """The neuron of another block once more: it goes on from the voltage that its first call left."""
    agrees(Situation(build(), spikes_in(), edit=shared_neuron), mode, 2)


CALLS = {
    "two blocks": lambda net, x: nn.Sequential(*net.a, *net.b)(x) * 1,
    "conv and norm": lambda net, x: nn.Sequential(*net.a[:2])(x) * 1,
    "a conv": lambda net, x: net.a[0](x),
    "norm and neuron": lambda net, x: net.b[2](net.b[1](net.a(x).mul(3.0))),
    "a conv skipped": lambda net, x: net.head(net.d(net.c[2](net.c[1](net.b(net.a(x)))))),
    "the first frames of a drive": lambda net, x: net.a[2](net.a[1](net.a[0](x))[:4]),
    "block after block": lambda net, x: straight(net, x),
    "a call, then a part": lambda net, x: (net(x), net.a(x[:5]).mean((1, 3, 4))),
    "two calls": lambda net, x: (net(x[:4]), net(x[4:])),
    "two calls of other T": lambda net, x: (net(x), net(x[:3]), net(x[:1])),
    "other N": lambda net, x: (net(x), functional.reset_net(net), net(x[:, :1])),
}


@pairs.parametrize(name=CALLS, **MODES)
def test_a_call(name, mode, k):
    agrees(Situation(build(), spikes_in(), call=CALLS[name], ways=FEW), mode, k)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_at_one(name):
    agrees_at_one(Situation(build(), spikes_in(), call=CALLS[name], ways=FEW))
