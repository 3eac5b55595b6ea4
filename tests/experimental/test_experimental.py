"""The paper's other operators: FTC's neuron, IMC's gates and loss, TCC's convolution, against their equations."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import conv as plain_conv, csnn, frames

import sj_tac
from sj_tac import experimental
from sj_tac.errors import ConversionError
from sj_tac.experimental import BiquadNode, InformationGate, SilentFrameConv2d, bsc_information, information_loss

ANY = st.floats(-1e6, 1e6, width=32)


@given(ANY, ANY)
def test_poles_are_inside_the_unit_circle_for_any_parameters(radius, angle):
    node = BiquadNode(1)
    with torch.no_grad():
        node.radius.fill_(radius)
        node.angle.fill_(angle)
    a1, a2, _, _ = (value.item() for value in node.coefficients())
    # Of the coefficients as the recursion uses them, float32, by another way than poles().
    assert np.abs(np.roots([1, -a1, -a2])).max() < 1
    assert node.poles().abs().max() < 1


@pytest.mark.parametrize("v_reset", [None, 0.25])
def test_is_the_recursion_written_out(v_reset):
    torch.manual_seed(0)
    node = BiquadNode(3, v_reset=v_reset).double()
    with torch.no_grad():
        for parameter in node.parameters():
            parameter.uniform_(-1, 1)
    x = torch.randn(12, 2, 3, 4, 5, dtype=torch.float64) * 2
    r = (1 - 2**-10) / (1 + np.exp(-node.radius.detach().numpy()))
    theta = math.pi / (1 + np.exp(-node.angle.detach().numpy()))
    b0, b1 = node.b0.detach().numpy(), node.b1.detach().numpy()
    fired = 0
    for c in range(3):
        expected, v1, v2, x1 = [], np.zeros((2, 4, 5)), np.zeros((2, 4, 5)), np.zeros((2, 4, 5))
        for now in x[:, :, c].numpy():
            h = 2 * r[c] * math.cos(theta[c]) * v1 - r[c] ** 2 * v2 + b0[c] * now + b1[c] * x1
            s = (h >= 1).astype(float)
            v = h - s if v_reset is None else np.where(s > 0, v_reset, h)
            v2, v1, x1 = v1, v, now
            expected.append(s)
        functional.reset_net(node)
        with torch.no_grad():
            spikes = node(x)[:, :, c]
        assert np.array_equal(spikes.numpy(), np.stack(expected))
        fired += spikes.sum()
    assert 0.05 < fired / x.numel() < 0.9


@pytest.mark.parametrize("make", [lambda: neuron.LIFNode(tau=2.5), lambda: neuron.LIFNode(4.0, False, v_reset=None)])
def test_like_a_neuron_has_its_response_below_threshold(make):
    node = make()
    node.v_threshold = 1e9
    node.step_mode = "m"
    twin = BiquadNode.like(node, 2).double()
    x = torch.rand(20, 1, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        node(x), twin(x)
    torch.testing.assert_close(twin.v, node.v, rtol=2e-3, atol=2e-3)


def test_single_steps_are_the_multi_step_and_gradients_reach_every_parameter():
    torch.manual_seed(0)
    gradients = []
    x = torch.randn(6, 2, 2, 3, 3, requires_grad=True)
    for detach in (True, False):
        node = BiquadNode(2, surrogate_function=surrogate.ATan(), detach_reset=detach)
        whole = node(x)
        gradients.append(torch.autograd.grad(whole.sum(), [x, *node.parameters()]))
        assert all(gradient.abs().sum() > 0 for gradient in gradients[-1])
        functional.reset_net(node)
        assert node.v == 0.0
        node.step_mode = "s"
        assert torch.equal(torch.stack([node(frame) for frame in x]), whole)
    assert not torch.allclose(gradients[0][0], gradients[1][0])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BiquadNode(0), "0 channels"),
        (lambda: BiquadNode(2, radius=1.0), r"radius=1\.0"),
        (lambda: BiquadNode(2, angle=4.0), r"angle=4\.0"),
        (lambda: BiquadNode(2)(torch.zeros(3, 1, 5, 2)), r"2 channels got frames \[3, 1, 5, 2\]"),
        (lambda: experimental.replace(csnn(), "FFT"), "'FFT'; it knows"),
        (lambda: experimental.replace(torch.nn.Sequential(plain_conv()), "FTC"), "alone drives a neuron"),
    ],
)
def test_errors_name_the_value(make, text):
    with pytest.raises((ValueError, ConversionError), match=text):
        make()


@pytest.mark.parametrize("operator", ["FTC", "IMC", "TCC"])
def test_replace_changes_a_copy_that_trains_copies_and_resets(operator):
    net = csnn()
    before = copy.deepcopy(net.state_dict())
    classes = [type(m) for m in net.modules()]
    made = experimental.replace(net, operator)
    assert [type(m) for m in net.modules()] == classes
    torch.testing.assert_close(dict(net.state_dict()), dict(before))
    kinds = {"FTC": BiquadNode, "IMC": experimental.InformationGate, "TCC": experimental.SilentFrameConv2d}
    assert sum(isinstance(m, kinds[operator]) for m in made.modules()) == 3
    x = frames(4, 2, 2, 8, 8)
    twin = copy.deepcopy(made)
    for one in (made, twin):
        one.train()
        one(x).sum().backward()
        assert all(p.grad is not None for p in one.parameters())
        functional.reset_net(one)
    if operator == "FTC":
        other = experimental.replace(net, operator)
        with torch.no_grad():
            made[2].angle.uniform_(-1, 1)
        other.load_state_dict(made.state_dict())
        assert torch.equal(other[2].poles(), made[2].poles())
    if operator == "TCC":
        assert list(made.state_dict()) == list(net.state_dict())
        assert sj_tac.plan(net).converted


def mutual_information(rate, flip):
    """I(X; Y) in bits from the joint distribution of a spike and what arrives, term by term."""
    joint = np.array([[(1 - rate) * (1 - flip), (1 - rate) * flip], [rate * flip, rate * (1 - flip)]])
    product = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    return sum(p * math.log2(p / q) for p, q in zip(joint.flat, product.flat, strict=True) if p > 0)


@given(st.floats(0.001, 0.999), st.floats(0, 0.5))
def test_information_is_the_joint_distributions(rate, flip):
    found = bsc_information(torch.tensor(rate, dtype=torch.float64), flip).item()
    assert found == pytest.approx(mutual_information(rate, flip), abs=3e-6)


def test_minimum_channels():
    # As many bits out as in at the same rate and size; H(0.5) = 1 bit, H(0.11) = 0.4999 bit.
    assert experimental.minimum_channels(16, 0.2, 0.2) == 16
    assert experimental.minimum_channels(10, 0.5, 0.11) == 21
    assert experimental.minimum_channels(10, 0.11, 0.5) == 5
    assert experimental.minimum_channels(16, 0.2, 0.2, shrink=4) == 64
    with pytest.raises(ValueError, match=r"rate_out=0\.0"):
        experimental.minimum_channels(4, 0.2, 0.0)
    with pytest.raises(ValueError, match=r"flip=0\.6"):
        bsc_information(torch.rand(2), 0.6)


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


def pair(**options):
    torch.manual_seed(0)
    dense = layer.Conv2d(4, 6, 3, step_mode="m", **options).double()
    skipping = SilentFrameConv2d(4, 6, 3, step_mode="m", **options).double()
    skipping.load_state_dict(dense.state_dict())
    return dense, skipping


@given(
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from(["zeros", "reflect", "circular"]),
    st.sampled_from([1, 2]),
)
def test_equals_the_dense_convolution(silent, bias, stride, padding_mode, groups):
    dense, skipping = pair(bias=bias, stride=stride, padding=1, padding_mode=padding_mode, groups=groups)
    x = (torch.rand(3, 2, 4, 7, 6, dtype=torch.float64) < 0.3).double()
    x[torch.tensor(silent).view(3, 2)] = 0
    with torch.no_grad():
        expected = dense(x)
        torch.testing.assert_close(skipping(x), expected, rtol=1e-13, atol=1e-13)
    heard = x.flatten(2).any(2).sum().item()
    assert skipping.skipped == pytest.approx(1 - heard / 6)
    skipping.step_mode = "s"
    with torch.no_grad():
        torch.testing.assert_close(torch.stack([skipping(frame) for frame in x]), expected, rtol=1e-13, atol=1e-13)


def test_nothing_is_skipped_that_is_not_silent():
    dense, skipping = pair(padding=1)
    x = torch.zeros(2, 1, 4, 5, 5, dtype=torch.float64)
    x[0, 0, 0, 0, 0] = float("nan")
    x[1, 0, 2, 2, 2] = -1e-300
    with torch.no_grad():
        out, expected = skipping(x), dense(x)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[0].isnan().any()
    assert skipping.skipped == 0


@pytest.mark.parametrize("of_input", [True, False])
def test_gradients_are_the_dense_convolutions(of_input):
    dense, skipping = pair(padding=1)
    data = (torch.rand(3, 2, 4, 5, 5, dtype=torch.float64) < 0.3).double()
    data[1] = 0
    found = []
    for conv in (dense, skipping):
        x = data.clone().requires_grad_(of_input)
        conv(x).sin().sum().backward()
        found.append([x.grad, conv.weight.grad, conv.bias.grad])
    assert skipping.skipped == (0 if of_input else pytest.approx(1 / 3))
    for ours, theirs in zip(*found, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)
