"""Nets whose convolutions run in one kernel with their neurons, on the CPU and on the stand-in for a device.

Weights are multiples of 1/16 and sums those of 2 or 4 frames with equal weights, so that every order of additions gives
the same drives: what one kernel gives is compared to the last bit with the definition, which runs torch's own convolution.
"""

from itertools import product

import pairs
import pytest
import shim
import stub_cuda
import torch
from conv_cases import last
from spikingjelly.activation_based import layer, neuron
from straight_cases import NEURONS, POOLS, Residual, awake, compare, each
from torch import nn

import sj_tac
from sj_tac.kernels.cpu import conv_launches
from sj_tac.kernels.gpu import conv_fire, launchers
from sj_tac.kernels.layout import RUNS
from sj_tac.runtime import deferred


class Here:
    """Where a test runs: whether nets, and their frames, are channels_last."""

    net = frames = False


FORMATS = {"contiguous": (False, False), "channels_last": (True, True), "a net in channels_last": (True, False)}


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """A stand-in for a device on a machine whose environment asks for the kernel."""
    if shim.MISSING:
        pytest.skip(shim.MISSING)
    stub_cuda.machine(monkeypatch, tmp_path)
    stub_cuda.stand_in(monkeypatch)
    monkeypatch.setenv(conv_fire.VARIABLE, "1")
    yield stub_cuda.offer(monkeypatch, *launchers.NAMES)
    stub_cuda.forget()


def lying(monkeypatch, format_):
    for name, value in zip(("net", "frames"), FORMATS[format_], strict=True):
        monkeypatch.setattr(Here, name, value)


@pytest.fixture(params=["contiguous", "channels_last"] if pairs.EXHAUSTIVE else ["channels_last"])
def device(stub, monkeypatch, request):
    lying(monkeypatch, request.param)
    return stub


@pytest.fixture
def cpu(monkeypatch):
    """The CPU, where maps of any size are taken, whatever torch's convolution does with the last bits."""
    monkeypatch.delenv(conv_fire.VARIABLE, raising=False)
    lying(monkeypatch, "channels_last")
    monkeypatch.setattr(deferred, "LARGE_FOR_ONE", 0)
    monkeypatch.setattr(conv_launches, "_KINDS", {})
    monkeypatch.setattr(conv_launches, "_is_torchs", lambda *_: True)


BOTH = [*(f"cuda, {format_}" for format_ in FORMATS), "cpu"]
FEW = BOTH if pairs.EXHAUSTIVE else ["cuda, channels_last", "cpu"]


@pytest.fixture(params=FEW)
def both(request, monkeypatch):
    where, _, format_ = request.param.partition(", ")
    request.getfixturevalue("stub" if where == "cuda" else "cpu")
    if format_:
        lying(monkeypatch, format_)


def source(node=None, pool=None, layers=3, **options):
    """``awake`` of 2 and 4 channels; drives are exact in float32, whatever the order of additions."""
    torch.manual_seed(0)
    net = awake(node, pool, layers)
    options = {"kernel_size": 3, "padding": 1, "bias": False, "step_mode": "m"} | options
    for i, module in enumerate(net):
        if isinstance(module, nn.Conv2d):
            net[i] = layer.Conv2d(2 if i == 0 else 4, 4, **options)
            for parameter in net[i].parameters():
                parameter.data = torch.randint(-8, 9, parameter.shape) / 16
        if isinstance(module, nn.BatchNorm2d):
            net[i] = layer.BatchNorm2d(4, step_mode="m")
            net[i].running_mean.uniform_(-0.2, 0.2)
            net[i].running_var.uniform_(0.05, 0.3)
            nn.init.uniform_(net[i].bias, 0.2, 0.9)
    return net.eval()


def converted(net, k=2, backend="auto"):
    policy = {"default": {"mode": "preserve", "k": k, "weights": "uniform"}}
    net = sj_tac.convert(net, policy, backend=backend)
    return net.to(memory_format=torch.channels_last) if Here.net else net


def frames(steps=6, samples=2, size=16):
    x = (torch.rand(steps, samples, 2, size, size, generator=torch.Generator().manual_seed(1)) < 0.4).float()
    return last(x) if Here.frames else x


def count():
    return sum(n for (what, _), n in RUNS.items() if what == "conv_fire")


LAYERS = [("contiguous", "LIF", "2x2", "cupy"), ("channels_last", "IF soft", "3x3", "nvrtc")]
if pairs.EXHAUSTIVE:
    LAYERS = list(product(["contiguous", "channels_last"], NEURONS, POOLS, launchers.NAMES))


@pytest.mark.parametrize(("device", "node", "pool", "launcher"), LAYERS, indirect=["device"])
def test_every_layer_of_few_channels_runs_in_one_kernel(device, node, pool, launcher):
    net = converted(source(NEURONS[node], POOLS[pool], 2), 2, launcher)
    before = count()
    for x in (frames(5), frames(6, 1, 12)):
        assert 0.02 < compare(net, x) < 0.9
    assert count() == before + 8  # two layers, two calls each
    assert {by for by, *_ in device.calls} == {launcher}
    with torch.no_grad():
        net(frames())
    assert {v.kernel for v in sj_tac.report(net).converted} == {f"{launcher}, fused with its convolution"}


OPTIONS = {
    "bias": {"bias": True}, "stride": {"stride": 2}, "5": {"kernel_size": 5, "padding": 2},
    "7": {"kernel_size": 7, "padding": 3, "bias": True},
}  # fmt: skip
WHERE = [
    ("cuda, contiguous", "bias", 4), ("cuda, a net in channels_last", "7", 1), ("cpu", "bias", 1), ("cpu", "stride", 2),
    ("cpu", "5", 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("both", "options", "k"), list(product(BOTH, OPTIONS, [1, 2, 4])) if pairs.EXHAUSTIVE else WHERE, indirect=["both"]
)
def test_options_of_the_convolution(both, options, k):
    net, before = converted(source(**OPTIONS[options]), k), count()
    assert 0.02 < compare(net, frames(7)) < 0.9
    # Deeper maps of stride 2 are smaller than a copy of what they are made of.
    assert count() - before in ((2, 4) if options == "stride" else (6,))


def test_a_residual_is_added_without_the_kernel(both):
    two = source(layers=1)
    two[0] = layer.Conv2d(4, 4, 3, padding=1, bias=False, step_mode="m")
    two[0].weight.data = torch.randint(-8, 9, (4, 4, 3, 3)) / 16
    net, before = converted(Residual(source(layers=1), two).eval()), count()
    assert 0.02 < compare(net, frames()) < 0.9
    assert count() == before + 2, "the first block's layer alone, twice"


@pytest.mark.filterwarnings("ignore:the CUDA kernels compute in float32")
def test_what_the_kernel_does_not_know_is_computed_without_it(both, monkeypatch):
    """Gradients, other dtypes, a collapse, overridden convolutions."""
    net, x = converted(source()), frames()
    net(x).sum().backward()
    assert net[0].weight.grad.abs().max() > 0
    assert compare(converted(source(), 1).double(), x.double()) > 0.02
    assert compare(sj_tac.convert(source(layers=1), "collapse", 2), x) > 0.02
    for change in (
        {"padding_mode": "circular", "_reversed_padding_repeated_twice": [1, 1, 1, 1]}, {"padding": "same"},
        {"dilation": (2, 2)}, {"_conv_forward": lambda x, w, b: torch.conv2d(x, 2 * w, b, padding=1)},
    ):  # fmt: skip
        other = converted(source(layers=1))
        other[0].__dict__.update(change)
        assert compare(other, x) > 0.02
    monkeypatch.setenv(conv_fire.VARIABLE, "0")
    before = count()
    compare(net, x)
    assert count() == before


@torch.no_grad()
def test_under_autocast_on_the_cpu(cpu):
    net, before = converted(source(layers=1)), count()
    with torch.autocast("cpu", torch.float16):
        assert net[0](frames())[:].dtype is torch.float16
        assert net[1:](net[0](frames())).mean() > 0.02
    assert count() == before


@pytest.mark.parametrize("k", [1, 2])
def test_frames_of_any_memory_format(cpu, k):
    """The net's is channels_last; pixels that lie in reverse, a view of every other frame, a still image."""
    net, x = converted(source(), k), frames(12)
    gaps = x.contiguous()[::2], x[:1].contiguous().expand(6, -1, -1, -1, -1)
    for some in (x, x.contiguous(), x.flip(-1), *gaps):
        before = count()
        assert 0.02 < compare(net, some) < 0.9
        assert count() - before == (4 if k == 1 and any(some is other for other in gaps) else 6)


def test_what_is_prepared_sees_every_change(both):
    net = converted(source(pool=POOLS["2x2"], layers=2))
    x = frames()
    compare(net, x)
    with torch.no_grad():
        for conv in each(net, nn.Conv2d):
            conv.weight.data.mul_(0.5)
        net[1].running_mean.data.sub_(0.1)
        assert 0.02 < compare(net, x) < 0.9
        for node in each(net, neuron.BaseNode):
            node.v_threshold = 0.7
        compare(net, x)
        net[0].weight, net[0].padding = nn.Parameter(torch.randint(-8, 9, (4, 2, 5, 5)) / 16), (2, 2)
        before = count()
        compare(net, x)  # a map of the same size
        assert count() == before + 4
