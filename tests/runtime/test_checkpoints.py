"""Values that something below Python puts elsewhere in autograd's graph: reentrant checkpoints, autograd Functions."""

import pairs
import pytest
import torch
from spikingjelly.activation_based import functional
from support import conv, frames, node, norm
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac

# Who checkpoints chooses time over memory anyway.
pytestmark = pytest.mark.filterwarnings("ignore::sj_tac.errors.PlanNotKeptWarning")


class Through(torch.autograd.Function):
    """A custom Function that scales the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.7


class Block(nn.Module):
    """Its neuron starts at rest in every call, so that a second run of it is the same again."""

    def __init__(self, inputs, residual):
        super().__init__()
        self.conv, self.norm, self.lif, self.residual = conv(inputs, 6), norm(6), node("lif", v_threshold=0.3), residual

    def forward(self, x):
        self.lif.reset()
        y = self.lif(self.norm(self.conv(x)))
        return y + x if self.residual else y


class Net(nn.Module):
    def __init__(self, residual):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(2, False), Block(6, residual), Block(6, residual)])
        self.reentrant = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.mean((0, 3, 4))


class Folded(nn.Module):
    """Something reads folded frames: of drives, in front of the first neuron, and of spikes behind it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lif = nn.Conv2d(2, 6, 3, padding=1), node("lif", v_threshold=0.1)
        self.conv2, self.out, self.read = nn.Conv2d(6, 4, 3, padding=1), node("lif", v_threshold=0.1), lambda x: x

    def forward(self, x):
        t, n = x.shape[:2]
        x = self.lif(self.read(self.conv(x.flatten(0, 1))).unflatten(0, (t, n)))
        return self.out(self.conv2(self.read(x.flatten(0, 1))).unflatten(0, (t, n))).mean((0, 3, 4))


def gradients(net, x):
    for module in net.modules():
        if hasattr(module, "v_threshold"):
            module.train()  # the older host differentiates no neuron in eval mode
    functional.reset_net(net)
    net.zero_grad()
    x = x.clone().requires_grad_()
    y = net(x)
    (y * torch.arange(1.0, y.shape[1] + 1, dtype=y.dtype)).sum().backward()
    assert 0.02 < y.mean() < 1
    return [x.grad, *(p.grad for p in net.parameters())]


def compare(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert b.abs().sum() > 0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pairs.parametrize(residual=[False, True], k=[1, 2, 3], reentrant=[True, False])
def test_checkpoints_one_behind_the_other(residual, k, reentrant):
    net, x = Net(residual).double().eval(), frames(6, 3, 2, 8, 8).double()
    expected = gradients(sj_tac.convert(net, k=k, fuse=False), x)
    fast = sj_tac.convert(net, k=k)
    fast.reentrant = reentrant
    compare(gradients(fast, x), expected)


READERS = {
    "Function": Through.apply,
    "reentrant checkpoint": lambda x: checkpoint(lambda y: y * 1.5, x, use_reentrant=True),
    "checkpoint": lambda x: checkpoint(lambda y: y * 1.5, x, use_reentrant=False),
}


@pytest.mark.parametrize("which", READERS)
def test_folded_frames_are_read_below_python(which):
    net, x = Folded().double().eval(), frames(6, 3, 2, 8, 8).double()
    found = []
    for fuse in (True, False):
        made = sj_tac.convert(net, k=2, fuse=fuse, example_input=x)
        made.read = READERS[which]
        found.append(gradients(made, x))
    compare(*found)
