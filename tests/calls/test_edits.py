"""Edits after convert, and forwards that a trace does not see in full: every call gives what the definition gives."""

import pairs
import pytest
import torch
from comparing import Situation, Way, agrees
from forwards import C, build, spikes_in
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, norm
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")


def put(i, make):
    return lambda net: net.b.__setitem__(i, make().double().train(net.training))


def other_tau(net):
    net.b[2].tau, net.b[2].v_threshold = 3.0, 0.75 * net.b[2].v_threshold


def other_order(net):
    other_tau(net)  # or both would sum frames alike
    net.b, net.c = net.c, net.b


EDITS = {
    "new neuron": put(2, lambda: neuron.IFNode(v_threshold=0.7, v_reset=None, step_mode="m")),
    "new norm": put(1, lambda: norm(C)),
    "new conv": put(0, lambda: conv(C, C)),
    "no neuron": put(2, nn.Identity),
    "no conv": put(0, nn.Identity),
    "no norm": put(1, nn.Identity),
    "no block": lambda net: setattr(net, "b", nn.Identity()),
    "a pool of means": lambda net: net.d.__setitem__(3, layer.AvgPool2d(2, step_mode="m")),
    "another block's neuron": lambda net: net.c.__setitem__(2, net.b[2]),
    "another order": other_order,
    "dropout": lambda net: net.c.insert(0, layer.Dropout(0.3, step_mode="m")),
    "freeze": lambda net: net.b.requires_grad_(False),
    "another tau": other_tau,
}


def seeded(edit):
    """The same on every net."""

    def change(net):
        torch.manual_seed(7)
        edit(net)

    return change


def calls(net, x):
    """One call, another without a reset, and one of other T and N."""
    first = net(x), net(x[:5])
    functional.reset_net(net)
    return *first, net(x[:4, :1])


MODES = {"mode": ["preserve", "collapse"], "k": [2, 3, 1]}
FEW = (Way("no_grad"), Way(), Way(train=True))


@pairs.parametrize(edit=EDITS, **MODES)
def test_an_edit(edit, mode, k):
    # Where a collapse begins is planned once: a new module there knows nothing of it.
    mode = "preserve" if edit in ("new neuron", "a pool of means") else mode
    agrees(Situation(build(), spikes_in(), call=calls, edit=seeded(EDITS[edit]), ways=FEW), mode, k)


def rest(n, x):
    return n.head(n.d(n.c(x)))


def written_later(n, x):
    first = n.a(x)
    added = n.b(first) + first
    first.add_(0.25)
    return rest(n, added)


def joined(n, x):
    y = n.a(x)
    z = n.b(y)
    y = torch.cat([torch.stack([y, z]).mean(0), y[::2]])
    return rest(n, y[1:])


def given_out(n, x):
    y = n.b(n.a(x))
    out = rest(n, y)
    return (out, y.mean((1, 3))) if hasattr(n, "features") else out


# Some of these were wrong once, in silence.
FORWARDS = {
    "the same layers with T and 5": lambda n, x: rest(n, torch.cat([n.b(n.a(x)), n.b(n.a(x)[:5])])),
    "a summand that is written later": written_later,
    "cat, stack, slices": joined,
    "a branch that was not traced": lambda n, x: rest(n, n.b(n.a(x)) if n.training else n.a(x) * 0.5),
    "the last frames alone": lambda n, x: rest(n, n.b(n.a(x)[-2:])),
    "means of two frames": lambda n, x: rest(n, n.b(torch.stack([n.a(x)[:-1], n.a(x)[1:]]).mean(0))),
    "features, asked for later": given_out,
}


@pairs.parametrize(forward=FORWARDS, **MODES)
def test_a_forward(forward, mode, k):
    # What is called twice begins no collapse.
    mode = "preserve" if forward in ("the same layers with T and 5", "means of two frames") else mode
    # torch itself objects to a summand that is written where it has a gradient.
    ways = FEW[:1] if "written" in forward else FEW
    agrees(
        Situation(build(FORWARDS[forward]), spikes_in(), edit=lambda net: setattr(net, "features", True), ways=ways), mode, k
    )
