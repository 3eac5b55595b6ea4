"""Convolution and ``fire`` in one kernel on the CPU: to the last bit its promised order of additions.

The drives are compared with plain C (conv_cases.py) and with torch's own convolution; spikes, sums and voltages with the
reference kernel's on those drives. In bfloat16 channels go in pairs, sums are in float32, and drives are rounded once.
"""

import numpy as np
import pairs
import pytest
import shim
import torch
import torch.nn.functional as F
from conv_cases import drives_in_rows, last
from fire_cases import one_thread  # noqa: F401
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from spikingjelly.activation_based import layer
from support import node

from sj_tac.kernels import fire as kernels
from sj_tac.kernels.cpu import conv_launches, halves
from sj_tac.kernels.cpu.conv_launches import ConvLaunch
from sj_tac.kernels.layout import RUNS, is_channels_last
from sj_tac.kernels.weights import group_lengths

POOLS = [None, None, layer.MaxPool2d(2), layer.MaxPool2d(2, 2)]
pytestmark = pytest.mark.usefixtures("one_thread")
compiled = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)
needed = pytest.mark.skipif(not halves.can_multiply_pairs(), reason="the processor does not compute in bfloat16")


def convolved(inputs, outputs, kernel, frames, bias=True, density=1.0, lies=last):
    """Frames [G, N, C_in, H, W] of which so many are not zero, weights whose drives are about 1, and a bias."""
    x = torch.rand(*frames[:2], inputs, *frames[2:])
    x = x * (torch.rand(x.shape) < density)
    weight = torch.randn(outputs, inputs, *kernel) * (5 / (inputs * kernel[0] * kernel[1] * density)) ** 0.5
    if inputs == 1 and lies is last:  # frames of one channel lie in both formats
        weight = weight.to(memory_format=torch.channels_last)
    return lies(x), weight, torch.randn(outputs) * 0.2 if bias else None


def torchs(x, weight, bias, stride, padding):
    """torch's own drives [G, N, C, H, W], as they lie."""
    y = F.conv2d(x.flatten(0, 1), weight, bias, stride, padding)
    return y.unflatten(0, x.shape[:2])


def launch_of(call, of, stride, padding, columns=True):
    """The launch for a ``kernels.Call`` whose drives are convolved of these, whatever torch's convolution does.

    ``columns``: of one channel in channels_last, windows are summed by columns, as on some processors, or by rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        wanted = not call.y.is_contiguous()  # what is of one pixel or channel lies in both formats
        by = wanted and columns and of[1].shape[1] == 1
        patch.setattr(conv_launches, "_KINDS", {})
        patch.setattr(conv_launches, "_is_torchs", lambda conv, *_: (conv.last, conv.by_columns) == (wanted, by))
        patch.setattr(conv_launches, "LARGE", 0)
        patch.setattr(conv_launches, "FULL", 0)
        one = conv_launches.convolution(*of, (stride, padding, (1, 1), 1), call.y.shape, call.y.dtype)
    assert one is not None
    return ConvLaunch(kernels.operands(call, None), one)


def agree(call, of, stride, padding, one=None, columns=True):
    """Output and voltages are those of the reference kernel on the call's drives, to the last bit; gives back the output.

    ``one``: the convolution, where torch's own was found to be it; else that of ``launch_of``.
    """
    launch = launch_of(call, of, stride, padding, columns) if one is None else ConvLaunch(kernels.operands(call, None), one)
    before = RUNS["conv_fire", "numba"]
    with torch.no_grad():
        expected = kernels.run_reference(call, None)
        found = launch(of, call.v, None, (call.scale, call.shift), call.weights, getattr(call.node, "w", None))
    assert RUNS["conv_fire", "numba"] == before + 1
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.is_contiguous() if call.y.is_contiguous() else is_channels_last(ours) or ours.shape[-2:] == (1, 1)
        assert torch.equal(ours, theirs)
    return found[0]


# A kernel is compiled for each, and the first of them for nets' LIF, too. What steps does not know where drives come from.
STEPPING = [("lif", 0.0, True)]
STEPPING += [("lif", None, False), ("plif", -0.3, True), ("if", 0.0, True)] if pairs.EXHAUSTIVE else []

space = st.fixed_dictionaries(
    {
        "kernel": st.tuples(st.sampled_from([1, 2, 3, 5, 7]), st.sampled_from([1, 3, 4, 5, 7])),
        "stride": st.tuples(st.sampled_from([1, 1, 2, 3]), st.sampled_from([1, 1, 2, 3])),
        "padding": st.tuples(st.integers(0, 4), st.integers(0, 4)),
        "last": st.booleans(),
        "inputs": st.integers(1, 4),
        "columns": st.booleans(),
        "outputs": st.sampled_from([2, 3, 7, 8, 12, 16, 20, 32, 40, 64, 100, 128, 300]),
        "map": st.tuples(st.integers(3, 22), st.integers(3, 22)),
        "samples": st.integers(1, 3),
        "density": st.sampled_from([1.0, 0.5, 0.05, 0.0]),
        "bias": st.booleans(),
        "neuron": st.sampled_from(STEPPING),
        "k": st.integers(1, 4),
        "steps": st.integers(1, 9),
        "at_rest": st.booleans(),
        "affine": st.booleans(),
        "pool": st.sampled_from(range(len(POOLS))),
        "group": st.sampled_from([None, 1, 2, 3, 7]),
        "seed": st.integers(0, 99),
    }
)


def holds(case, dtype):
    """What is promised of one case of ``space``, in this dtype."""
    torch.manual_seed(case["seed"])
    lies = last if case["last"] else torch.Tensor.contiguous
    if not case["last"]:
        case = case | {"stride": (1, 1), "pool": 2}
    kernel, stride, padding = case["kernel"], case["stride"], case["padding"]
    room = [size + 2 * p - k for size, p, k in zip(case["map"], padding, kernel, strict=True)]
    assume(min(room) >= 0)
    map_ = [size // s + 1 for size, s in zip(room, stride, strict=True)]
    assume(map_[0] * map_[1] > 1)
    pool = POOLS[case["pool"]]
    assume(pool is None or min(map_) >= 2)
    # A kernel is compiled for maps of odd sizes.
    assume(pool is None or pairs.EXHAUSTIVE or not any(size % 2 for size in map_))
    lengths, channels = group_lengths(case["steps"], case["k"]), case["outputs"]
    shape = (len(lengths), case["samples"], *case["map"])
    of = convolved(case["inputs"], channels, kernel, shape, case["bias"], case["density"] or 1.0, lies)
    if not case["density"]:
        of[0].zero_()
    of = [None if some is None else some.to(dtype) for some in of]
    y = drives_in_rows(*of, stride, padding, case["last"] and case["columns"] and case["inputs"] == 1)
    assert y.dtype is dtype
    spiking = node(*case["neuron"], 2.0, v_threshold=0.4)
    call = kernels.Call(
        lies(y), spiking, lengths, None if case["at_rest"] else lies(torch.randn(y.shape[1:]) * 0.2), None,
        torch.rand(channels) + 0.5 if case["affine"] else None, torch.randn(channels) * 0.3 if case["affine"] else None,
        pool, torch.rand(case["steps"]) if case["group"] else None, case["group"] or 1,
    )  # fmt: skip
    agree(call, of, stride, padding, columns=case["columns"])


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needed)])
@settings(max_examples=2 * settings().max_examples, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(space)
def test_it_is_the_convolution_and_fire_to_the_last_bit(dtype, case):
    holds(case, dtype)


SHAPES = [
    (2, 128, (3, 3), (1, 1), (1, 1), (2, 2, 32, 32)),
    (2, 64, (3, 3), (1, 1), (1, 1), (4, 1, 33, 31)),
    (3, 32, (7, 7), (2, 2), (3, 3), (1, 2, 40, 40)),
    (4, 20, (5, 5), (1, 1), (2, 2), (2, 1, 17, 34)),
    (2, 12, (5, 5), (1, 1), (0, 0), (2, 1, 34, 34)),
    (3, 300, (1, 1), (1, 1), (0, 0), (1, 1, 16, 16)),
    (1, 20, (3, 3), (1, 1), (1, 1), (2, 2, 28, 28)),
    (1, 64, (5, 4), (2, 1), (0, 3), (2, 2, 28, 28)),
]


@pairs.parametrize(
    lie=["frames", "filters", "both", "neither"],
    shape=SHAPES if pairs.EXHAUSTIVE else SHAPES[::2],
    bias=[True, False],
    density=[1.0, 0.1],
)
def test_where_the_check_says_so_drives_are_torchs_own(lie, shape, bias, density, monkeypatch):
    """On other numbers than the check's, with zeros among them; frames, filters, both or neither are channels_last."""
    monkeypatch.setattr(conv_launches, "_KINDS", {})
    monkeypatch.setattr(conv_launches, "LARGE", 0)
    monkeypatch.setattr(conv_launches, "FULL", 0)
    inputs, outputs, kernel, stride, padding, frames = shape
    if lie == "neither" and (max(stride) > 1 or kernel == (1, 1)):
        pytest.skip("contiguous ones are of stride 1, and one pixel lies in both formats")
    torch.manual_seed(1)
    x, w, more = convolved(inputs, outputs, kernel, frames, bias, density)
    lies = torch.channels_last if lie in ("filters", "both") else torch.contiguous_format
    of = x if lie in ("frames", "both") else x.contiguous(), w.contiguous(memory_format=lies), more
    y = torchs(*of, stride, padding)
    one = conv_launches.convolution(*of, (stride, padding, (1, 1), 1), y.shape)
    if one is None:
        pytest.skip("torch's convolution of this shape takes its sums in another order on this processor")
    call = kernels.Call(y, node("lif", v_threshold=0.7), [1] * frames[0], pool=layer.MaxPool2d(2))
    assert 0.02 < agree(call, of, stride, padding, one).mean() < 0.9
    made = y.flatten(0, 1)
    assert conv_launches.differing(one, *of, made) == 0
    for at in zip(*(np.random.default_rng(0).choice(size, 3, False) for size in made.shape[1:]), strict=True):
        made[(0, *at)] = torch.nextafter(made[(0, *at)], torch.tensor(torch.inf))
    assert conv_launches.differing(one, *of, made) == 3


def exact(inputs=2, outputs=8, size=8):
    """Frames and weights whose drives are the same in every order of additions."""
    x = last(torch.randint(0, 3, (2, 2, inputs, size, size)).float())
    return x, torch.randint(-8, 9, (outputs, inputs, 3, 3)) / 16, None


OPTIONS = ((1, 1), (1, 1), (1, 1), 1)
SHAPE = (2, 2, 8, 8, 8)


def torch_convolves(patch, convolve):
    patch.setattr(conv_launches, "_KINDS", {})
    patch.setattr(conv_launches, "_FOUND", {})
    patch.setattr(torch, "conv2d", convolve)


def test_another_order_of_additions_is_found(monkeypatch):
    """Sums of the same numbers that are rounded once: a few of the last bits are others."""

    def another(x, w, bias, *options):
        return F.conv2d(x.double(), w.double(), bias, *options).float().contiguous(memory_format=torch.channels_last)

    torch_convolves(monkeypatch, another)
    assert conv_launches.convolution(*exact(), OPTIONS, SHAPE) is None
    assert list(conv_launches._FOUND.values()) == [False]


@pytest.mark.parametrize(
    ("change", "options", "shape"),
    [
        ({}, ((1, 1), (1, 1), (2, 2), 1), SHAPE),
        ({}, ((1, 1), (1, 1), (1, 1), 2), SHAPE),
        ({"filters": torch.zeros(8, 2, 9, 3)}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(8, 2, 1, 1).expand(8, 2, 3, 3)}, OPTIONS, SHAPE),
        ({"filters": torch.full((8, 2, 3, 3), torch.inf)}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(8, 2, 3, 3).double()}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(1, 2, 3, 3)}, OPTIONS, (2, 2, 1, 8, 8)),
        ({"filters": torch.zeros(8, 1, 3, 3), "frames": torch.zeros(2, 2, 1, 8, 8)}, OPTIONS, SHAPE),
        ({"frames": torch.zeros(2, 2, 2, 8, 8)}, OPTIONS, SHAPE),
        ({"frames": last(torch.zeros(2, 2, 2, 8, 16))[..., ::2]}, OPTIONS, SHAPE),
        ({"frames": last(torch.zeros(2, 0, 2, 8, 8))}, OPTIONS, SHAPE),
        ({"bias": torch.zeros(8).bfloat16()}, OPTIONS, SHAPE),
        ({}, OPTIONS, (2, 2, 8, 1, 1)),
    ],
)
def test_convolutions_that_the_kernel_does_not_know(change, options, shape, monkeypatch):
    monkeypatch.setattr(conv_launches, "_KINDS", {})
    monkeypatch.setattr(conv_launches, "_is_torchs", lambda *_: True)
    of = dict(zip(("frames", "filters", "bias"), exact(), strict=True))
    assert conv_launches.convolution(**of, options=OPTIONS, shape=SHAPE)[:10] == (2, 8, 8, 3, 3, 1, 1, 1, 1, False)
    assert conv_launches.convolution(**of | change, options=options, shape=shape) is None


def test_bfloat16_needs_a_processor_that_computes_so(monkeypatch):
    monkeypatch.setattr(conv_launches, "_is_torchs", lambda *_: True)
    for can in (True, False):
        monkeypatch.setattr(conv_launches, "_KINDS", {})
        monkeypatch.setattr(halves, "can_multiply_pairs", lambda can=can: can)
        assert (conv_launches.convolution(*exact(), OPTIONS, SHAPE, torch.bfloat16) is not None) is can
        assert conv_launches.convolution(*exact(), OPTIONS, SHAPE) is not None
        assert conv_launches.convolution(*exact(), OPTIONS, SHAPE, torch.float16) is None
