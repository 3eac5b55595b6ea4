"""The registers that step on the CPU: to the last bit what the definition's frames give, however numbers fill them."""

import math
import random

import pairs
import pytest
import torch
from spikingjelly.activation_based import layer, neuron

from sj_tac.kernels import fire
from sj_tac.kernels.cpu import forward, stepping
from sj_tac.kernels.cpu.launches import Launch
from sj_tac.kernels.cpu.registers import LANES

NODES = {
    "LIF": lambda: neuron.LIFNode(tau=2.0, v_threshold=0.6, step_mode="m"),
    "LIF, tau 3": lambda: neuron.LIFNode(tau=3.0, v_threshold=0.6, step_mode="m"),
    "LIF, drives not divided": lambda: neuron.LIFNode(tau=3.0, decay_input=False, v_threshold=0.9, step_mode="m"),
    "LIF, soft reset": lambda: neuron.LIFNode(v_threshold=0.6, v_reset=None, step_mode="m"),
    "IF": lambda: neuron.IFNode(v_reset=0.1, step_mode="m"),
    "PLIF": lambda: neuron.ParametricLIFNode(init_tau=2.7, v_threshold=0.6, step_mode="m"),
    "PLIF, drives not divided": lambda: neuron.ParametricLIFNode(decay_input=False, v_threshold=0.9, step_mode="m"),
}
FORMATS = torch.contiguous_format, torch.channels_last
POOLS = {"no pool": None, "MaxPool2d": layer.MaxPool2d(2), "windows that overlap": layer.MaxPool2d(3, 2, 1)}
# Contiguous, windows that overlap are for another kernel.
LYING = [(pool, format) for pool in POOLS for format in FORMATS if pool != "windows that overlap" or format is FORMATS[1]]
# Fewer than fill a register, as many, one more, some blocks of them and what is left over.
CHANNELS = sorted({1, 2, 5, LANES - 1, LANES, LANES + 1, 2 * LANES, 3 * LANES + 4, 4 * LANES, 9 * LANES + 3})


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
        found = Launch(fire.operands(call, None))(call.y, call.v, None, (call.scale, call.shift))
    shown = tuple(call.y.shape), call.lengths, call.group, call.weights is None, call.scale is None, call.v is None
    for name, a, b in zip(("output", "voltages"), expected, found, strict=True):
        assert torch.equal(a, b), (name, shown)
    return float((expected[0] != 0).float().mean())


@pytest.mark.parametrize(("pool", "format"), LYING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_size_and_rhythm(dtype, pool, format):
    draw = random.Random(str((dtype, pool, format)))
    rates = [run(draw, NODES["LIF"](), dtype, pool, format) for _ in range(40)]
    assert 0.1 < sum(rates) / len(rates) < 0.9


# A kernel is compiled for each.
@pairs.parametrize(name=NODES, pool=POOLS, dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_any_neuron(name, pool, dtype):
    draw, wide = random.Random(name), torch.float32 if dtype is torch.bfloat16 else dtype
    rates = [run(draw, NODES[name]().to(wide), dtype, pool, torch.channels_last) for _ in range(15)]
    assert 0.05 < sum(rates) / len(rates) < 0.9


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("pool", POOLS)
@torch.no_grad()
def test_sums_in_another_dtype_than_drives(pool, dtypes):
    draw, (read, written), fired = random.Random(pool), dtypes, []
    for _ in range(10):
        call = call_of(draw, NODES["LIF"](), read, pool, torch.channels_last)
        out, v = fire.run_reference(call._replace(y=call.y.float()), None)
        found = Launch(fire.operands(call, None), written)(call.y, call.v, None, (call.scale, call.shift))
        assert found[0].dtype is written
        assert torch.equal(found[0], out.to(written))
        assert torch.equal(found[1], v)
        fired.append((out != 0).float().mean().item())
    assert 0.1 < sum(fired) / len(fired) < 0.95


def test_what_other_kernels_run_is_refused():
    y = torch.randn(2, 1, 4, 6, 6)
    of_contiguous = fire.Call(y, NODES["LIF"](), [1, 1], pool=POOLS["windows that overlap"])
    last = y.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, (2, 1))
    with_residual = of_contiguous._replace(y=last, residual=last.clone())
    for call in of_contiguous, with_residual:
        with pytest.raises(ValueError, match="in registers"):
            Launch(fire.operands(call, None))


def test_blocks_of_several_registers_are_among_the_sizes():
    assert any(c // LANES > stepping.WINDOWS and c % LANES for c in CHANNELS)
    assert {c % LANES for c in CHANNELS} > {0, 1, LANES - 1}


@pairs.parametrize(
    size=[(2, 128, 34, 34), (3, 40, 60, 50), (1, 33, 101, 92)], dtype=[torch.float32, torch.float64, torch.bfloat16],
    lying=LYING, at_rest=[True, False],
)  # fmt: skip
@torch.no_grad()
def test_voltages_of_large_maps(size, dtype, lying, at_rest):
    """Those that are streamed past the caches, and those that are not; twice, the second from the first."""
    pool, format = lying
    generator = torch.Generator().manual_seed(0)
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    y = torch.randn(2 * size[0], *size[1:], generator=generator).add(0.3).to(dtype)
    y = y.to(memory_format=format).unflatten(0, (2, size[0]))
    v = None if at_rest else torch.randn(size, generator=generator).mul(0.3).to(wide)
    assert math.prod(size) * wide.itemsize >= forward.LARGE
    for _ in range(2):
        call = fire.Call(y, NODES["LIF"](), [2, 1], v, pool=POOLS[pool])
        expected = fire.run_reference(call, None)
        found = Launch(fire.operands(call, None))(call.y, call.v, None, (None, None))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert 0.1 < (expected[0] != 0).float().mean() < 0.9
        v = found[1]
