"""IMC's information measure against a channel that is simulated and a brute-force capacity; its gate and its loss."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support import csnn, frames

from sj_tac import experimental
from sj_tac.experimental import InformationGate, bsc_information, information_loss, minimum_channels


def mutual_information(rate, flip):
    """I(X; Y) in bits from the joint distribution of a spike and what arrives, term by term."""
    joint = np.array([[(1 - rate) * (1 - flip), (1 - rate) * flip], [rate * flip, rate * (1 - flip)]])
    product = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    return sum(p * math.log2(p / q) for p, q in zip(joint.flat, product.flat, strict=True) if p > 0)


@given(st.floats(0.001, 0.999), st.floats(0, 0.5))
def test_information_is_the_joint_distributions(rate, flip):
    found = bsc_information(torch.tensor(rate, dtype=torch.float64), flip).item()
    assert found == pytest.approx(mutual_information(rate, flip), abs=3e-6)


@pytest.mark.parametrize("flip", [0.0, 0.02, 0.11, 0.3])
def test_its_maximum_over_rates_is_the_channels_capacity(flip):
    rates = torch.linspace(0, 1, 2001, dtype=torch.float64)
    best = bsc_information(rates, flip).max().item()
    assert best == pytest.approx(mutual_information(0.5, flip), abs=1e-6)
    assert rates[bsc_information(rates, flip).argmax()] == pytest.approx(0.5)


def test_a_channel_that_always_lies_half_the_time_carries_nothing():
    assert bsc_information(torch.rand(5, dtype=torch.float64), 0.5).abs().max() < 1e-6
    with pytest.raises(ValueError, match=r"flip=0\.6"):
        bsc_information(torch.rand(2), 0.6)


def test_minimum_channels():
    # As many bits out as in at the same rate and size; H(0.5) = 1 bit, H(0.11) = 0.4999 bit.
    assert minimum_channels(16, 0.2, 0.2) == 16
    assert minimum_channels(10, 0.5, 0.11) == 21
    assert minimum_channels(10, 0.11, 0.5) == 5
    assert minimum_channels(16, 0.2, 0.2, shrink=4) == 64
    with pytest.raises(ValueError, match=r"rate_out=0\.0"):
        minimum_channels(4, 0.2, 0.0)


@pytest.mark.parametrize("mode", ["m", "s"])
def test_the_gate_scales_channels_and_follows_their_rates(mode):
    gate = InformationGate(3, momentum=0.5, step_mode=mode)
    with torch.no_grad():
        gate.logit.copy_(torch.tensor([-2.0, 0.0, 5.0]))
    spikes = (torch.rand(4, 2, 3, 5, 5) < torch.tensor([0.1, 0.5, 0.9]).view(3, 1, 1)).float()
    x = spikes if mode == "m" else spikes[0]
    start = gate.running_rate.clone()
    gate.eval()
    out = gate(x)
    assert torch.equal(gate.running_rate, start)
    for c, logit in enumerate((-2.0, 0.0, 5.0)):
        axis = 2 if mode == "m" else 1
        torch.testing.assert_close(out.select(axis, c), x.select(axis, c) / (1 + math.exp(-logit)))
    gate.train()
    gate(x)
    mean = x.mean([d for d in range(x.dim()) if d != (2 if mode == "m" else 1)])
    torch.testing.assert_close(gate.running_rate, 0.5 * start + 0.5 * mean)
    with pytest.raises(ValueError, match="of 3 channels got"):
        gate(torch.zeros(2, 2, 4, 3, 3))


def test_the_loss_is_shortage_plus_price():
    gate = InformationGate(4)
    gate.running_rate.copy_(torch.tensor([0.5, 0.1, 0.0, 1.0]))
    gate.demand.fill_(3.0)
    opened = 1 / (1 + math.exp(-3.0))
    bits = sum(mutual_information(rate, 0.0) for rate in (0.5, 0.1))
    expected = 0.01 * (3.0 - opened * bits) + 0.001 * opened
    assert information_loss(gate).item() == pytest.approx(expected, abs=1e-6)
    gate.demand.fill_(0.1)
    assert information_loss(gate).item() == pytest.approx(0.001 * opened, abs=1e-6)
    with pytest.raises(ValueError, match="no InformationGate in Sequential"):
        information_loss(csnn())


def test_gates_of_a_net_see_what_comes_in_also_in_a_copy():
    made = experimental.replace(csnn(), "IMC").train()
    twin = copy.deepcopy(made)
    x = frames(4, 2, 2, 8, 8)
    made(x)
    gates = [m for m in made.modules() if isinstance(m, InformationGate)]
    first = 2 * mutual_information((x != 0).float().mean().item(), 0.0)
    assert gates[0].demand.item() == pytest.approx(first, abs=1e-4)
    assert all(g.demand > 0 for g in gates)
    others = [m for m in twin.modules() if isinstance(m, InformationGate)]
    assert all(g.demand == 0 for g in others)
    twin(x)
    assert all(g.demand > 0 for g in others)


def test_training_on_the_loss_alone_closes_gates_that_are_not_needed():
    gate = InformationGate(8)
    gate.running_rate.fill_(0.5)
    gate.demand.fill_(4.0)
    optimizer = torch.optim.Adam(gate.parameters(), 0.05)
    for _ in range(400):
        optimizer.zero_grad()
        information_loss(gate, shortage=1.0, gates=0.5).backward()
        optimizer.step()
    assert gate.capacity().item() == pytest.approx(4.0, abs=0.3)
