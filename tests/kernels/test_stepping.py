"""Blocks of neurons on the CPU: to the last bit what the definition's frames give, however many neurons fill them."""

import random

import pytest
import torch
from spikingjelly.activation_based import layer, neuron

from sj_tac.kernels import fire, fire_op


def lif():
    return neuron.LIFNode(tau=2.0, v_threshold=0.6, step_mode="m")


FORMATS = torch.contiguous_format, torch.channels_last
POOLS = {"no pool": None, "MaxPool2d": layer.MaxPool2d(2), "windows that overlap": layer.MaxPool2d(3, 2, 1)}
LYING = [(pool, format) for pool in POOLS for format in FORMATS]
# Fewer than fill a vector of 4, 8 or 16 lanes, as many, one more, some blocks of them and what is left over.
CHANNELS = (1, 2, 5, 7, 8, 9, 15, 16, 17, 28, 33, 64, 75, 147)


def lengths_of(draw):
    """Steps on each drive, and how many steps are summed, in the same or another rhythm."""
    k, drives = draw.choice((1, 2, 3, 8)), draw.randint(1, 4)
    lengths = [k] * drives
    lengths[-1] = draw.randint(1, k)
    return lengths, draw.choice((1, 2, k, 2 * k, 5, sum(lengths)))


def call_of(draw, node, dtype, pool, format):
    """A call of drives that excite neurons, of a random size."""
    lengths, group = lengths_of(draw)
    # One channel lies alike in both formats.
    channels = draw.choice(CHANNELS[1:] if pool == "windows that overlap" else CHANNELS)
    size = draw.randint(1, 2), channels, *((draw.choice((2, 4, 5, 8)), draw.choice((2, 3, 4, 10))))
    generator = torch.Generator().manual_seed(draw.randint(0, 10**6))
    y = torch.randn(len(lengths) * size[0], *size[1:], generator=generator).mul(0.7).add(0.05).to(dtype)
    y = y.to(memory_format=format).unflatten(0, (len(lengths), size[0]))
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    mapped = draw.random() < 0.6
    norm = [torch.rand(size[1], generator=generator, dtype=wide).add(0.5) for _ in range(2)] if mapped else [None, None]
    weights = torch.rand(sum(lengths), generator=generator, dtype=wide) if draw.random() < 0.5 else None
    v = torch.randn(size, generator=generator, dtype=wide) if draw.random() < 0.5 else None
    if weights is None:
        group = 1
    return fire.Call(y, node, lengths, v, None, *norm, POOLS[pool], weights, group)


def run(draw, node, dtype, pool, format):
    """Whether spikes, sums and voltages are the definition's to the last bit, and how many of the frames are not zero."""
    call = call_of(draw, node, dtype, pool, format)
    with torch.no_grad():
        expected = fire.run_reference(call, None)
        found = fire_op.fire_now(*fire.operands(call, None))
    shown = tuple(call.y.shape), call.lengths, call.group, call.weights is None, call.scale is None, call.v is None
    for name, a, b in zip(("output", "voltages"), expected, found, strict=True):
        assert torch.equal(a, b), (name, shown)
    return float((expected[0] != 0).float().mean())


SIZED = [(dtype, *lying) for dtype in (torch.float32, torch.float64, torch.bfloat16) for lying in LYING]


@pytest.mark.parametrize(("dtype", "pool", "format"), SIZED, ids=str)
def test_any_size_and_rhythm(dtype, pool, format):
    draw = random.Random(str((dtype, pool, format)))
    rates = [run(draw, lif(), dtype, pool, format) for _ in range(30)]
    assert 0.1 < sum(rates) / len(rates) < 0.9
