"""TCC's convolution against the dense one, on frames of which some are silent."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st
from spikingjelly.activation_based import functional, layer
from support import csnn, frames

from sj_tac import experimental
from sj_tac.experimental import SilentFrameConv2d


def pair(**options):
    torch.manual_seed(0)
    dense = layer.Conv2d(4, 6, 3, step_mode="m", **options).double()
    skipping = SilentFrameConv2d(4, 6, 3, step_mode="m", **options).double()
    skipping.load_state_dict(dense.state_dict())
    return dense, skipping


@settings(max_examples=40, deadline=None)
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
        torch.testing.assert_close(skipping(x), dense(x), rtol=1e-13, atol=1e-13)
    heard = x.flatten(2).any(2).sum().item()
    assert skipping.skipped == pytest.approx(1 - heard / 6)


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


def test_single_step_mode():
    dense, skipping = pair(padding=1)
    x = torch.rand(3, 2, 4, 5, 5, dtype=torch.float64)
    x[1] = 0
    with torch.no_grad():
        expected = dense(x)
        skipping.step_mode = "s"
        torch.testing.assert_close(torch.stack([skipping(frame) for frame in x]), expected)


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


def test_a_net_of_them_is_the_net():
    net = csnn().double()
    made = experimental.replace(net, "TCC")
    x = frames(6, 2, 2, 8, 8).double()
    x[2] = 0
    x[4, 1] = 0
    with torch.no_grad():
        expected = net(x)
        torch.testing.assert_close(made(x), expected)
        assert made[0].skipped == pytest.approx(3 / 12)
        functional.reset_net(made)
        torch.testing.assert_close(copy.deepcopy(made)(x), expected)
