"""Convolution and ``fire`` in one CUDA kernel, run by g++ behind the shim: to the last bit its promised order of additions.

The drives are compared with plain C (conv_cases.py) and, within what rounding allows, with torch's convolution in float64;
spikes, sums and voltages with the reference kernel's on those drives.
"""

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
from sj_tac.kernels.gpu import conv_fire, launchers, program as cuda
from sj_tac.kernels.layout import RUNS
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
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 0), (7, 1, 3), (7, 2, 3), (3, 1, 5)]
)
def test_the_drives_are_those_of_a_convolution_in_float64(device, kernel, stride, padding, dtype):
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


RATES = [
    (2, 16, 3, 1, 1, (24, 32), layer.MaxPool2d(2), torch.float32),
    (3, 8, 7, 2, 3, (31, 29), layer.MaxPool2d(3, 2, 1), torch.float32),
    (2, 8, 5, 1, 2, (16, 24), None, torch.bfloat16),
    (1, 12, 3, 1, 1, (16, 16), layer.AvgPool2d(2), torch.float16),
]


@pairs.parametrize(
    launcher=launchers.NAMES, case=RATES, lies=["contiguous", "last", "frames last", "filters last"], k=[1, 2, 4]
)
def test_neurons_that_are_awake(device, launcher, case, lies, k):
    inputs, outputs, kernel, stride, padding, map_, pool, dtype = case
    torch.manual_seed(0)
    lengths = group_lengths(7, k)
    of = lying(convolved(inputs, outputs, kernel, (len(lengths), 2, *map_), dtype), lies)
    y = drives_of(*of, stride, padding)
    spiking = node("lif", v_threshold=0.7)
    call = kernels.Call(
        y, spiking, lengths, None, None, torch.rand(outputs) + 0.8, torch.randn(outputs) * 0.2, pool, torch.rand(7), 2
    )
    with torch.no_grad():
        rate = kernels.run_reference(call._replace(pool=None, weights=None), None)[0].float().mean()
    assert 0.05 < rate < 0.5
    assert agree(call, of, stride, padding, launcher).float().mean() > 0.02
    assert {by for by, *_ in device.calls} == {launcher}
    assert {kernel for _, kernel, _ in device.calls} >= {"conv_fire_forward", "conv_drives"}


def test_voltages_bias_and_sums_weights_are_those_of_each_call(device):
    """The launch is made once; whatever numbers its tensors have, wherever they lie."""
    torch.manual_seed(0)
    of = convolved(2, 4, 3, (3, 2, 8, 10))
    y = drives_of(*of, 1, 1)
    call = kernels.Call(
        y, node("plif", v_threshold=0.4), [2, 2, 1], y[0] * 0, None, torch.rand(4), torch.rand(4), None, torch.rand(5), 2
    )
    launch, found = launch_of(call, of, 1, 1), []
    for _ in range(3):
        of = conv_fire.Convolved(torch.rand(of.frames.shape), torch.randn(of.filters.shape), torch.randn(4))
        v, scale, shift, weights = torch.randn(y.shape[1:]), torch.rand(8)[::2], torch.randn(4), torch.rand(5)
        call.node.w.data.uniform_(-1, 1)
        odd = torch.cat([v.new_zeros(1), v.flatten()])[1:].view(v.shape)
        now = call._replace(y=drives_of(*of, 1, 1), v=v, scale=scale, shift=shift, weights=weights)
        with torch.no_grad():
            found.append(launch(of, odd, None, (scale, shift), weights, call.node.w))
            for ours, theirs in zip(found[-1], kernels.run_reference(now, None), strict=True):
                assert torch.equal(ours, theirs)
    assert not torch.equal(found[0][0], found[1][0])


def test_a_launch_refuses_what_it_was_not_made_for(device):
    torch.manual_seed(0)
    of = convolved(2, 4, 3, (2, 2, 8, 8))
    call = kernels.Call(drives_of(*of, 1, 1), node("lif"), [2, 2])
    launch, before = launch_of(call, of, 1, 1), RUNS["conv_fire", "cupy"]
    wrong = [
        of._replace(frames=of.frames[:1]), of._replace(filters=of.filters[:2]), of._replace(bias=None),
        of._replace(bias=of.bias[:2]), of._replace(frames=of.frames.half()), of._replace(frames=of.frames.transpose(3, 4)),
    ]  # fmt: skip
    for other in wrong:
        with pytest.raises(AssertionError):
            launch(other, None, None, (None, None), None, None)
        with pytest.raises(AssertionError):
            launch.drives(other)
    with pytest.raises(AssertionError):
        launch(of, None, call.y, (None, None), None, None)
    assert RUNS["conv_fire", "cupy"] == before
    residual = call._replace(residual=torch.zeros(4, *call.y.shape[1:]))
    with pytest.raises(
        ValueError, match=r"got drives \[2, 2, 4, 8, 8\], a residual: True, merged steps: False; it takes maps"
    ):
        launch_of(residual, of, 1, 1)


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


@pytest.mark.parametrize("shared", [48 * 1024, 16 * 1024, 4 * 1024])
@pytest.mark.parametrize("lies", ["contiguous", "last"])
@pytest.mark.parametrize("outputs", [128, 3])
def test_blocks_take_no_more_shared_memory_than_there_is(device, monkeypatch, shared, outputs, lies):
    """The stand-in refuses a launch that writes past what it asked for."""
    torch.manual_seed(0)
    monkeypatch.setattr(cuda, "SHARED", shared)
    of = lying(convolved(3, outputs, 7, (2, 1, 40, 70)), lies)
    y = drives_of(*of, 2, 3)
    call = kernels.Call(
        y,
        node("if", v_threshold=0.4),
        [2, 1],
        pool=layer.MaxPool2d(2),
        scale=torch.ones(outputs),
        shift=torch.zeros(outputs),
    )
    launch = launch_of(call, of, 2, 3)
    if outputs == 3:
        agree(call, of, 2, 3)
    assert 0 < launch.alone.shared <= shared


# Channels and maps of odd numbers, and what sets of slots, threads and numbers held ahead they come to without a pool.
ODD = {
    "one warp along the channels, whole rows": ((2, 128, 3), (18, 16), {"DEEP": 4, "TZ": 32, "FITS": 1, "AHEAD": 1}),
    "rows with a rest": ((2, 12, 3), (9, 13), {"DEEP": 2, "TZ": 3, "FITS": 0}),
    "channels one by one": ((1, 7, 3), (6, 11), {"WIDTH_V": 1, "TZ": 7, "FITS": 0}),
    "two by two, in several blocks": ((3, 130, 3), (5, 9), {"WIDTH_V": 2, "TZ": 33}),
    "a patch that no thread holds": ((4, 20, 7), (24, 31), {"AHEAD": 0, "TZ": 5}),
}


@pytest.mark.parametrize("which", ODD)
@pytest.mark.parametrize("pool", [None, layer.MaxPool2d(2), layer.MaxPool2d(3, 2, 1)], ids=["none", "2x2", "3x3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_and_maps_of_any_size_in_channels_last(device, monkeypatch, which, pool, dtype):
    """A large batch is made believe, for which threads take as much as they can."""
    (inputs, outputs, kernel), map_, macros = ODD[which]
    widest, seen = cuda.widest, []
    monkeypatch.setattr(cuda, "widest", lambda limit, run, total, *f, **o: widest(limit, run, total * 2**16, *f, **o))
    program = cuda.program
    monkeypatch.setattr(cuda, "program", lambda name, **m: (seen.append((name, m)), program(name, **m))[1])
    torch.manual_seed(0)
    of = lying(convolved(inputs, outputs, kernel, (3, 2, *map_), dtype), "last")
    y = drives_of(*of, 1, kernel // 2)
    call = kernels.Call(
        y, node("lif", v_threshold=0.4), [2, 2, 1], torch.randn(y.shape[1:]) * 0.2, None,
        torch.rand(outputs) + 0.5, torch.randn(outputs) * 0.3, pool, torch.rand(5), 2,
    )  # fmt: skip
    assert agree(call, of, 1, kernel // 2).float().mean() > 0.02
    found = next(m for name, m in seen if name == "conv_fire_forward")
    assert found["LAST"]
    if pool is None:
        assert {name: found[name] for name in macros} == macros


@pytest.mark.parametrize("lies", ["contiguous", "last"])
def test_positions_of_64_bits(device, monkeypatch, lies):
    monkeypatch.setattr(cuda, "needs_wide", lambda *counts: True)
    torch.manual_seed(0)
    of = lying(convolved(2, 4, 3, (2, 3, 10, 12), torch.bfloat16), lies)
    call = kernels.Call(drives_of(*of, 1, 1), node("lif", v_threshold=0.4), [3, 2], pool=layer.MaxPool2d(2))
    agree(call, of, 1, 1)


def test_a_frame_that_overflows_32_bits_alone_makes_positions_wide():
    one = conv_fire.Convolution(4, 3, 2, 1, 30000, 30000, False)
    y = torch.empty(1).expand(1, 1, 1, 15000, 15000)
    o = kernels.operands(kernels.Call(y, node("lif"), [1]), None)
    assert conv_fire.ConvFire(o, one).common["WIDE"] is True
    assert not conv_fire.ConvFire(o, one._replace(inputs=1, height=3000)).common["WIDE"]


@pytest.mark.parametrize(("said", "allowed"), [(None, True), ("", True), ("0", False), ("1", True)])
def test_the_variable_forbids_it(monkeypatch, said, allowed):
    if said is None:
        monkeypatch.delenv(conv_fire.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(conv_fire.VARIABLE, said)
    assert conv_fire.is_allowed(torch.device("cuda", 0)) is allowed
    assert conv_fire.is_allowed(torch.device("cpu")) is allowed
    assert conv_fire.is_allowed(torch.device("meta")) is False


def test_a_slip_in_the_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("SJ_TAC_CONV_FIRE", "yes")
    with pytest.raises(BackendError, match=r"SJ_TAC_CONV_FIRE='yes' in the environment is neither 1 nor 0; 0 forbids"):
        conv_fire.is_allowed(torch.device("cuda", 0))
