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


def test_behind_a_neuron_of_ones_own_frames_are_somebody_elses():
    class Own(nn.Module):
        def forward(self, x):
            v, out = torch.zeros_like(x[0]), []
            for frame in x:
                v = 0.5 * v + frame
                out.append((v > 1).float())
            return torch.stack(out)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.own, self.back = nn.Sequential(*block(2, 4)), Own(), nn.Sequential(*block(4, 4))

        def forward(self, x):
            return self.back(self.own(self.front(x)))

    fast = sj_tac.convert(Net().eval(), MIXED, example_input=X)
    assert fast.back[0]._tac.weights == "decay"


@pytest.mark.parametrize("mode", ["preserve", "collapse"])
def test_a_call_that_goes_another_way_than_the_trace_keeps_the_weights_fused_or_not(mode):
    class Branching(nn.Module):
        """The trace sees spikes in front of the second convolution; a call may hand it frames from outside."""

        def __init__(self):
            super().__init__()
            self.front, self.back, self.skip = nn.Sequential(*block(2, 2)), nn.Sequential(*block(2, 4)), False

        def forward(self, x):
            return self.back(x if self.skip else self.front(x))

    torch.manual_seed(1)
    net = awake(Branching().eval(), X).double()
    outputs = []
    for fuse in (True, False):
        fast = sj_tac.convert(net, MIXED | {"default": {"k": 4, "weights": "mixed", "mode": mode}}, fuse=fuse)
        fast.skip = True
        outputs.append(fast(X.double()))
        assert fast.back[0]._tac.weights == "uniform"
    if mode == "preserve":
        torch.testing.assert_close(*outputs)
    else:
        assert outputs[0].shape == outputs[1].shape


def test_the_report_says_which_and_an_operator_alone_cannot_know():
    net = awake(nn.Sequential(*block(2, 4), *block(4, 4)).eval(), X)
    report = sj_tac.plan(net, MIXED)
    assert "mixed weights: decay" in report["0"].detail
    assert "mixed weights: uniform" in report["3"].detail
    with pytest.raises(PolicyError, match="asks what a layer of a net reads"):
        sj_tac.TACTP(conv(2, 4), norm(4), node("lif"), k=2, weights="mixed")
