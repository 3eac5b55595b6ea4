"""Where T and N are looked for, of nets that fold time: behind other neurons, in joined inputs, further back."""

import pytest
import torch
from idioms.miniatures import grouped
from spikingjelly.activation_based import functional, neuron
from torch import nn

import sj_tac
from sj_tac.rewrites.axes import time_axis

T, N, C = 5, 2, 4


def lif():
    return neuron.LIFNode(step_mode="m", detach_reset=True, v_threshold=0.1)


class Blocks(nn.Module):
    """Two folded convolutions with their neurons, behind whatever ``front`` makes of the input."""

    def __init__(self, channels=3):
        super().__init__()
        self.conv0, self.lif0 = nn.Conv2d(channels, C, 3, padding=1), lif()
        self.convs = nn.ModuleList(nn.Conv2d(C, C, 3, padding=1) for _ in range(2))
        self.lifs = nn.ModuleList(lif() for _ in range(2))

    def front(self, x):
        return self.lif0(self.conv0(x.flatten(0, 1)).unflatten(0, x.shape[:2]))

    def between(self, x):
        return x

    def forward(self, x, *more):
        x = self.front(x, *more)
        for conv, node in zip(self.convs, self.lifs, strict=True):
            x = self.between(node(conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])))
        return x.mean((-2, -1))


class Steps(Blocks):
    """The first neuron steps by itself: each call is one step."""

    def front(self, x):
        return torch.stack([self.lif0(self.conv0(frame)[None])[0] for frame in x])


class Folded(Blocks):
    """The first neuron is handed folded frames."""

    def front(self, x):
        return self.lif0(self.conv0(x.flatten(0, 1))).unflatten(0, x.shape[:2])


class Once(Blocks):
    """The first neuron runs once, on an image."""

    def front(self, x):
        return self.lif0(self.conv0(x[0])[None]).repeat(len(x), 1, 1, 1, 1)


class Added(Blocks):
    def front(self, a, b):
        return super().front(a + b)


class Clips(Blocks):
    """[N, S, T, C, H, W]: S clips of each sample."""

    def front(self, x):
        return super().front(x.permute(2, 0, 1, 3, 4, 5).flatten(1, 2))


def made(kind):
    torch.manual_seed(0)
    return kind().double().eval()


def inputs(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(net, names, steps):
    """Hooks that hand each of the convs the mean of two frames, weighed by the neurons' decay, in either one's place."""

    def aggregate(module, args):
        return (grouped(args[0].unflatten(0, (steps, -1)), 2).flatten(0, 1),)

    for name in names:
        net.get_submodule(name).register_forward_pre_hook(aggregate)
    return net


@torch.no_grad()
def run(net, *x):
    functional.reset_net(net)
    return net(*x)


BEHIND = ("convs.0", "convs.1")
ALL = ("conv0", *BEHIND)


@pytest.mark.parametrize(
    ("kind", "inside", "convs"),
    [
        (Steps, 1, BEHIND), (Folded, 1, BEHIND), (Once, 1, BEHIND), (Added, 2, ALL), (Clips, 1, ALL),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_they_are_found(kind, inside, convs):
    net = made(kind)
    shaped = {Clips: lambda t, n: (n, 3, t, 3, 6, 6)}.get(kind, lambda t, n: (t, n, 3, 6, 6))
    sample = [inputs(*shaped(T, N), seed=i) for i in range(inside)]
    fast = sj_tac.convert(net, k=2, example_input=tuple(sample))
    assert tuple(v.layer for v in sj_tac.report(fast).converted) == convs
    for t, n in ((6, 3), (4, 4)):
        x = [inputs(*shaped(t, n), seed=i + 2) for i in range(inside)]
        expected = run(by_hand(made(kind), convs, t), *x)
        assert 0.02 < expected.mean() < 0.9
        torch.testing.assert_close(run(fast, *x), expected, rtol=1e-7, atol=1e-9)
    assert not torch.equal(expected, run(made(kind), *x))


def test_what_could_not_be_tried_is_told_from_what_is_not_there():
    class Fixed(Blocks):
        def front(self, x):
            return super().front(x + torch.zeros(T, N, 1, 1, 1))

    class Sliced(Blocks):
        def front(self, x):
            return super().front(x[:T, :N])

    plan = sj_tac.plan(made(Fixed), k=2, example_input=inputs(T, N, 3, 6, 6))
    assert {v.reason for v in plan.verdicts} == {"TIME_UNKNOWN"}
    wanted = "whether T=5 or N=2 of the neurons is the size of 'x' in dimension 0, 'x' in dimension 1 could not be tried"
    assert f"{wanted}: one longer there, forward fails (RuntimeError" in plan["conv0"].detail
    plan = sj_tac.plan(made(Sliced), k=2, example_input=inputs(T, N, 3, 6, 6))
    assert "but one longer there, 'lif0' is handed [5, 2]" in plan["conv0"].detail


class Projected(Blocks):
    """A neuron on folded frames in a branch: it carries every sample to the next."""

    def __init__(self):
        super().__init__()
        self.proj, self.proj_lif = nn.Conv2d(C, C, 1), lif()

    def front(self, x):
        x = super().front(x)
        return x + self.proj_lif(self.proj(x.flatten(0, 1))).reshape(x.shape)


def test_a_neuron_that_steps_through_samples_makes_no_others_of_frames():
    plan = sj_tac.plan(made(Projected), k=2, example_input=inputs(T, N, 3, 4, 4))
    assert {v.layer: v.reason for v in plan.refused} == {"proj": "NEURON_FOLDED"}


# ---- samples that are kept sparse, and made dense in the forward, as events are -----------------------------------------


class Dense(Blocks):
    def front(self, x):
        return super().front(x if x.layout is torch.strided else x.to_dense())


# torch's own word on compressed layouts, once a process.
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("dimensions", [5, 2, 1])
def test_a_sparse_sample_shows_what_the_dense_one_does(dimensions):
    """Coordinates of numbers, of whole samples, of whole frames."""
    x = (inputs(T, N, 3, 8, 8) > 0.7).double()
    given = x.to_sparse(dimensions)
    fast = sj_tac.convert(made(Dense), k=2, example_input=given)
    assert tuple(v.layer for v in sj_tac.report(fast).converted) == ALL
    expected = run(by_hand(made(Dense), ALL, T), x)
    assert 0.02 < expected.mean() < 0.9
    for one in (x, given):
        torch.testing.assert_close(run(fast, one), expected, rtol=1e-7, atol=1e-9)
    assert time_axis(made(Dense), given) == time_axis(made(Dense), x) == 0
