"""weights: mixed, layer by layer; and that it is what these weights written out are."""

import pytest
import torch
from spikingjelly.activation_based import layer
from support import awake, conv, frames, node, norm
from torch import nn

import sj_tac

MIXED = {"default": {"k": 4, "weights": "mixed"}}
X = frames(8, 3, 2, 8, 8)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def block(a, b, kind="lif"):
    return [conv(a, b), norm(b), node(kind)]


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
    "spikes added": (lambda net, y, x: y + net.pool(y).repeat_interleave(2, -1).repeat_interleave(2, -2), 4, "uniform"),
    "a constant": (lambda net, y, x: y + torch.ones(4, 8, 8), 4, "uniform"),
    "the input beside": (lambda net, y, x: torch.cat([y, x], 2), 6, "decay"),
    "another conv's output": (lambda net, y, x: y + net.short(x), 4, "decay"),
}


@pytest.mark.parametrize("between", list(BETWEEN))
def test_what_reads_spikes_counts_them(between):
    function, width, expected = BETWEEN[between]
    net = awake(Around(function, width).eval(), X)
    fast = sj_tac.convert(net, MIXED)
    assert fast.front[0]._tac.weights == "decay"
    assert fast.back[0]._tac.weights == expected
    written = {"default": {"k": 4}, "rules": [{"match": "back.0", "weights": expected}]}
    assert torch.equal(fast(X), sj_tac.convert(net, written)(X))


@pytest.mark.parametrize("upstream", [{"mode": "keep"}, {"k": 1}])
def test_spikes_of_single_drives_come_when_something_happens(upstream):
    net = awake(nn.Sequential(*block(2, 4), *block(4, 4), *block(4, 4)).eval(), X)
    fast = sj_tac.convert(net, MIXED | {"rules": [{"match": "3", **upstream}]})
    assert [fast[i]._tac.weights for i in (0, 6)] == ["decay", "decay"]
    assert sj_tac.convert(net, MIXED)[6]._tac.weights == "uniform"


def test_set_k_asks_again():
    net = awake(nn.Sequential(*block(2, 4), *block(4, 4)).eval(), X)
    fast = sj_tac.convert(net, MIXED)
    sj_tac.set_k(fast, 1, "0")
    assert fast[3]._tac.weights == "decay"
    sj_tac.set_k(fast, 2, "0")
    assert fast[3]._tac.weights == "uniform"


def test_rules_and_residual_nets():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Sequential(*block(4, 4)), nn.Sequential(conv(4, 4), norm(4))
            self.last = node("lif")

        def forward(self, x):
            return self.last(self.b(self.a(x)) + x)

    net = nn.Sequential(*block(2, 4), Block(), Block()).eval()
    fast = sj_tac.convert(net, MIXED | {"rules": [{"match": "4.a.0", "weights": "decay"}]})
    weights = {name: module._tac.weights for name, module in fast.named_modules() if isinstance(module, nn.Conv2d)}
    assert weights == {"0": "decay", "3.a.0": "uniform", "3.b.0": "uniform", "4.a.0": "decay", "4.b.0": "uniform"}


def test_a_refused_chain_shares_nothing_and_a_repeated_image_does():
    pooled = nn.Sequential(*block(2, 4)[:2], layer.MaxPool2d(2, 2, step_mode="m"), node("lif"), *block(4, 4))
    fast = sj_tac.convert(awake(pooled.eval(), X), MIXED)
    assert [v.layer for v in sj_tac.report(fast).refused] == ["0"]
    assert fast[4]._tac.weights == "decay"

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*block(2, 4), *block(4, 4))

        def forward(self, image):
            return self.body(image.unsqueeze(0).repeat(8, 1, 1, 1, 1))

    fast = sj_tac.convert(awake(Repeated().eval(), X[0]), MIXED)
    assert fast.body[3]._tac.weights == "uniform"
