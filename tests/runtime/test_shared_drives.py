"""Convolutions on drives that others share: no neuron in between, and groups of another size."""

from itertools import product

import pytest
import torch
from spikingjelly.activation_based import functional
from support import awake, conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.runtime.borders import definition


def block():
    return nn.Sequential(conv(3, 3), norm(3), node("lif", v_threshold=0.4))


class Membranes(nn.Module):
    """Two drives, each shared by steps of its own, are added or concatenated before the next convolution."""

    def __init__(self, joins):
        super().__init__()
        self.joins = joins
        self.first, self.between = block(), node("lif")
        self.a, self.b = nn.Sequential(conv(3, 3), norm(3)), nn.Sequential(conv(3, 3), norm(3))
        self.joined, self.last = nn.Sequential(conv(6 if joins == "cat" else 3, 3), *block()[1:]), block()

    def forward(self, x):
        a = self.a(self.first(x))
        b = self.b(self.between(a))
        if self.joins == "add":
            y = a + b
        elif self.joins == "add in place":
            y = a.clone()
            y += b
        else:
            y = torch.cat([a, b], 2)
        return self.last(self.joined(y))


def run(net, x):
    """The output, and the gradient to the first convolution."""
    functional.reset_net(net)
    net.zero_grad()
    with torch.no_grad():
        out = net(x)
    functional.reset_net(net)
    recorded = net(x)
    (recorded * torch.linspace(-1.0, 1.0, recorded.numel(), dtype=x.dtype).view_as(recorded)).sum().backward()
    assert torch.equal(recorded.detach(), out)
    functional.reset_net(net)
    return out, net.first[0].weight.grad.clone()


@pytest.mark.parametrize("joins", ["add", "add in place", "cat"])
@pytest.mark.parametrize("front", [("collapse", "count", 2), ("collapse", "binary", 4), ("preserve", "count", 2)], ids=str)
def test_fused_is_the_definition(joins, front):
    torch.manual_seed(3)
    x = frames(11, 2, 3, 4, 4, dtype=torch.float64, seed=2)
    net = awake(Membranes(joins).double().eval(), x)
    mode, spikes, k = front
    for a, b, (then, of, size) in product(
        (2, 4, 8), (4, 3), (("collapse", "count", 1), ("collapse", "binary", 2), ("preserve", "count", 4))
    ):
        rules = [
            {"match": "first*", "mode": mode, "spikes": spikes, "k": k},
            {"match": "a*", "k": a},
            {"match": "b*", "k": b},
            {"match": "joined*", "mode": then, "spikes": of, "k": size},
        ]
        policy = {"version": 1, "default": {"mode": "preserve", "k": 1}, "rules": rules}
        fast = sj_tac.convert(net, policy, example_input=x)
        found = run(fast, x)
        with definition(fast):
            expected = run(fast, x)
        assert 0 < expected[0].mean() < 0.9
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
