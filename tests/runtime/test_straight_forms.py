"""Calls without gradients behind drives that are folded, [T * N, ...], or lines, [T, N, C, L], as transformers have them."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from straight_cases import NEURONS, compare, launches
from support import awake, frames
from torch import nn

import sj_tac

K = {k: {"version": 1, "default": {"mode": "preserve", "k": k}} for k in (1, 2, 3)}


class Folded(nn.Module):
    """Two folded chains; ``edit(drives, unfold)`` makes frames [T, N, ...] of folded drives, and ``after`` sees both.

    Not while the net is traced: a real call may differ.
    """

    def __init__(self, edit, after=lambda drives, frames: None):
        super().__init__()
        self.conv1, self.bn1, self.lif1 = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), neuron.LIFNode(step_mode="m")
        self.conv2, self.bn2, self.lif2 = nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4), neuron.LIFNode(step_mode="m")
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


def written_later(drives, unfold):
    frames = unfold(drives)
    drives.add_(0.2)
    return frames


EDITS = {
    "unfolded": lambda drives, unfold: unfold(drives),
    "a view": lambda drives, unfold: drives.unflatten(0, (-1, 3)),
    "written": lambda drives, unfold: unfold(drives.mul_(1.3)),
    "written later": written_later,
    "scaled": lambda drives, unfold: unfold(drives) * (1.0 if drives.abs().sum() > 0 else 0.0),
}
AFTER = {
    "nothing": lambda drives, frames: None,
    "drives are written": lambda drives, frames: drives.zero_(),
    "frames are written": lambda drives, frames: frames.zero_(),
    "drives are read": lambda drives, frames: drives.sum(),
}


@pytest.mark.parametrize(
    ("edit", "after", "k"),
    [
        *((edit, "nothing", 2) for edit in EDITS),
        *(("unfolded", after, 2) for after in list(AFTER)[1:]),
        *(("a view", after, 3) for after in list(AFTER)[:-1]),
        ("unfolded", "nothing", 1),
    ],
)
def test_folded_drives(edit, after, k):
    """Spikes and voltages are those of fuse=False, at k=1 the source's; frames are made of what the drives were."""
    torch.manual_seed(0)
    x = frames(7, 3, 2, 8, 8)
    net, x = awake(Folded(EDITS[edit], AFTER[after]).eval(), x).double(), x.double()
    fast, plain = (sj_tac.convert(copy.deepcopy(net), K[k], example_input=x, fuse=fuse) for fuse in (True, False))
    fast.armed = plain.armed = net.armed = True
    for module in (fast.lif1, fast.lif2):  # what the conversion's own call prepared
        module._tac.launches.clear()
    with torch.no_grad():
        for clip in (x, x.flip(0), x[:5]):
            found, wanted = fast(clip), plain(clip)
            assert 0.02 < wanted.mean() < 0.9
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
            for one, other in ((fast.lif1, plain.lif1), (fast.lif2, plain.lif2)):
                torch.testing.assert_close(one.v, other.v, rtol=1e-12, atol=1e-12)
        if k == 1:
            functional.reset_net(fast)
            torch.testing.assert_close(fast(x), net(x), rtol=0, atol=1e-9)
    assert bool(launches(fast)) is (edit in ("unfolded", "a view", "scaled"))


C = 8


class Lines(nn.Module):
    """Three chains of Conv1d, one of which drives its neuron together with a residual."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(layer.Conv1d(C if i else 2, C, 3, padding=1, bias=i == 1) for i in range(3))
        self.norms = nn.ModuleList(layer.BatchNorm1d(C) for i in range(3))
        self.nodes = nn.ModuleList(make() for _ in range(3))
        for norm in self.norms:
            norm.running_mean.uniform_(-0.2, 0.2)
            norm.running_var.uniform_(0.02, 0.1)
            nn.init.uniform_(norm.bias, 0.0, 0.6)
        functional.set_step_mode(self, "m")
        self.eval()

    def forward(self, x):
        for i, (conv, norm, node) in enumerate(zip(self.convs, self.norms, self.nodes, strict=True)):
            y = norm(conv(x))
            x = node(y + x if i == 2 else y)
        return x


@pytest.mark.parametrize(
    ("kind", "k", "dtype"), [("LIF", 2, torch.float32), ("LIF", 1, torch.float64), ("PLIF", 2, torch.float32)]
)
def test_lines(kind, k, dtype):
    """Voltages have the host's shape, and are no views, which nobody could detach in place."""
    net = sj_tac.convert(Lines(NEURONS[kind]).to(dtype), "preserve", k)
    rates = [compare(net, frames(*shape).to(dtype)) for shape in ((6, 2, 2, 10), (5, 2, 2, 10), (6, 3, 2, 7), (6, 4, 2, 1))]
    assert all(0.005 < rate < 0.9 for rate in rates), rates
    assert launches(net) == 12
    with torch.no_grad():
        net(frames(6, 2, 2, 10).to(dtype))
    assert [node.v.shape for node in net.nodes] == [(2, C, 10)] * 3
    functional.detach_net(net)
    assert not any(node.v._is_view() for node in net.nodes)
