"""Forwards of ordinary user code against the definition: other T, branches that were not traced, writes in place."""

import pytest
import torch
from comparing import POLICIES, WAYS, Situation, agrees, agrees_at_one
from forwards import FORWARDS, build, spikes_in

# A way that was not planned is told of once.
pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")


def situation(name):
    steps, needs = FORWARDS[name]
    x = needs.get("x", spikes_in)()

    def edit(net):
        net.flag = needs.get("flag", False)

    ways = tuple(w for w in WAYS if w.grad in needs.get("grads", ("grad", "input", "no_grad", "inference")))
    return Situation(build(steps), x, edit=edit, ways=ways)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize(("mode", "k"), POLICIES)
def test_a_forward(name, mode, k):
    if mode in FORWARDS[name][1].get("modes", ("preserve", "collapse")):
        agrees(situation(name), mode, k)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_at_one(name):
    agrees_at_one(situation(name))


@pytest.mark.parametrize("k", [2, 3])
def test_a_binary_collapse(k):
    agrees(situation("plain"), "collapse", k, spikes="binary")


def test_the_nets_fire():
    net = build()
    rates = []
    for block in (net.a, net.b, net.c, net.d):
        block[2].register_forward_hook(lambda m, a, o: rates.append(o.mean().item()))
    with torch.no_grad():
        net(spikes_in())
    assert len(rates) == 4
    assert all(0.05 <= rate <= 0.5 for rate in rates)
