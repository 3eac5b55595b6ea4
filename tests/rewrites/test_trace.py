"""Tracing: control flow on shapes and values beside a real sample, and a model that is as before afterwards."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from rewrites.trace import trace


class Branching(nn.Module):
    """Everything that symbols cannot decide: shapes, loops over them, unpacking, a test of the data, an option."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))
        self.left, self.right = conv(3, 3), conv(3, 3)
        self.node = node("lif", v_threshold=0.3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x, flip=False):
        t, n = x.shape[:2]
        assert len(x) == t
        if x.sum() < 0 or flip:
            x = -x
        y = self.stem(x) * self.scale + self.offset
        for _ in range(int(t) % 2 + 1):
            y = y + 0
        side = self.left if float(y.mean()) >= 0 else self.right
        first, *rest = torch.split(side(y), [1, t - 1])
        return self.node(torch.cat([first, *rest])).reshape(t, n, -1)


def test_values_decide_what_symbols_cannot():
    net, x = Branching().eval(), frames(5, 2, 2, 6, 6)
    report = sj_tac.plan(net, example_input=x)
    assert [(v.layer, v.status, v.reason) for v in report.verdicts] == [
        ("stem.0", "converted", None),
        ("left", "refused", "NOT_LINEAR"),
        ("right", "refused", "NEVER_CALLED"),
    ]
    fast = sj_tac.convert(net, "preserve", 1, example_input=x)
    with torch.no_grad():
        assert torch.equal(fast(x), net(x))


def test_tracing_leaves_state_mode_hooks_and_random_numbers_alone():
    net, x = Branching().train(), frames(5, 2, 2, 6, 6)
    with torch.no_grad():
        net(x)
    net.stem[1].eval()
    voltage, values = net.node.v, net.node.v.clone()
    statistics = net.stem[1].running_mean.clone()
    handle = net.stem.register_forward_hook(lambda m, a, out: pytest.fail("the user's hook ran"))
    random = torch.get_rng_state()
    attributes = [sorted(vars(m)) for m in net.modules()]
    trace(net, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert net.node.v is voltage
    assert torch.equal(voltage, values)
    assert torch.equal(net.stem[1].running_mean, statistics)
    assert [m.training for m in (net, net.stem, net.stem[1], net.node)] == [True, True, False, True]
    assert list(net.stem._forward_hooks) == [handle.id]
    assert [sorted(vars(m)) for m in net.modules()] == attributes


def test_a_loop_over_time_is_seen_as_calls_for_every_step():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.node = layer.Conv2d(2, 3, 3), neuron.LIFNode()

        def forward(self, x):
            return torch.stack([self.node(self.conv(frame)) for frame in x])

    report = sj_tac.plan(Loop(), example_input=frames(4, 2, 2, 6, 6))
    assert report["conv"].reason == "CALLED_TWICE"
    assert "4 times" in report["conv"].detail


def test_containers_of_the_host_are_looked_at_as_a_whole():
    net = nn.Sequential(
        layer.MultiStepContainer(layer.Conv2d(2, 3, 3), neuron.LIFNode()),
        layer.SeqToANNContainer(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)),
        conv(3, 3),
        node("lif"),
    )
    x = frames(4, 2, 2, 8, 8)
    for example in (None, x):
        assert [v.reason for v in sj_tac.plan(net, example_input=example).verdicts] == ["INSIDE_LEAF", None, None]
    functional.reset_net(net)


def test_several_inputs_by_position():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(), norm(), node("lif"))

        def forward(self, x, gate, power=2):
            if gate.shape[0] != x.shape[0]:
                raise ValueError("one gate per frame")
            return self.body(x * gate.view(-1, 1, 1, 1, 1) ** power)

    x, gate = frames(4, 2, 2, 6, 6), torch.rand(4)
    fast = sj_tac.convert(Two(), example_input=(x, gate))
    assert len(sj_tac.report(fast).converted) == 1
    assert fast(x, gate).shape == (4, 2, 3, 6, 6)
