"""weights: mixed, layer by layer; and that it is what these weights written out are."""

import pytest
import torch
from spikingjelly.activation_based import layer
from support import awake, conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import PolicyError

MIXED = {"default": {"k": 4, "weights": "mixed"}}
X = frames(8, 3, 2, 8, 8)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def block(a, b, kind="lif"):
    return [conv(a, b), norm(b), node(kind)]


def weights_of(net):
    """Of each layer whose policy says mixed, what it got."""
    told = {v.layer: v.detail.partition("mixed weights: ")[2].split()[:1] for v in sj_tac.report(net)}
    return {name: words[0].strip(";,.") for name, words in told.items() if words}


class Around(nn.Module):
    """Two chains and what happens between them."""

    def __init__(self, between, width=4):
        super().__init__()
        self.front, self.back = nn.Sequential(*block(2, 4)), nn.Sequential(*block(width, 4))
        self.pool, self.drop = layer.MaxPool2d(2, 2, step_mode="m"), layer.Dropout(0.2, step_mode="m")
        self.short = conv(2, 4)
        self.between = between

    def forward(self, x):
        return self.back(self.between(self, self.front(x), x))


BETWEEN = {
    "nothing": (lambda net, y, x: y, 4, "uniform"),
    "pool": (lambda net, y, x: net.drop(net.pool(y)), 4, "uniform"),
    "spikes added": (lambda net, y, x: y + net.drop(y), 4, "uniform"),
    "numbers": (lambda net, y, x: 2 * y + 1, 4, "uniform"),
    # Where in doubt, as without it.
    "what nobody knows": (lambda net, y, x: y.cumsum(0), 4, "decay"),
    "the input beside": (lambda net, y, x: torch.cat([y, x], 2), 6, "decay"),
    "another conv's output": (lambda net, y, x: y + net.short(x), 4, "decay"),
}


@pytest.mark.parametrize("between", list(BETWEEN))
def test_what_reads_spikes_counts_them(between):
    function, width, expected = BETWEEN[between]
    net = awake(Around(function, width).eval(), X)
    fast = sj_tac.convert(net, MIXED)
    found = weights_of(fast)
    assert (found["front.0"], found["back.0"]) == ("decay", expected)
    written = {"default": {"k": 4}, "rules": [{"match": "back.0", "weights": expected}]}
    assert torch.equal(fast(X), sj_tac.convert(net, written)(X))


def test_spikes_of_single_drives_come_when_something_happens():
    net = awake(nn.Sequential(*block(2, 4), *block(4, 4), *block(4, 4)).eval(), X)
    assert weights_of(sj_tac.convert(net, MIXED)) == {"0": "decay", "3": "uniform", "6": "uniform"}
    kept = sj_tac.convert(net, MIXED | {"rules": [{"match": "3", "mode": "keep"}]})
    assert weights_of(kept) == {"0": "decay", "6": "decay"}
    single = sj_tac.convert(net, MIXED | {"rules": [{"match": "3", "k": 1}]})
    assert weights_of(single)["6"] == "decay"
    sj_tac.set_k(single, 2, "3")
    assert weights_of(single)["6"] == "uniform"


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*block(2, 4), *block(4, 4))

    def forward(self, image):
        return self.body(image.unsqueeze(0).repeat(8, 1, 1, 1, 1))


class Own(nn.Module):
    def forward(self, x):
        v, out = torch.zeros_like(x[0]), []
        for frame in x:
            v = 0.5 * v + frame
            out.append((v > 1).float())
        return torch.stack(out)


def test_a_refused_chain_and_a_neuron_of_ones_own_share_nothing_and_a_repeated_image_does():
    pooled = nn.Sequential(*block(2, 4)[:2], layer.MaxPool2d(2, 2, step_mode="m"), node("lif"), *block(4, 4))
    fast = sj_tac.convert(awake(pooled.eval(), X), MIXED)
    assert [v.layer for v in sj_tac.report(fast).refused] == ["0"]
    assert weights_of(fast) == {"4": "decay"}
    assert weights_of(sj_tac.convert(awake(Repeated().eval(), X[0]), MIXED))["body.3"] == "uniform"
    own = nn.Sequential(*block(2, 4), Own(), *block(4, 4)).eval()
    assert weights_of(sj_tac.convert(own, MIXED, example_input=X))["4"] == "decay"


def test_an_operator_alone_cannot_know():
    with pytest.raises(PolicyError, match="asks what a layer of a net reads"):
        sj_tac.TACTP(conv(2, 4), norm(4), node("lif"), k=2, weights="mixed")
