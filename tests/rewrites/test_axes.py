"""What is read of a sample of nets that fold time."""

import pytest
import torch
from spikingjelly.activation_based import neuron
from torch import nn

import sj_tac

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


def made(kind):
    torch.manual_seed(0)
    return kind().double().eval()


def inputs(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Projected(Blocks):
    """A neuron on folded frames in a branch: it carries every sample to the next."""

    def __init__(self):
        super().__init__()
        self.proj, self.proj_lif = nn.Conv2d(C, C, 1), lif()

    def front(self, x):
        x = super().front(x)
        return x + self.proj_lif(self.proj(x.flatten(0, 1))).reshape(x.shape)


@pytest.mark.parametrize("seed", range(3))
def test_a_neuron_that_steps_through_samples_makes_no_others_of_frames(seed):
    torch.manual_seed(seed)
    plan = sj_tac.plan(Projected().eval(), k=2, example_input=torch.rand(T, N, 3, 4, 4))
    assert {v.layer: v.reason for v in plan.refused} == {"proj": "NEURON_FOLDED"}


class Windows(Projected):
    """Behind the first block four windows of each map stand in the batch: as many rows as frames, where T is 4."""

    def between(self, x):
        if x.shape[-1] == 2:
            return x
        t, n = x.shape[:2]
        x = x.mean(0).unflatten(2, (2, -1)).unflatten(4, (2, -1)).permute(0, 2, 4, 1, 3, 5)
        return x.reshape(n * 4, C, 2, 2).unflatten(0, (t, n))


class WindowsOfAnother(Windows):
    """They are those of a second input."""

    def forward(self, x, more):
        first, second = (
            lambda y, i=i: self.lifs[i](self.convs[i](y.flatten(0, 1)).unflatten(0, x.shape[:2])) for i in (0, 1)
        )
        return first(self.front(x)).mean((-2, -1)) + second(self.between(more)).mean((-2, -1))


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Windows, [(4, 3, 3, 4, 4)]),
        (WindowsOfAnother, [(4, 3, 3, 4, 4), (4, 3, C, 4, 4)]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_windows_are_found_there_too(kind, shapes):
    plan = sj_tac.plan(made(kind), k=2, example_input=tuple(inputs(*shape) for shape in shapes))
    assert plan["convs.1"].reason == "FOLD_AMBIGUOUS"
    assert "or samples look at each other" in plan["convs.1"].detail
