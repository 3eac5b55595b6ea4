"""Scalars of NumPy in a forward: numbers to torch, and so to a trace."""

import numpy as np
import pytest
import torch
from spikingjelly.activation_based import functional
from support import conv, frames, node
from torch import nn

import sj_tac
from sj_tac.errors import SjTacError


class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.conv, self.node, self.by = conv(), node("lif", v_threshold=0.3), by

    def forward(self, x):
        return self.by(self.node(self.conv(x)))


@pytest.mark.parametrize("number", [np.float32(1.5), np.float64(1.5), np.int64(2), np.float16(0.5)], ids=repr)
@pytest.mark.parametrize("first", [True, False])
def test_scalars_of_numpy_are_numbers(number, first):
    torch.manual_seed(0)
    net, x = Scaled((lambda y: number * y) if first else (lambda y: y * number)).eval(), frames(4, 2, 2, 8, 8)
    expected = net(x)
    functional.reset_net(net)
    if first:  # torch.fx's own symbols are no numbers to NumPy
        with pytest.raises(SjTacError, match="example_input"):
            sj_tac.convert(net, "preserve", 1)
    for example in (x,) if first else (None, x):
        fast = sj_tac.convert(net, "preserve", 1, example_input=example)
        assert sj_tac.report(fast).converted
        assert torch.equal(fast(x), expected)
    assert expected.max() == float(number)
