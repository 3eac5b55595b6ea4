"""FTC's neuron against its difference equation written out, and its poles for any parameters."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from spikingjelly.activation_based import functional, neuron, surrogate
from support import csnn, frames

import sj_tac
from sj_tac import experimental
from sj_tac.errors import ConversionError
from sj_tac.experimental import BiquadNode

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


@settings(max_examples=20, deadline=None)
@given(st.floats(-30, 30, width=32), st.floats(-30, 30, width=32))
def test_bounded_input_gives_bounded_voltages(radius, angle):
    node = BiquadNode(1, v_threshold=1e12)
    with torch.no_grad():
        node.radius.fill_(radius)
        node.angle.fill_(angle)
        node(torch.ones(4000, 1, 1, dtype=torch.float64))
    # |v| <= sum of |impulse response| <= 1 / (1 - R)^2
    assert node.v.abs().max() <= 1 / (2.0**-10) ** 2 * 1.01


@pytest.mark.parametrize("v_reset", [None, 0.0, 0.25])
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


def test_single_steps_are_the_multi_step_and_reset_net_clears_them():
    node = BiquadNode(2, surrogate_function=surrogate.ATan())
    x = torch.randn(6, 2, 2, 3, 3)
    with torch.no_grad():
        whole = node(x)
        functional.reset_net(node)
        node.step_mode = "s"
        assert torch.equal(torch.stack([node(frame) for frame in x]), whole)
        functional.reset_net(node)
        assert node.v == 0.0


@pytest.mark.parametrize("detach", [True, False])
def test_gradients_reach_every_parameter(detach):
    node = BiquadNode(2, detach_reset=detach)
    with torch.no_grad():
        node.b1.fill_(0.3)
    x = torch.randn(6, 2, 2, 3, 3, requires_grad=True)
    node(x).sum().backward()
    for name, parameter in [("x", x), *node.named_parameters()]:
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BiquadNode(0), "0 channels"),
        (lambda: BiquadNode(2, radius=1.0), r"radius=1\.0"),
        (lambda: BiquadNode(2, angle=4.0), r"angle=4\.0"),
        (lambda: BiquadNode(2)(torch.zeros(3, 1, 5, 2)), r"2 channels got frames \[3, 1, 5, 2\]"),
        (lambda: BiquadNode(2)(torch.zeros(3)), r"\[3\]"),
        (lambda: experimental.replace(csnn(), "FFT"), "'FFT'; it knows"),
        (lambda: experimental.replace(torch.nn.Sequential(torch.nn.Linear(2, 2)), "FTC"), "alone drives a neuron"),
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
    if operator == "TCC":
        assert list(made.state_dict()) == list(net.state_dict())
        assert sj_tac.plan(net).converted


def test_biquads_can_be_saved(tmp_path):
    made = experimental.replace(csnn(), "FTC")
    with torch.no_grad():
        made[2].angle.uniform_(-1, 1)
    torch.save(made.state_dict(), tmp_path / "net.pt")
    other = experimental.replace(csnn(), "FTC")
    other.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    assert torch.equal(other[2].poles(), made[2].poles())
    assert not torch.equal(made[2].poles(), experimental.replace(csnn(), "FTC")[2].poles())
