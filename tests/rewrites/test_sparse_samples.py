"""A sample that is kept sparse, and made dense in the forward, as events are."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from torch import nn

import sj_tac
from rewrites.axes import time_axis

# torch's own word on compressed layouts, once a process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
X = (torch.rand(5, 3, 2, 8, 8, generator=torch.Generator().manual_seed(0)) > 0.7).float()
LAYOUTS = {
    "coordinates": lambda x: x.to_sparse(),
    "of whole samples": lambda x: x.to_sparse(2),
    "of whole frames": lambda x: x.to_sparse(1),
    "compressed": lambda x: x.to_sparse_bsr((8, 8)),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.lif = layer.Conv2d(2, 6, 3), layer.BatchNorm2d(6), neuron.LIFNode(v_threshold=0.2)
        functional.set_step_mode(self.eval(), "m")

    def forward(self, x):
        return self.lif(self.norm(self.conv(x if x.layout is torch.strided else x.to_dense())))


class Folded(nn.Module):
    """torch's own convolution, of all frames at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lif = nn.Conv2d(2, 6, 3), neuron.LIFNode(v_threshold=0.2, step_mode="m")
        self.eval()

    def forward(self, x):
        x = x if x.layout is torch.strided else x.to_dense()
        return self.lif(self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


@torch.no_grad()
def run(net, x):
    functional.reset_net(net)
    return net(x)


@pytest.mark.parametrize("sparse", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("fuse", [True, False])
def test_it_converts_as_the_dense_one(sparse, fuse):
    fast = sj_tac.convert(Net(), k=2, fuse=fuse, example_input=sparse(X))
    expected = run(sj_tac.convert(Net(), k=2, fuse=fuse, example_input=X), X)
    assert 0.02 < expected.mean() < 0.8
    assert torch.equal(run(fast, sparse(X)), expected)
    assert torch.equal(run(fast, X), expected)
    assert sj_tac.report(fast)["conv"].status == "converted"
    assert sj_tac.plan(Net(), k=2, example_input=sparse(X))["conv"].status == "converted"


@pytest.mark.parametrize("sparse", [LAYOUTS[name] for name in LAYOUTS if name != "compressed"])
def test_folded_frames_are_tried(sparse):
    fast = sj_tac.convert(Folded(), k=2, example_input=sparse(X))
    expected = run(sj_tac.convert(Folded(), k=2, example_input=X), X)
    assert 0.02 < expected.mean() < 0.8
    assert torch.equal(run(fast, sparse(X)), expected)


def test_a_sample_that_cannot_be_made_longer_says_nothing_of_time():
    assert time_axis(Net(), X) == 0
    assert time_axis(Net(), X.to_sparse()) == 0
    assert time_axis(Net(), LAYOUTS["compressed"](X)) is None
    verdict = sj_tac.plan(Folded(), k=2, example_input=LAYOUTS["compressed"](X))["conv"]
    assert (verdict.status, verdict.reason) == ("refused", "TIME_UNKNOWN")


class Windows(nn.Module):
    """Behind a mean over time four windows of each map stand in the batch: as many rows as frames, where T is 4."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = layer.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.lif1, self.lif2 = neuron.LIFNode(v_threshold=0.1), neuron.LIFNode(v_threshold=0.1)
        functional.set_step_mode(self.eval(), "m")

    def forward(self, x):
        x = x if x.layout is torch.strided else x.to_dense()
        t, n = x.shape[:2]
        x = self.lif1(self.conv1(x)).mean(0)
        x = x.unflatten(2, (2, -1)).unflatten(4, (2, -1)).permute(0, 2, 4, 1, 3, 5)
        y = self.conv2(x.reshape(n * 4, 4, 4, 4))
        return self.lif2(y.unflatten(0, (t, n)) if t == 4 else y[None])


def test_windows_that_are_no_frames_are_found_of_a_sparse_sample_too():
    for given in (X[:4], X[:4].to_sparse()):
        plan = sj_tac.plan(Windows(), k=2, example_input=given)
        assert plan["conv2"].reason == "FOLD_AMBIGUOUS"
        assert "rows 0, 1, 2, 3 change with the first sample" in plan["conv2"].detail
