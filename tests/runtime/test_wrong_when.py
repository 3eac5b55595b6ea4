"""Forwards of ordinary user code against the definition: other T, branches that were not traced, writes in place."""

import pytest
from comparing import POLICIES, WAYS, Situation, agrees, agrees_at_one
from forwards import FORWARDS, build, spikes_in

# A way that was not planned is told of once.
pytestmark = pytest.mark.filterwarnings("ignore:.*was planned")


def rows():
    """Each forward with every policy: in the quick suite with one of each mode."""
    for i, name in enumerate(FORWARDS):
        for j, (mode, k) in enumerate(POLICIES):
            yield pytest.param(name, mode, k, marks=[pytest.mark.exhaustive] * ((i + j) % 2))


def situation(name):
    steps, needs = FORWARDS[name]
    x = needs.get("x", spikes_in)()

    def edit(net):
        net.flag = needs.get("flag", False)

    ways = tuple(w for w in WAYS if w.grad in needs.get("grads", ("grad", "input", "no_grad", "inference")))
    return Situation(build(steps), x, edit=edit, ways=ways)


@pytest.mark.parametrize(("name", "mode", "k"), list(rows()))
def test_a_forward_gives_what_the_definition_gives(name, mode, k):
    agrees(situation(name), mode, k)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (i % 4 > 0)) for i, n in enumerate(FORWARDS)]
)
def test_a_forward_at_k_1_gives_what_the_source_gives(name):
    agrees_at_one(situation(name))


def test_a_binary_collapse():
    agrees(situation("plain"), "collapse", 3, spikes="binary")
