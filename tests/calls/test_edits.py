"""Forwards that a trace does not see in full: every call gives what the definition gives."""

import pairs
import pytest
import torch
from comparing import Situation, Way, agrees
from forwards import build, spikes_in

pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")


MODES = {"mode": ["preserve", "collapse"], "k": [2, 3, 1]}
FEW = (Way("no_grad"), Way(), Way(train=True))


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
