"""Convolution and ``fire`` in one CUDA kernel, run by g++ behind the shim: to the last bit its promised order of additions.

The drives are compared with plain C (conv_cases.py) and, within what rounding allows, with torch's convolution in float64;
spikes, sums and voltages with the reference kernel's on those drives.
"""

from itertools import product

import pairs
import pytest
import shim
import stub_cuda
import torch
import torch.nn.functional as F
from conv_cases import drives_of, last, launch_of
from fire_cases import POOLS
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from spikingjelly.activation_based import layer
from support import NEURONS, node

from sj_tac.errors import BackendError
from sj_tac.kernels import fire as kernels
from sj_tac.kernels.gpu import conv_fire, program as cuda
from sj_tac.kernels.weights import group_lengths

pytestmark = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)
device = stub_cuda.device
# Threads of a block, of them in one plane, and in one row: the device's own, and few enough for many blocks of a small map.
TILES = [(256, 64, 32), (16, 8, 4), (8, 4, 1)]
space = st.fixed_dictionaries(
    {
        "kernel": st.sampled_from([3, 5, 7]),
        "stride": st.sampled_from([1, 2]),
        "padding": st.integers(0, 4),
        "inputs": st.integers(1, 4),
        "outputs": st.sampled_from([1, 2, 3, 4, 8, 12, 20]),
        "map": st.tuples(st.integers(3, 26), st.integers(3, 26)),
        "samples": st.integers(1, 3),
        "bias": st.booleans(),
        "neuron": st.sampled_from(NEURONS),
        "k": st.integers(1, 4),
        "steps": st.integers(1, 9),
        "at_rest": st.booleans(),
        "affine": st.booleans(),
        "pool": st.sampled_from(range(len(POOLS))),
        "group": st.sampled_from([None, 1, 2, 3, 7]),
        "dtype": st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        "tile": st.sampled_from(TILES),
        "several": st.booleans(),
        "lies": st.sampled_from(["contiguous", "last", "last", "frames last", "filters last"]),
        "seed": st.integers(0, 99),
    }
)


def convolved(inputs, outputs, kernel, frames, dtype=torch.float32, bias=True):
    """Frames of spikes' sums, weights whose drives are about 1, and a bias."""
    x = (
        torch.rand(frames[0], frames[1], inputs, *frames[2:]) * (torch.rand(frames[0], frames[1], inputs, *frames[2:]) < 0.6)
    ).to(dtype)
    weight = (torch.randn(outputs, inputs, kernel, kernel) * (5 / (inputs * kernel**2)) ** 0.5).to(dtype)
    return conv_fire.Convolved(x, weight, (torch.randn(outputs) * 0.2).to(dtype) if bias else None)


def lying(of, lies):
    """The same in other memory formats; filters of one channel, with strides that say so as well."""
    frames, filters, bias = of
    if lies in ("last", "frames last"):
        frames = last(frames)
    if lies in ("last", "filters last"):
        filters = filters.to(memory_format=torch.channels_last)
    return conv_fire.Convolved(frames, filters, bias)


def steps_of(x):
    """Strides that say anything."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def agree(call, of, stride, padding, launcher="cupy"):
    """Drives, output and voltages are the promised ones, to the last bit, and lie as without the kernel; gives the output.

    Without it: torch's convolution, and ``fire`` on what it puts out.
    """
    launch = launch_of(call, of, stride, padding, launcher)
    with torch.no_grad():
        theirs = F.conv2d(of.frames.flatten(0, 1), of.filters, of.bias, stride, padding).view(call.y.shape)
        y = torch.empty_strided(theirs.shape, theirs.stride(), dtype=theirs.dtype).copy_(call.y)
        expected = kernels.run_reference(call, None)
        beside = kernels.RUNNERS[launcher](call._replace(y=y), None)
        found = launch(of, call.v, None, (call.scale, call.shift), call.weights, getattr(call.node, "w", None))
        for ours, theirs, lies in zip(found, expected, beside, strict=True):
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            assert steps_of(ours) == steps_of(lies)
            assert torch.equal(ours, theirs)
        drives = launch.drives(of)
        assert torch.equal(drives, call.y)
        assert steps_of(drives) == steps_of(y)
    return found[0]


# Every example compiles two or three programs, about a second each.
@settings(
    max_examples=settings().max_examples // 4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(space)
def test_it_is_the_convolution_and_fire_to_the_last_bit(device, case):
    torch.manual_seed(case["seed"])
    kernel, stride, padding, k = case["kernel"], case["stride"], case["padding"], case["k"]
    map_ = [(size + 2 * padding - kernel) // stride + 1 for size in case["map"]]
    assume(min(map_) >= 1 and map_[0] * map_[1] > 1 and min(case["map"]) + 2 * padding >= kernel)
    pool = POOLS[case["pool"]]
    assume(pool is None or min(map_) >= 3)
    lengths = group_lengths(case["steps"], k)
    of = convolved(
        case["inputs"], case["outputs"], kernel, (len(lengths), case["samples"], *case["map"]), case["dtype"], case["bias"]
    )
    of = lying(of, case["lies"])
    y = drives_of(*of, stride, padding)
    spiking = node(case["neuron"][0], case["neuron"][1], case["neuron"][2], 1.7, v_threshold=0.4)
    channels = case["outputs"]
    call = kernels.Call(
        y, spiking, lengths, None if case["at_rest"] else torch.randn(y.shape[1:]) * 0.2, None,
        torch.rand(channels) + 0.5 if case["affine"] else None, torch.randn(channels) * 0.3 if case["affine"] else None,
        pool, torch.rand(case["steps"]) if case["group"] else None, case["group"] or 1,
    )  # fmt: skip
    widest = cuda.widest
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("BLOCK", "PLANE", "ROW"), case["tile"], strict=True):
            patch.setattr(conv_fire, name, size)
        if case["several"]:
            patch.setattr(cuda, "widest", lambda limit, run, total, *f, **o: widest(limit, run, total * 2**16, *f, **o))
        agree(call, of, stride, padding)


CONVOLVED = [(torch.float32, 3, 1, 5), (torch.float16, 5, 2, 0), (torch.bfloat16, 7, 2, 3)]
if pairs.EXHAUSTIVE:
    windows = (3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 0), (7, 1, 3), (7, 2, 3), (3, 1, 5)
    CONVOLVED = [(dtype, *window) for dtype in (torch.float32, torch.float16, torch.bfloat16) for window in windows]


@pytest.mark.parametrize(("dtype", "kernel", "stride", "padding"), CONVOLVED)
def test_the_drives_are_those_of_a_convolution_in_float64(device, dtype, kernel, stride, padding):
    """Within what that many roundings can do, for every drive; the promised order of additions is one of many."""
    torch.manual_seed(0)
    of = convolved(3, 8, kernel, (2, 2, 17, 20), dtype)
    found = drives_of(*of, stride, padding)
    call = kernels.Call(found, node("lif", v_threshold=0.4), [1, 1])
    with torch.no_grad():
        assert torch.equal(launch_of(call, of, stride, padding).drives(of), found)
    wide = [x.double() for x in (of.frames.flatten(0, 1), of.filters, of.bias)]
    exact = F.conv2d(*wide, stride, padding).view(found.shape)
    terms = F.conv2d(*(x.abs() for x in wide), stride, padding).view(found.shape)
    bound = terms * (3 * kernel**2 + 1) * 2.0**-24
    bound += exact.abs() * {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype] + 1e-7
    assert ((found.double() - exact).abs() <= bound).all()
    assert exact.abs().mean() > 0.4


OPTIONS = ((1, 1), (1, 1), (1, 1), 1)
SHAPE = (2, 2, 4, 8, 8)


@pytest.mark.parametrize(
    ("change", "options", "shape"),
    [
        ({}, ((3, 3), (1, 1), (1, 1), 1), SHAPE),
        ({}, ((1, 2), (1, 1), (1, 1), 1), SHAPE),
        ({}, ((1, 1), (0, 1), (1, 1), 1), SHAPE),
        ({}, ((1, 1), (1, 1), (2, 2), 1), SHAPE),
        ({}, ((1, 1), (1, 1), (1, 1), 2), SHAPE),
        ({"filters": torch.zeros(4, 2, 1, 1)}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(4, 2, 3, 5)}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(4, 5, 3, 3)}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(4, 2, 3, 3).mT}, OPTIONS, SHAPE),
        ({"frames": torch.zeros(2, 2, 2, 8, 8).mT}, OPTIONS, SHAPE),
        ({"frames": torch.zeros(2, 2, 8, 2, 8).movedim(3, 2)}, OPTIONS, SHAPE),
        ({"frames": torch.zeros(2, 2, 2, 8, 8).double()}, OPTIONS, SHAPE),
        ({"frames": torch.zeros(2, 0, 2, 8, 8)}, OPTIONS, SHAPE),
        ({}, OPTIONS, (2, 2, 4, 1, 1)),
    ],
)
def test_convolutions_that_the_kernel_does_not_know(change, options, shape):
    of = conv_fire.Convolved(torch.zeros(2, 2, 2, 8, 8), torch.zeros(4, 2, 3, 3), None)
    assert conv_fire.convolution(of, OPTIONS, SHAPE) == (2, 3, 1, 1, 8, 8, False, False, False, False)
    assert conv_fire.convolution(of._replace(**change), options, shape) is None


SHARED = [(4 * 1024, "contiguous", 3), (16 * 1024, "last", 128)]
if pairs.EXHAUSTIVE:
    SHARED = list(product([48 * 1024, 16 * 1024, 4 * 1024], ["contiguous", "last"], [128, 3]))


@pytest.mark.parametrize(("shared", "lies", "outputs"), SHARED)
def test_blocks_take_no_more_shared_memory_than_there_is(device, monkeypatch, shared, outputs, lies):
    """The stand-in refuses a launch that writes past what it asked for."""
    torch.manual_seed(0)
    monkeypatch.setattr(cuda, "SHARED", shared)
    of = lying(convolved(3, outputs, 7, (2, 1, 40, 70)), lies)
    y = drives_of(*of, 2, 3)
    affine = {"scale": torch.ones(outputs), "shift": torch.zeros(outputs)}
    call = kernels.Call(y, node("if", v_threshold=0.4), [2, 1], pool=layer.MaxPool2d(2), **affine)
    launch = launch_of(call, of, 2, 3)
    if outputs == 3:
        agree(call, of, 2, 3)
    assert 0 < launch.alone.shared <= shared


# Channels and maps of odd numbers: one warp along the channels, rows with a rest, channels one by one, two by two in several
# blocks, a patch that no thread holds.
ODD = [((2, 128, 3), (18, 16)), ((2, 12, 3), (9, 13)), ((1, 7, 3), (6, 11)), ((3, 130, 3), (5, 9)), ((4, 20, 7), (24, 31))]
WHICH = [(*which, None, torch.float32) for which in ODD[:4]] + [(*ODD[4], POOLS[2], torch.bfloat16)]
if pairs.EXHAUSTIVE:
    WHICH = [(*which, *more) for which, more in product(ODD, product(POOLS[:3], [torch.float32, torch.bfloat16]))]


@pytest.mark.parametrize(("sizes", "map_", "pool", "dtype"), WHICH)
def test_channels_and_maps_of_any_size_in_channels_last(device, monkeypatch, sizes, map_, pool, dtype):
    """A large batch is made believe, for which threads take as much as they can."""
    (inputs, outputs, kernel), widest = sizes, cuda.widest
    monkeypatch.setattr(cuda, "widest", lambda limit, run, total, *f, **o: widest(limit, run, total * 2**16, *f, **o))
    torch.manual_seed(0)
    of = lying(convolved(inputs, outputs, kernel, (3, 2, *map_), dtype), "last")
    y = drives_of(*of, 1, kernel // 2)
    call = kernels.Call(
        y, node("lif", v_threshold=0.4), [2, 2, 1], torch.randn(y.shape[1:]) * 0.2, None,
        torch.rand(outputs) + 0.5, torch.randn(outputs) * 0.3, pool, torch.rand(5), 2,
    )  # fmt: skip
    assert agree(call, of, 1, kernel // 2).float().mean() > 0.02


def test_positions_of_64_bits(device, monkeypatch):
    monkeypatch.setattr(cuda, "needs_wide", lambda *counts: True)
    torch.manual_seed(0)
    of = lying(convolved(2, 4, 3, (2, 3, 10, 12), torch.bfloat16), "last")
    call = kernels.Call(drives_of(*of, 1, 1), node("lif", v_threshold=0.4), [3, 2], pool=layer.MaxPool2d(2))
    agree(call, of, 1, 1)


def test_a_slip_in_the_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("SJ_TAC_CONV_FIRE", "yes")
    with pytest.raises(BackendError, match=r"SJ_TAC_CONV_FIRE='yes' in the environment is neither 1 nor 0; 0 forbids"):
        conv_fire.is_allowed(torch.device("cuda", 0))
