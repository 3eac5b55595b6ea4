"""Nets whose convolutions run in one kernel with their neurons, on the CPU and on the stand-in for a device.

Weights are multiples of 1/16 and sums those of 2 or 4 frames with equal weights, so that every order of additions gives
the same drives: what one kernel gives is compared to the last bit with the definition, which runs torch's own convolution.
"""

import copy

import pairs
import pytest
import shim
import stub_cuda
import torch
import torch.nn.functional as F
from conv_cases import drives_of, last
from spikingjelly.activation_based import functional, layer, neuron
from straight_cases import NEURONS, POOLS, awake, compare, each
from torch import nn

import sj_tac
from sj_tac.kernels.cpu import conv_launches
from sj_tac.kernels.gpu import conv_fire, launchers
from sj_tac.kernels.layout import RUNS
from sj_tac.runtime import deferred
from sj_tac.runtime.borders import definition
from sj_tac.runtime.deferred import Deferred
from sj_tac.runtime.values import Shared, Spikes
from tests.runtime.test_deferred import BETWEEN, Block


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


@pytest.fixture(params=["contiguous", "channels_last"])
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


@pytest.fixture(params=BOTH)
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
    return placed(sj_tac.convert(net, policy, backend=backend))


def placed(net):
    return net.to(memory_format=torch.channels_last) if Here.net else net


def frames(steps=6, samples=2, size=16):
    x = (torch.rand(steps, samples, 2, size, size, generator=torch.Generator().manual_seed(1)) < 0.4).float()
    return last(x) if Here.frames else x


def count():
    return sum(n for (what, _), n in RUNS.items() if what == "conv_fire")


@pairs.parametrize("device", device=["contiguous", "channels_last"], node=NEURONS, pool=POOLS, launcher=launchers.NAMES)
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


@pairs.parametrize(
    "both",
    both=BOTH,
    options=[
        {"bias": True},
        {"stride": 2},
        {"kernel_size": 5, "padding": 2},
        {"kernel_size": 7, "padding": 3, "bias": True},
    ],
    k=[1, 2, 4],
)
def test_options_of_the_convolution(both, options, k):
    net, before = converted(source(**options), k), count()
    assert 0.02 < compare(net, frames(7)) < 0.9
    # Deeper maps of stride 2 are smaller than a copy of what they are made of.
    assert count() - before in ((2, 4) if "stride" in options else (6,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_nets(device, dtype):
    """Their drives are rounded as those that a convolution writes."""
    net, x = converted(source(pool=POOLS["2x2"])).to(dtype), frames(6).to(dtype)
    before = count()
    with torch.no_grad():
        found = net(x).clone()
        assert count() == before + 3
        assert found.dtype is dtype
        functional.reset_net(net)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(conv_fire.VARIABLE, "0")
            assert torch.equal(net(x), found)
    assert count() == before + 3
    assert 0.02 < found.float().mean() < 0.9


class Still(nn.Module):
    """Shows one image to a net six times over."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, image):
        return self.net(image.unsqueeze(0).repeat(6, 1, 1, 1, 1))


def test_a_still_image_is_convolved_once(device):
    image = frames(1)[0]
    net = sj_tac.convert(Still(source()), "exact", example_input=image)
    assert 0.02 < compare(net, image) < 0.9
    before = count()
    with torch.no_grad():
        net(image)
    assert net.net[0]._tac.ran == "one frame"
    assert count() > before


@pairs.parametrize("both", both=BOTH, change=BETWEEN, mode=[torch.no_grad, torch.inference_mode], k=[1, 2])
def test_what_happens_between_the_convolution_and_its_neuron(both, change, mode, k, monkeypatch):
    """Hooks that look, that write into inputs, weights, drives and options: as in the same net without the kernel."""
    net, before = converted(source(), k), count()
    BETWEEN[change](net)
    with mode():
        found = net(frames()).clone()
        voltages = [net[i].v.clone() for i in (2, 5, 8)]
        assert count() > before
        monkeypatch.setenv(conv_fire.VARIABLE, "0")
        functional.reset_net(net)
        expected = net(frames())
    assert 0 < expected.mean() < 1
    assert torch.equal(found, expected)
    for ours, i in zip(voltages, (2, 5, 8), strict=True):
        torch.testing.assert_close(ours, net[i].v)  # noise in the weights makes drives that are rounded


@pytest.mark.parametrize("k", [1, 2])
def test_a_residual_is_added_without_the_kernel(both, k):
    torch.manual_seed(0)
    net = Block()
    net.one, net.two = source(layers=1), source(layers=1)
    net.two[0] = layer.Conv2d(4, 4, 3, padding=1, bias=False, step_mode="m")
    net.two[0].weight.data = torch.randint(-8, 9, (4, 4, 3, 3)) / 16
    net, before = converted(net.eval(), k), count()
    assert 0.02 < compare(net, frames()) < 0.9
    assert count() == before + 2, "the first block's layer alone, twice"


@torch.no_grad()
@pytest.mark.parametrize("pool", ["none", "2x2", "3x3"])
def test_frames_that_are_read_later_are_those_that_the_sums_were_made_of(both, pool):
    """With weights whose drives another order of additions would round otherwise, and after they were changed."""
    net = source(pool=POOLS[pool], layers=2)
    for conv in each(net, nn.Conv2d):
        conv.weight.normal_(0, 0.5)
    net = converted(net)
    last = 3 if POOLS[pool] is None else 4
    value = net[:last](frames(5))
    assert isinstance(value, Spikes)
    (wanted, found), *_ = value.sums.items()
    net[0].weight.zero_()
    again = net[last]._tac.aggregate(value[:], wanted)
    assert torch.equal(again, found)
    assert found.std() > 0.1


def noisy(k=1):
    """A layer whose drives another order of additions rounds otherwise."""
    net = source(layers=1)
    net[0].weight.data.normal_(0, 0.5)
    return converted(net, k)


@torch.no_grad()
def test_drives_that_are_read_later_are_those_that_the_neuron_ran_on(device):
    net, x = noisy(), frames()
    drives = net[0](x)
    value = net[1](drives)
    spikes = net[2](value)[:]
    promised = drives_of(x, net[0].weight, None, 1, 1)
    theirs = F.conv2d(x.flatten(0, 1), net[0].weight, padding=1).view(promised.shape)
    assert not torch.equal(promised, theirs), "else nothing is tried here"
    assert torch.equal(drives[:], promised)
    assert torch.equal(neuron.LIFNode(step_mode="m")(value[:]), spikes)
    assert 0.02 < spikes.mean() < 0.9


@torch.no_grad()
def test_a_neuron_runs_on_the_drives_that_somebody_has_read(both):
    net, x, before = noisy(), frames(), count()
    drives = net[0](x)
    theirs = F.conv2d(x.flatten(0, 1), net[0].weight, padding=1).view(drives.shape)
    assert torch.equal(drives[:], theirs)
    value = net[1](drives)
    spikes = net[2](value)[:]
    assert count() == before
    assert torch.equal(neuron.LIFNode(step_mode="m")(value[:]), spikes)
    assert torch.equal(drives[:], theirs)


@torch.no_grad()
def test_two_neurons_read_one_convolution(both):
    net, other = converted(source(layers=1)), converted(source(NEURONS["IF soft"], layers=1))
    before = count()
    value = net[1](net[0](frames()))
    found = [net[2](value)[:], other[2](value)[:]]
    assert count() == before + 2
    with definition(net), definition(other):
        functional.reset_net(net)
        functional.reset_net(other)
        value = net[1](net[0](frames()))
        assert torch.equal(found[0], net[2](value))
        assert torch.equal(found[1], other[2](value))
    assert not torch.equal(*found)


@torch.no_grad()
def test_a_neuron_under_autocast_behind_a_convolution_that_is_not(both):
    net = converted(source(layers=1))
    expected = net(frames())[:]
    functional.reset_net(net)
    value = net[1](net[0](frames()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net[2](value)[:], expected)
    functional.reset_net(net)
    value = net[0](frames())
    with torch.autocast("cpu", torch.bfloat16):
        assert value.expression.compact.dtype is torch.float32


def taken(net, x):
    """Whether the first convolution of a call is left to the neuron's kernel."""
    with torch.no_grad():
        value = net[0](x)
    held = value.expression.held if isinstance(value, Shared) else None
    return type(held) is Deferred and held.one is not None


def test_who_gets_no_kernel(device, monkeypatch):
    """Gradients, a profiler, frames with gaps, other dtypes, overridden convolutions, backends: as before."""
    net, x = converted(source()), frames()
    assert taken(net, x)
    assert type(net[0](x).expression.held) is torch.Tensor
    with torch.autocast("cpu", torch.bfloat16):  # test_conv_fire_autocast.py
        assert taken(net, x)
    with torch.profiler.profile():
        assert not taken(net, x)
    each_frame = converted(source(), 1)  # sums of frames have no gaps
    assert taken(each_frame, x)
    assert not taken(each_frame, x.mT)
    assert not taken(each_frame, torch.cat([x, x], -1)[..., : x.shape[-1]])
    assert not taken(converted(source(), 1).double(), x.double())
    assert not taken(converted(source(), backend="reference"), x)
    assert not taken(sj_tac.convert(source(), "collapse", 2), x)
    for change in (
        {"padding_mode": "circular", "_reversed_padding_repeated_twice": [1, 1, 1, 1]}, {"padding": "same"},
        {"dilation": (2, 2)}, {"stride": (1, 2)}, {"_conv_forward": lambda x, w, b: torch.conv2d(x, 2 * w, b, padding=1)},
    ):  # fmt: skip
        other = converted(source())
        other[0].__dict__.update(change)
        assert not taken(other, x)
    monkeypatch.setenv(conv_fire.VARIABLE, "0")
    assert not taken(net, x)


def test_no_more_than_four_channels(both):
    net = awake(layers=2)  # 2 -> 8 -> 8
    net, before = converted(net), count()
    with torch.no_grad():
        net(frames())
    assert count() == before + 1


def test_gradients_go_the_ordinary_way(both):
    found = []
    for said in ("0", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(conv_fire.VARIABLE, said)
            net, before = converted(source(layers=2)), count()
            net(frames()).sum().backward()
            assert count() == before
            found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("pool", ["none", "2x2"])
def test_spikes_are_those_of_the_definition_in_float64(both, pool, k):
    """Weights of any numbers, decay weights: but for spikes at the threshold, which rounding moves."""
    torch.manual_seed(0)
    net = awake(pool=POOLS[pool], layers=1)
    exact = sj_tac.convert(copy.deepcopy(net).double(), "preserve", k, fuse=False)
    fast, x, before = sj_tac.convert(net, "preserve", k), frames(8, 4, 32), count()
    found, expected = fast(x), exact(x.double())
    assert count() == before + 1
    assert 0.05 < expected.mean() < 0.5
    assert (found != expected).sum() <= 2e-5 * expected.numel()
    torch.testing.assert_close(fast[2].v.double().median(), exact[2].v.median(), rtol=1e-5, atol=1e-6)


def test_what_is_prepared_is_made_once_and_sees_every_change(both):
    net = converted(source(pool=POOLS["2x2"]))
    x = frames()
    compare(net, x)
    made = [len(m._tac.launches) for m in each(net, neuron.BaseNode)]
    with torch.no_grad():
        for conv in each(net, nn.Conv2d):
            conv.weight.data.mul_(0.5)
        net[1].running_mean.data.sub_(0.1)
        assert 0.02 < compare(net, x) < 0.9
        assert [len(m._tac.launches) for m in each(net, neuron.BaseNode)] == made
        for node in each(net, neuron.BaseNode):
            node.v_threshold = 0.7
        compare(net, x)
        net[0].weight, net[0].padding = nn.Parameter(torch.randint(-8, 9, (4, 2, 5, 5)) / 16), (2, 2)
        before = count()
        compare(net, x)  # a map of the same size
        assert count() == before + 6
    assert [len(m._tac.launches) for m in each(net, neuron.BaseNode)] != made
