"""Nets whose first layers run in one kernel, on the stand-in: nobody sees by strides, nor under autocast, that it ran."""

from itertools import product

import pairs
import pytest
import shim
import stub_cuda
import torch
from conv_cases import last
from spikingjelly.activation_based import functional, layer
from straight_cases import POOLS, awake
from torch import nn

import sj_tac
from sj_tac.kernels.gpu import conv_fire
from sj_tac.kernels.layout import RUNS, is_channels_last

pytestmark = pytest.mark.skipif(bool(shim.MISSING or stub_cuda.REAL), reason="the stand-in's")
# Whether the net, and its frames, are channels_last.
FORMATS = {"neither": (False, False), "both": (True, True), "the net": (True, False), "the frames": (False, True)}


@pytest.fixture(autouse=True)
def _device(monkeypatch, tmp_path):
    yield from stub_cuda.on_the_stub(monkeypatch, tmp_path)


def source(inputs=2, outputs=8, pool=None):
    torch.manual_seed(0)
    net = awake(pool=pool, layers=2)
    net[0] = layer.Conv2d(inputs, outputs, 3, padding=1, step_mode="m")
    net[1] = layer.BatchNorm2d(outputs, step_mode="m")
    net[1].running_var.fill_(0.1)
    nn.init.uniform_(net[1].bias, 0.0, 0.5)
    second = next(i for i, module in enumerate(net) if i and isinstance(module, nn.Conv2d))
    net[second] = layer.Conv2d(outputs, 8, 3, padding=1, step_mode="m")
    for conv in (net[0], net[second]):
        for parameter in conv.parameters():
            parameter.data = torch.randint(-8, 9, parameter.shape) / 16
    return net.eval()


def converted(net, k, lies, dtype=torch.float32):
    policy = {"default": {"mode": "preserve", "k": k, "weights": "uniform"}}
    fast = sj_tac.convert(net, policy).to(dtype)
    return fast.to(memory_format=torch.channels_last) if FORMATS[lies][0] else fast


def frames(lies, inputs=2, size=(13, 18), dtype=torch.float32):
    x = (torch.rand(6, 2, inputs, *size, generator=torch.Generator().manual_seed(1)) < 0.4).to(dtype)
    return last(x) if FORMATS[lies][1] else x


def seen(net, x, monkeypatch, said):
    """All that users see of two calls in a row: frames behind every layer, drives read afterwards, voltages."""
    monkeypatch.setenv(conv_fire.VARIABLE, said)
    functional.reset_net(net)
    found = []
    with torch.no_grad():
        for _ in range(2):
            values = [x]
            for module in net:
                values.append(module(values[-1]))
            found += [value[:].clone() for value in values[1:]]
            found += [module.v.clone() for module in net if hasattr(module, "v")]
    return found


CASES = [((2, 8), "the net", "2x2", 1), ((3, 1), "the frames", "3x3", 2)]
if pairs.EXHAUSTIVE:
    CASES = list(product([(2, 8), (1, 6), (3, 1), (4, 9)], FORMATS, POOLS, [1, 2]))


@pytest.mark.parametrize(("channels", "lies", "pool", "k"), CASES)
def test_strides_and_numbers_are_those_without_the_kernel(channels, lies, pool, k, monkeypatch):
    inputs, outputs = channels
    net, x = converted(source(inputs, outputs, POOLS[pool]), k, lies), frames(lies, inputs)
    expected = seen(net, x, monkeypatch, "0")
    before = RUNS["conv_fire", "cupy"]
    found = seen(net, x, monkeypatch, "1")
    ran = RUNS["conv_fire", "cupy"] - before
    assert ran == (4 if outputs == 1 and k > 1 else 2)  # the second layer has one input channel then; at k = 1 it alone pays
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        # Those of dimensions of size 1 say nothing.
        strides = [
            [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1] for tensor in (ours, theirs)
        ]
        assert strides[0] == strides[1]
    assert 0.02 < expected[2].mean() < 0.9
    in_last = FORMATS[lies][0] or (FORMATS[lies][1] and inputs > 1)  # folded, frames of one channel are contiguous
    assert is_channels_last(found[len(net)]) is (in_last and outputs > 1)  # the first voltages


CAST = [(torch.bfloat16, "both", "2x2", 2), (torch.float16, "neither", "none", 1)]
if pairs.EXHAUSTIVE:
    CAST = list(product([torch.bfloat16, torch.float16], FORMATS, POOLS, [1, 2]))


@pytest.mark.parametrize(("dtype", "lies", "pool", "k"), CAST)
def test_under_autocast_numbers_and_dtypes_are_those_without_the_kernel(dtype, lies, pool, k, monkeypatch):
    net, x = converted(source(2, 8, POOLS[pool]), k, lies), frames(lies)
    plain = seen(net, x, monkeypatch, "1")
    with torch.autocast(stub_cuda.DEVICE, dtype):
        expected = seen(net, x, monkeypatch, "0")
        before = RUNS["conv_fire", "cupy"]
        found = seen(net, x, monkeypatch, "1")
    assert RUNS["conv_fire", "cupy"] - before == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    assert found[0].dtype is dtype is not plain[0].dtype
    assert 0.02 < expected[2].mean() < 0.9
