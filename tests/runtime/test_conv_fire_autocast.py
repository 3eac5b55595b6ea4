"""First layers in one kernel under autocast, on the stand-in: in the dtype in which torch's convolution would compute."""

import pairs
import pytest
import shim
import stub_cuda
import torch
from spikingjelly.activation_based import functional
from torch import nn

import sj_tac
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.layout import RUNS
from sj_tac.runtime.deferred import Deferred
from tests.runtime.test_conv_fire_formats import FORMATS, POOLS, converted, frames, seen, source

pytestmark = pytest.mark.skipif(bool(shim.MISSING or stub_cuda.REAL), reason="the stand-in's")
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _device(monkeypatch, tmp_path):
    yield from stub_cuda.on_the_stub(monkeypatch, tmp_path)


def cast(dtype):
    return torch.autocast(stub_cuda.DEVICE, dtype)


@pairs.parametrize(dtype=HALVES, lies=FORMATS, pool=POOLS, k=[1, 2])
def test_numbers_and_dtypes_are_those_without_the_kernel(dtype, lies, pool, k, monkeypatch):
    net, x = converted(source(2, 8, POOLS[pool]), k, lies), frames(lies)
    plain = seen(net, x, monkeypatch, "1")
    with cast(dtype):
        expected = seen(net, x, monkeypatch, "0")
        before = RUNS["conv_fire", "cupy"]
        found = seen(net, x, monkeypatch, "1")
    assert RUNS["conv_fire", "cupy"] - before == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    assert found[0].dtype is dtype is not plain[0].dtype
    assert 0.02 < expected[2].mean() < 0.9


@torch.no_grad()
@pytest.mark.parametrize("lies", FORMATS)
def test_weights_and_frames_are_rounded_as_they_were_when_the_layer_was_called(lies):
    net = source(3)
    net[0].weight.data.normal_(0, 0.5)
    net, x = converted(net, 1, lies), frames(lies, 3) * 1.001
    with cast(torch.bfloat16):
        expected = net[0](x)[:].clone()
        drives = net[0](x)
        assert type(drives.expression.held) is Deferred
        assert drives.dtype is torch.bfloat16
    x.zero_()
    net[0].weight.data.zero_()
    net[2](net[1](drives))
    torch.testing.assert_close(drives[:], expected, rtol=0.02, atol=0.05)
    assert drives[:].float().std() > 0.1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the CUDA kernels compute in float32")
def test_what_autocast_does_not_cast_goes_the_ordinary_way():
    net, x = converted(source().double(), 2, "neither", torch.float64), frames("neither").double()
    before = RUNS["conv_fire", "cupy"]
    with cast(torch.bfloat16):
        y = net(x)
    assert RUNS["conv_fire", "cupy"] == before
    functional.reset_net(net)
    assert torch.equal(y, net(x))


def test_gradients_are_the_convolutions_own():
    net, x = converted(source(), 2, "neither"), frames("neither")
    before = RUNS["conv_fire", "cupy"]
    with cast(torch.bfloat16):
        net(x).float().sum().backward()
    assert RUNS["conv_fire", "cupy"] == before
    assert net[0].weight.grad.abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize("between", [lambda y: y * 2, lambda y: y.float(), lambda y: nn.functional.pad(y, (1, 1))])
def test_what_reads_the_drives_gets_those_of_autocast(between, monkeypatch):
    net, x, found = converted(source(), 2, "neither"), frames("neither"), []
    for said in "01":
        monkeypatch.setenv(conv_fire.VARIABLE, said)
        with cast(torch.bfloat16):
            y = between(net[0](x))[:]
        found.append(y.clone())
    assert found[0].dtype is found[1].dtype
    assert torch.equal(*found)


@torch.no_grad()
def test_a_whole_net_under_autocast_is_its_definition():
    net = source()
    policy = {"default": {"mode": "preserve", "k": 2, "weights": "uniform"}}
    fused, apart = sj_tac.convert(net, policy), sj_tac.convert(net, policy, fuse=False)
    x = frames("neither")
    with cast(torch.bfloat16):
        found, expected = fused(x), apart(x)
    assert found.dtype is expected.dtype
    assert (found.float() - expected.float()).abs().mean() < 0.02
    assert expected.float().mean() > 0.02
