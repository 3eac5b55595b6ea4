"""Functions that torch has several names for are the same function to a trace and in a call."""

import pytest
import torch
from spikingjelly.activation_based import functional
from support import conv, frames, node
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError

NAMES = {
    "torch.multiply": lambda x: torch.multiply(x, 1.5),
    "torch.multiply, number first": lambda x: torch.multiply(1.5, x),
    "multiply": lambda x: x.multiply(1.5),
    "multiply_": lambda x: x.multiply_(1.5),
    "torch.divide": lambda x: torch.divide(x, 0.5),
    "torch.true_divide": lambda x: torch.true_divide(x, 0.5),
    "divide": lambda x: x.divide(0.5).true_divide(1.1),
    "div_": lambda x: x.div_(0.5),
    "divide_": lambda x: x.divide_(0.5).true_divide_(1.1),
    "torch.subtract": lambda x: torch.subtract(x, x * 0.1),
    "subtract": lambda x: x.subtract(x * 0.1),
    "subtract_": lambda x: x.subtract_(0.01),
    "torch.negative": lambda x: torch.negative(x.negative()),
}


class Between(nn.Module):
    """A convolution, something, and a neuron."""

    def __init__(self, something):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.node, self.something = conv(), node("lif", v_threshold=0.3), something

    def forward(self, x):
        return self.node(self.something(self.conv(x)))


def ran(net, x):
    """Spikes, and the gradient of the convolution's weight."""
    functional.reset_net(net)
    net.zero_grad()
    y = net(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), net.conv.weight.grad.clone()


@pytest.mark.parametrize("name", NAMES)
def test_between_convolution_and_neuron(name):
    net, x = Between(NAMES[name]), frames(6, 2, 2, 8, 8)  # 0.0.0.0.14 has no gradient in eval mode
    expected = ran(net, x)
    assert 0.01 < expected[0].mean() < 0.5
    found = ran(sj_tac.convert(net, "preserve", 1), x)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    fast = sj_tac.convert(net, "preserve", 2)
    assert [v.layer for v in sj_tac.report(fast).converted] == ["conv"]
    found, expected = ran(fast, x), ran(sj_tac.convert(net, "preserve", 2, fuse=False), x)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_a_division_that_rounds_is_not_linear():
    with pytest.raises(ConversionError, match="NOT_LINEAR"):
        sj_tac.convert(Between(lambda x: torch.divide(x, 0.5, rounding_mode="floor")), "preserve", 2)
