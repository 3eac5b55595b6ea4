"""Calls of a net and of its parts after convert: the result is that of the definition. Edits: test_programs.py."""

import pairs
import pytest
from comparing import Situation, Way, agrees, agrees_at_one
from forwards import build, spikes_in, straight
from spikingjelly.activation_based import functional
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")


# Whether the input's gradient is asked for, and inference mode, hang on nothing that was edited.
FEW = (Way(), Way(train=True), Way("no_grad"))
MODES = {"mode": ["preserve", "collapse"], "k": [2, 3]}


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
