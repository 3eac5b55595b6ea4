"""Which dimension of a net's input is time."""

import copy

import pytest
import torch
from measure.small_nets import Leaky, N, T
from spikingjelly.activation_based import layer
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.rewrites.measure.axes import time_axis


class Around(nn.Module):
    """Chains of frames [T, N, ...], and what a forward does in front of them."""

    def __init__(self, front=lambda x: x, make=lambda: node("lif")):
        super().__init__()
        self.front = front
        self.body = nn.Sequential(conv(2, 4), norm(4), make(), conv(4, 4), norm(4), make())

    def forward(self, x):
        return self.body(self.front(x))


class Single(nn.Module):
    """Each call of the neuron is one step."""

    def __init__(self):
        super().__init__()
        self.conv, self.node = conv(2, 4, step_mode="s"), node("lif", step_mode="s")

    def forward(self, x):
        return torch.stack([self.node(self.conv(frame)) for frame in x])


def fails(x):
    raise ValueError("no such shape")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Around, 0),
        (lambda: Around(make=Leaky), 0),
        (lambda: Around(lambda x: x.transpose(0, 1)), 1),
        (lambda: Around(lambda x: x.transpose(0, 1), Leaky), 1),
        (lambda: Around(lambda x: x[0].repeat(T, 1, 1, 1, 1)), None),
        (lambda: Around(fails), None),
        (Single, None),
        (lambda: nn.Sequential(layer.Conv2d(2, 3, 3, step_mode="m")), None),
        (lambda: sj_tac.convert(Around(), k=2, example_input=frames(T, N, 2, 8, 8)), 0),
        (lambda: sj_tac.convert(Around(lambda x: x.mT, Leaky), k=2, example_input=frames(T, N, 2, 8, 8)), 0),
    ],
)
@pytest.mark.parametrize("samples", [1, 2, T])
def test_it_is_found(make, expected, samples):
    net = make()
    assert time_axis(net, frames(*((samples, T) if expected == 1 else (T, samples)), 2, 8, 8)) == expected


@pytest.mark.parametrize("turned", [False, True])
def test_features(turned):
    net = Around(lambda x: x.transpose(0, 1) if turned else x)
    net.body = nn.Sequential(layer.Linear(5, 6, step_mode="m"), node("lif"))
    assert time_axis(net, frames(T, N, 5)) == turned


def test_the_net_is_left_as_it_was_and_runs_to_its_first_neuron():
    net, x = Around().train(), frames(T, N, 2, 8, 8)
    net(x)
    net.body[5].forward = fails
    before, v, numbers, kept = copy.deepcopy(net.state_dict()), net.body[2].v, torch.get_rng_state(), x.clone()
    assert time_axis(net, x) == 0
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    assert net.body[2].v is v
    assert net.training
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), numbers)
