"""The short way to the kernel behind drives that were folded, [T * N, ...], as most published transformers have them."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, neuron
from straight_cases import launches
from support import awake
from torch import nn

import sj_tac
from sj_tac.runtime import straight

K = {k: {"version": 1, "default": {"mode": "preserve", "k": k}} for k in (1, 2, 3)}


class Folded(nn.Module):
    """Two folded chains; ``edit(drives, unfold)`` makes frames [T, N, ...] of folded drives, and ``after`` sees both.

    Not while the net is traced: a real call may differ.
    """

    def __init__(self, edit, after=lambda drives, frames: None):
        super().__init__()
        self.conv1, self.bn1, self.lif1 = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), neuron.LIFNode(step_mode="m")
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.lif2 = neuron.ParametricLIFNode(step_mode="m")
        self.edit, self.after, self.armed = edit, after, False

    def forward(self, x):
        t, n = x.shape[:2]
        for conv, bn, lif in ((self.conv1, self.bn1, self.lif1), (self.conv2, self.bn2, self.lif2)):
            drives = bn(conv(x.flatten(0, 1)))
            if not self.armed:
                x = lif(drives.reshape(t, n, *drives.shape[1:]).contiguous())
                continue
            frames = self.edit(drives, lambda y: y.reshape(t, n, *y.shape[1:]).contiguous())
            x = lif(frames)
            self.after(drives, frames)
        return x + 0.0


def written(drives, unfold):
    drives.mul_(1.3)
    return unfold(drives)


def written_later(drives, unfold):
    frames = unfold(drives)
    drives.add_(0.2)
    return frames


def written_unfolded(drives, unfold):
    frames = unfold(drives)
    frames.add_(0.2)
    return frames


def scaled(drives, unfold):
    return unfold(drives) * (1.0 if drives.abs().sum() > 0 else 0.0)


def twice(drives, unfold):
    return unfold(unfold(drives).flatten(0, 1))


def read_between(drives, unfold):
    frames = unfold(drives)
    assert drives.std() > 0
    return frames


EDITS = {
    "unfolded": lambda drives, unfold: unfold(drives),
    "unfolded twice": twice,
    "a view": lambda drives, unfold: drives.unflatten(0, (-1, 3)),
    "written": written,
    "written later": written_later,
    "written unfolded": written_unfolded,
    "scaled": scaled,
    "read in between": read_between,
}
STRAIGHT = {"unfolded", "unfolded twice", "a view"}
AFTER = {
    "nothing": lambda drives, frames: None,
    "drives are written": lambda drives, frames: drives.zero_(),
    "frames are written": lambda drives, frames: frames.zero_(),
    "drives are read": lambda drives, frames: drives.sum(),
}


def made(edit, after="nothing", dtype=torch.float64):
    torch.manual_seed(0)
    x = (torch.rand(7, 3, 2, 8, 8) < 0.4).float()
    return awake(Folded(EDITS[edit], AFTER[after]).eval(), x).to(dtype), x.to(dtype)


def compared(net, x, k):
    """Spikes and voltages of two calls are the definition's; returns the converted net."""
    fast = sj_tac.convert(copy.deepcopy(net), K[k], example_input=x)
    plain = sj_tac.convert(copy.deepcopy(net), K[k], example_input=x, fuse=False)
    fast.armed = plain.armed = net.armed = True
    for module in (fast.lif1, fast.lif2):  # what the conversion's own call prepared
        module._tac.launches.clear()
    with torch.no_grad():
        for frames in (x, x.flip(0), x[:5]):
            found, wanted = fast(frames), plain(frames)
            assert 0.02 < wanted.mean() < 0.9
            assert torch.equal(found, wanted)
            for one, other in ((fast.lif1, plain.lif1), (fast.lif2, plain.lif2)):
                torch.testing.assert_close(one.v, other.v, rtol=1e-12, atol=1e-12)
        if k == 1:
            functional.reset_net(fast)
            functional.reset_net(net)
            assert torch.equal(fast(x), net(x))
    return fast


@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("edit", EDITS)
def test_it_gives_what_the_definition_gives(edit, k):
    net, x = made(edit)
    fast = compared(net, x, k)
    assert bool(launches(fast)) is (edit in STRAIGHT | {"scaled"})


@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("edit", sorted(STRAIGHT))
def test_who_writes_or_reads_drives_later_changes_nothing(edit, after, k):
    """Spikes whose frames are not made yet are made of what the drives were."""
    net, x = made(edit, after)
    compared(net, x, k)


def test_channels_last_and_both_neurons_of_one_drive():
    class Two(Folded):
        def forward(self, x):
            t, n = x.shape[:2]
            drives = self.bn1(self.conv1(x.flatten(0, 1))).reshape(t, n, 6, *x.shape[3:])
            x = torch.cat([self.lif1(drives), self.lif3(drives)], 2)
            drives = self.bn2(self.conv2(x.flatten(0, 1)))
            return self.lif2(drives.reshape(t, n, 4, *x.shape[3:])) + 0.0

    torch.manual_seed(0)
    net, x = Two(None).eval(), (torch.rand(7, 3, 2, 8, 8) < 0.4).float()
    net.lif3, net.conv2 = neuron.IFNode(step_mode="m"), nn.Conv2d(12, 4, 3, padding=1)
    net = awake(net, x).double()
    for one in (net, copy.deepcopy(net).to(memory_format=torch.channels_last)):
        compared(one, x.double(), 2)


def test_it_is_taken(monkeypatch):
    taken = []
    original = straight.run
    monkeypatch.setattr(straight, "run", lambda *given: taken.append(original(*given)) or taken[-1])
    net, x = made("unfolded", dtype=torch.float32)
    fast = sj_tac.convert(net, K[2], example_input=x)
    taken.clear()
    with torch.no_grad():
        fast(x)
    assert len(taken) == 2
    assert None not in taken
    assert fast.lif1._tac.gave == "sums"
