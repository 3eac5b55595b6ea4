"""What forwards do to folded drives and to registered classes that the miniature nets do not."""

import pytest
import torch
from idioms.miniatures import SIZE, C, N, OwnNeuron, T, conv, lif
from idioms.test_idioms import CLOSE, run, same
from spikingjelly.activation_based import layer
from torch import nn
from torch.utils.checkpoint import checkpoint

import sj_tac

SHAPE = (T, N, 2, SIZE, SIZE)


def frames(*shape):
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(shape or SHAPE, dtype=torch.float64, generator=generator) > 0.5).double() * 2


class Block(nn.Module):
    """Stateless, so that it may be run again."""

    def __init__(self, inputs):
        super().__init__()
        self.conv, self.node = conv(inputs), OwnNeuron()

    def forward(self, x):
        t, n, _, h, w = x.shape
        return self.node(3 * self.conv(x.flatten(0, 1)).view(t, n, C, h, w))


class Checkpointed(nn.Module):
    reentrant = None

    def __init__(self):
        super().__init__()
        self.one, self.two = Block(2), Block(C)

    def forward(self, x):
        for block in (self.one, self.two):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.mean((-1, -2)).mean(0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("k", [1, 2])
def test_a_checkpoint_runs_the_same_again(k, reentrant):
    torch.manual_seed(0)
    net, x = Checkpointed().double().eval(), frames()
    fast = sj_tac.convert(net, k=k, example_input=frames())
    expected = run(fast, x)
    fast.reentrant = reentrant
    same(run(fast, x), expected, **CLOSE)


@sj_tac.register_neuron(decay=0.5)
class Remembers(OwnNeuron):
    """Its membrane is kept between calls, until its reset."""

    def __init__(self):
        super().__init__(0.5)
        self.v = None

    def reset(self):
        self.v = None

    def forward(self, x):
        v, spikes = torch.zeros_like(x[0]) if self.v is None else self.v, []
        for frame in x:
            v = self.leak * v + frame
            fired = self.spike(v - 1.0)
            v = (1 - fired.detach()) * v
            spikes.append(fired)
        self.v = v.detach()
        return torch.stack(spikes)


def chain(*modules):
    return nn.Sequential(layer.Conv2d(2, C, 3, padding=1, step_mode="m"), *modules).double().eval()


def test_a_registered_neuron_that_remembers_is_reset_before_it_is_compared():
    net, x = chain(Remembers()), frames()
    net(x)
    held = net[1].v.clone()
    fast = sj_tac.convert(net, k=1, example_input=x)
    assert torch.equal(net[1].v, held)
    for each in (net, fast):
        each[1].reset()
    torch.testing.assert_close(fast(x), net(x), **CLOSE)
    torch.testing.assert_close(fast(x), net(x), **CLOSE)  # and goes on from there


class _Named(nn.Module):
    """torch's own layers on folded frames, called by the names of their arguments."""

    def __init__(self, sized):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.lif1 = nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4).eval(), lif()
        self.pool, self.up, self.lif2, self.sized = nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 3, 2, 1), lif(), sized
        self.lif1.v_threshold = self.lif2.v_threshold = 0.1

    def forward(self, x):
        t, n = x.shape[:2]
        y = self.lif1(self.bn(input=self.conv(input=x.flatten(0, 1))).unflatten(0, (t, n))).flatten(0, 1)
        y = self.up(y, output_size=x.shape[-2:]) if self.sized else self.up(input=self.pool(input=y))
        return self.lif2(y.unflatten(0, (t, n)))


@pytest.mark.parametrize("sized", [False, True], ids=["by name", "output_size"])
def test_arguments_by_name_and_more_of_them(sized):
    net, x = _Named(sized).double().eval(), frames(4, 3, 2, 8, 8) / 2
    fast, source = (sj_tac.convert(net, k=k, example_input=x) for k in (2, 1))
    defined = sj_tac.convert(net, k=2, example_input=x, fuse=False)
    found = sj_tac.report(fast)
    assert found["conv"].status == "converted"
    assert found["up"].status == "converted"
    with torch.no_grad():
        spikes = net(x)
        torch.testing.assert_close(source(x), spikes, **CLOSE)
        torch.testing.assert_close(fast(x), defined(x), **CLOSE)
    assert 0.02 < spikes.mean() < 0.9
