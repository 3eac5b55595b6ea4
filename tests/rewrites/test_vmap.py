"""Forwards with ``torch.vmap`` inside, as SpikingJelly's TLastSeqToANNContainer: hooks there see tensors without numbers."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import awake, frames, only_v2
from torch import nn

import sj_tac
from sj_tac import host

X = frames(4, 3, 2, 8, 8, dtype=torch.float64)


class Mapped(nn.Module):
    """A module on every step by vmap; time is behind all else."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.vmap(self.inner, in_dims=-1, out_dims=-1)(x)


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return x * self.gain


class Step(nn.Module):
    def forward(self, x):
        return (x >= 0).to(x)


class Alone(nn.Module):
    """A neuron that takes one step of each call."""

    def __init__(self):
        super().__init__()
        self.neuron = neuron.IFNode(v_threshold=0.1, surrogate_function=Step())

    def forward(self, x):
        self.neuron.reset()
        x = self.neuron(x[None])[0]
        self.neuron.reset()
        return x


class Net(nn.Module):
    def __init__(self, mapped):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lif = layer.Conv2d(2, 4, 3, padding=1), neuron.LIFNode()
        self.mapped = mapped
        self.conv2, self.lif2 = layer.Conv2d(4, 4, 3, padding=1), neuron.LIFNode()
        functional.set_step_mode(self, "m")

    def forward(self, x):
        x = self.mapped(self.lif(self.conv(x)).movedim(0, -1)).movedim(-1, 0)
        return self.lif2(self.conv2(x))


INNER = {
    "pool": lambda: Mapped(nn.MaxPool2d(2)),
    "conv": lambda: Mapped(nn.Conv2d(4, 4, 3, padding=1)),
    "transposed": lambda: Mapped(nn.ConvTranspose2d(4, 4, 3, padding=1)),
    "own forward": lambda: Mapped(Standardised(4, 4, 3, padding=1)),
    "registered": lambda: Mapped(Gain()),
    "neuron": lambda: Mapped(Alone()),
    "SpikingJelly's": lambda: layer.TLastSeqToANNContainer(nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1)),
}


def nets():
    return [pytest.param(name, marks=only_v2 if name in ("SpikingJelly's", "neuron") else ()) for name in INNER]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(host.registry, "_AFFINE", set(host.registry._AFFINE))
    sj_tac.register_affine(Gain)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", nets())
def test_a_net_with_vmap_inside_converts_on_its_sample(name, k):
    net = Net(INNER[name]()).double().eval()
    awake(net, X) if name != "neuron" else None
    with torch.no_grad():
        expected = copy.deepcopy(net)(X)
    fast = sj_tac.convert(net, k=k, example_input=X)
    assert [v.layer for v in sj_tac.report(fast).converted] == ["conv", "conv2"]
    with torch.no_grad():
        found = fast(X)
        if k == 1:
            torch.testing.assert_close(found, expected)
        functional.reset_net(fast)
        torch.testing.assert_close(found, sj_tac.convert(net, k=k, fuse=False)(X))
    assert {v.layer for v in sj_tac.plan(net, k=k, example_input=X) if v.status == "converted"} == {"conv", "conv2"}


def test_its_convolutions_are_counted_with_all_steps():
    net = Net(INNER["conv"]()).double().eval()
    rows = {v.layer: v for v in sj_tac.report(sj_tac.convert(net, k=1, example_input=X))}
    inner = rows["mapped.inner"]
    assert inner.status == "refused"
    assert inner.macs_before == rows["conv2"].macs_before == 4 * 64 * 4 * 9 * 4
