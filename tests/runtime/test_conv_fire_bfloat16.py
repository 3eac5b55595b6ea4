"""First layers that compute in bfloat16, in one kernel on the CPU: nobody sees it, to the last bit.

Under autocast, by a policy's ``dtype``, or because the net is of that; each against torch's own convolution and ``fire``.
"""

import contextlib

import pairs
import pytest
import torch
from conv_cases import last
from spikingjelly.activation_based import functional
from straight_cases import NEURONS, POOLS
from test_conv_fire_cpu import converted, count, frames, held_by, source, taken

import sj_tac
from sj_tac.kernels.cpu import conv_launches, halves
from sj_tac.kernels.gpu import conv_fire
from sj_tac.runtime.deferred import Deferred
from sj_tac.runtime.values import Spikes

pytestmark = pytest.mark.skipif(not halves.can_multiply_pairs(), reason="the processor does not compute in bfloat16")
WAYS = ["autocast", "dtype", "net"]


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch):
    monkeypatch.delenv(conv_fire.VARIABLE, raising=False)


def narrow(way, net, k=2, lies=True):
    """The converted net, and frames of its dtype."""
    policy = {"default": {"mode": "preserve", "k": k} | ({"dtype": "bfloat16"} if way == "dtype" else {})}
    fast = converted(net, k, policy, last=lies)
    x = frames() if lies else frames().contiguous()
    return (fast.bfloat16(), x.bfloat16()) if way == "net" else (fast, x)


def calling(way):
    return torch.autocast("cpu", torch.bfloat16) if way == "autocast" else contextlib.nullcontext()


def needs_the_kernel(way, net, x):
    with calling(way):
        if not taken(net, x):
            pytest.skip("torch's convolution of this shape takes its sums in another order on this processor")


@torch.no_grad()
# Two kinds of neurons, as a kernel is compiled for each; test_stepping.py has all of them.
@pairs.parametrize(way=WAYS, node=["LIF", "IF soft"], pool=POOLS, lies=[True, False], k=[1, 2, 4])
def test_spikes_voltages_and_drives_are_the_same_without_the_kernel(way, node, pool, lies, k, monkeypatch):
    """Over two calls of other lengths; the second starts from the voltages of the first."""
    monkeypatch.setattr(conv_launches, "_KINDS", {})
    monkeypatch.setattr(conv_launches, "LARGE", 0)
    monkeypatch.setattr(conv_launches, "FULL", 0)
    net, x = narrow(way, source(NEURONS[node], POOLS[pool], k == 2), k, lies)
    needs_the_kernel(way, net, x)
    found = []
    for said in ("", "0"):
        monkeypatch.setenv(conv_fire.VARIABLE, said)
        before = count()
        with calling(way):
            functional.reset_net(net)
            outputs = [net(x).clone(), net(x[:5]).clone()]
            functional.reset_net(net)
            drives = net[0](x)
            spikes = net[2](net[1](drives))[:]
        runs = 3 if pool == "2x2" or (pool == "none" and lies) else 0
        assert count() == before + (runs if said == "" else 0)
        found.append([*outputs, spikes, drives[:], net[2].v.clone()])
    assert 0.02 < found[0][2].float().mean() < 0.9
    assert found[0][0].abs().sum() > 0
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_drives_that_are_read_later(way, monkeypatch):
    """After the net's weights and the caller's frames were changed: those that the neuron ran on."""
    net, x = narrow(way, source())
    needs_the_kernel(way, net, x)
    with calling(way):
        with monkeypatch.context() as patch:
            patch.setenv(conv_fire.VARIABLE, "0")
            expected = net[0](x)[:].clone()
        drives = net[0](x)
        assert type(drives.expression.held) is Deferred
        value = net[2](net[1](drives))
        assert isinstance(value, Spikes)
    net[0].weight.zero_()
    x.zero_()
    assert drives.dtype is expected.dtype
    assert torch.equal(drives[:], expected)
    assert value[:].float().mean() > 0.02


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("between", [lambda y: y * 2, lambda y: y.float(), lambda y: y + y, lambda y: y[:, :1]])
def test_what_stands_between_gets_torchs_own_drives(between, way, monkeypatch):
    net, x = narrow(way, source())
    needs_the_kernel(way, net, x)
    found = []
    for said in ("", "0"):
        monkeypatch.setenv(conv_fire.VARIABLE, said)
        with calling(way):
            found.append(between(net[0](x))[:].clone())
    assert found[0].dtype is found[1].dtype
    assert torch.equal(*found)


@torch.no_grad()
def test_numbers_are_rounded_once_on_the_way_in():
    """Frames and weights of float32 that bfloat16 does not have."""
    net, x = narrow("autocast", source(), 1)
    x = last(x * torch.rand(x.shape))
    needs_the_kernel("autocast", net, x)
    with calling("autocast"):
        y = net[0](x)
        assert type(y.expression.held) is Deferred
        net[2](net[1](y))
        drives = y[:]
        wanted = torch.conv2d(x.flatten(0, 1), net[0].weight, net[0].bias, 1, 1)
    assert drives.dtype is wanted.dtype is torch.bfloat16
    assert torch.equal(drives.flatten(0, 1), wanted)


@torch.no_grad()
@pytest.mark.parametrize("keeps", [True, False])
def test_parameters_that_are_written_within_a_region_are_read_as_autocast_has_them(keeps, monkeypatch):
    """It casts each once, unless it may not keep them; the next region casts what was written."""
    found = []
    for said in ("", "0"):
        net, x = narrow("autocast", source(bias=True), 1)
        x = x.contiguous()  # so that the drives' memory format is that of the weights
        needs_the_kernel("autocast", net, x)
        before = count()
        with monkeypatch.context() as patch:
            patch.setenv(conv_fire.VARIABLE, said)
            drives = []
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
                    for _ in range(2):
                        functional.reset_net(net)
                        y = net[0](x)
                        net[2](net[1](y))
                        drives.append(y[:].clone())
                        assert drives[-1].flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
                        net[0].weight.mul_(-1.5)
                        net[0].bias.add_(1.0)
        assert count() == before + (4 if said == "" else 0)
        assert torch.equal(drives[0], drives[1]) is torch.equal(drives[2], drives[3]) is keeps
        assert not torch.equal(drives[1], drives[2])
        found.append(drives)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("way", ["float32", *WAYS])
def test_other_default_dtypes_and_devices(way, monkeypatch):
    net, x = narrow(way, source())
    needs_the_kernel(way, net, x)
    expected = None
    try:
        for dtype, device in ((torch.float32, None), (torch.float64, None), (torch.float32, "meta")):
            monkeypatch.setattr(conv_launches, "_KINDS", {})
            monkeypatch.setattr(conv_launches, "_FOUND", {})
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            functional.reset_net(net)
            before = count()
            with calling(way):
                found = net(x).clone(), net[2].v.clone()
            assert count() == before + 1
            expected = expected or found
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.dtype is theirs.dtype
                assert torch.equal(ours, theirs)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_gradients_are_the_convolutions_own():
    net, x = narrow("autocast", source())
    needs_the_kernel("autocast", net, x)
    before = count()
    with calling("autocast"):
        assert type(held_by(net, x)) is torch.Tensor
        net(x).float().sum().backward()
    assert count() == before
    assert net[0].weight.grad.abs().sum() > 0


@torch.no_grad()
def test_what_autocast_does_not_cast_is_not_rounded():
    net, x = converted(source(), 2).double(), frames().double()
    before = count()
    with calling("autocast"):
        y = net(x)
    assert count() == before
    functional.reset_net(net)
    assert torch.equal(y, net(x))


@torch.no_grad()
@pytest.mark.parametrize("which", ["0", "3"])
def test_only_the_layers_that_are_to_compute_in_bfloat16_do(which):
    net, x = source(), last(frames() * torch.rand(frames().shape))
    layers = {"match": which, "mode": "preserve", "k": 1, "dtype": "bfloat16"}
    fast = converted(net, 1, {"default": {"mode": "preserve", "k": 1}, "rules": [layers]})
    needs_the_kernel("dtype", fast, x)
    before = count()
    fast(x)
    assert count() == before + 1
    of = x.flatten(0, 1), fast[0].weight
    wide, rounded = torch.conv2d(*of, None, 1, 1), torch.conv2d(*(t.bfloat16() for t in of), None, 1, 1).float()
    assert not torch.equal(wide, rounded)
    assert torch.equal(fast[0](x)[:].flatten(0, 1), rounded if which == "0" else wide)
    kernels = {layer.layer: layer.kernel for layer in sj_tac.report(fast).converted}
    assert kernels["0"] == "numba, fused with its convolution"
