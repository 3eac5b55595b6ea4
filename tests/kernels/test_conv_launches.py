"""Convolution and ``fire`` in one kernel on the CPU: to the last bit its promised order of additions.

The drives are compared with plain C (conv_cases.py) and with torch's own convolution; spikes, sums and voltages with the
reference kernel's on those drives. In bfloat16: test_conv_launches_bfloat16.py.
"""

import numpy as np
import pairs
import pytest
import shim
import torch
import torch.nn.functional as F
from conv_cases import drives_in_rows, last
from hypothesis import assume, given, settings, strategies as st
from spikingjelly.activation_based import layer
from support import NEURONS, node

from sj_tac.kernels import fire as kernels
from sj_tac.kernels.cpu import conv_launches, costs, threads as workers
from sj_tac.kernels.cpu.conv_launches import ConvLaunch
from sj_tac.kernels.layout import RUNS, is_channels_last
from sj_tac.kernels.weights import group_lengths

POOLS = [None, None, layer.MaxPool2d(2), layer.MaxPool2d(2, 2)]
compiled = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)


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


# A kernel is compiled for each. What steps does not know where drives come from: test_stepping.py has all neurons.
STEPPING = [
    case for case in NEURONS if case in {("lif", 0.0, True), ("lif", None, False), ("plif", -0.3, True), ("if", 0.0, True)}
]
assert len(STEPPING) == 4

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
    lengths, channels = group_lengths(case["steps"], case["k"]), case["outputs"]
    shape = (len(lengths), case["samples"], *case["map"])
    of = convolved(case["inputs"], channels, kernel, shape, case["bias"], case["density"] or 1.0, lies)
    if not case["density"]:
        of[0].zero_()
    of = [None if some is None else some.to(dtype) for some in of]
    y = drives_in_rows(*of, stride, padding, case["last"] and case["columns"] and case["inputs"] == 1)
    assert y.dtype is dtype
    spiking = node(case["neuron"][0], case["neuron"][1], case["neuron"][2], 1.7, v_threshold=0.4)
    call = kernels.Call(
        lies(y), spiking, lengths, None if case["at_rest"] else lies(torch.randn(y.shape[1:]) * 0.2), None,
        torch.rand(channels) + 0.5 if case["affine"] else None, torch.randn(channels) * 0.3 if case["affine"] else None,
        pool, torch.rand(case["steps"]) if case["group"] else None, case["group"] or 1,
    )  # fmt: skip
    agree(call, of, stride, padding, columns=case["columns"])


@compiled
@settings(max_examples=150, deadline=None)
@given(space)
def test_it_is_the_convolution_and_fire_to_the_last_bit(case):
    holds(case, torch.float32)


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


@pairs.parametrize(lie=["frames", "filters", "both", "neither"], shape=SHAPES, bias=[True, False], density=[1.0, 0.1])
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


def test_drives_in_another_memory_format_are_found(monkeypatch):
    convolve = torch.conv2d
    torch_convolves(monkeypatch, lambda *a: convolve(*a).contiguous())
    assert conv_launches.convolution(*exact(), OPTIONS, SHAPE) is None


def test_each_shape_is_checked_once(monkeypatch):
    """And again where threads, oneDNN or the allowed arithmetic are others."""
    calls, convolve, threads = [], torch.conv2d, torch.get_num_threads()

    def counted(*a):
        calls.append(a[0].shape)
        return convolve(*a)

    torch_convolves(monkeypatch, counted)
    of, state = exact(), torch.get_rng_state()
    for _ in range(3):
        conv_launches.convolution(*of, OPTIONS, SHAPE)
    assert calls == [(4, 2, 8, 8)]
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are not touched"
    try:
        torch.set_num_threads(threads + 1)
        conv_launches.convolution(*exact(), OPTIONS, SHAPE)
    finally:
        torch.set_num_threads(threads)
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
        conv_launches.convolution(*exact(), OPTIONS, SHAPE)
    x, w, _ = exact()
    conv_launches.convolution(x, w, torch.zeros(8), OPTIONS, SHAPE)
    assert len(calls) == len(conv_launches._FOUND) == 4
    monkeypatch.setattr(conv_launches, "KEPT", 4)
    conv_launches.convolution(*exact(3), OPTIONS, SHAPE)
    assert len(conv_launches._FOUND) == 1


def test_large_batches_are_checked_on_some_of_their_samples(monkeypatch):
    calls, convolve = [], torch.conv2d
    torch_convolves(monkeypatch, lambda *a: calls.append(a[0].shape) or convolve(*a))
    monkeypatch.setattr(conv_launches, "COMPARED", 3 * 8 * 8 * 8 * 4 + 5)
    conv_launches.convolution(*exact(), OPTIONS, SHAPE)
    assert calls == [(3, 2, 8, 8)]


@pytest.mark.parametrize(
    ("change", "options", "shape"),
    [
        ({}, ((1, 1), (1, 1), (2, 2), 1), SHAPE),
        ({}, ((1, 1), (1, 1), (1, 1), 2), SHAPE),
        ({"filters": torch.zeros(8, 2, 9, 3)}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(8, 2, 3, 9)}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(8, 2, 1, 1).expand(8, 2, 3, 3)}, OPTIONS, SHAPE),
        ({"filters": torch.full((8, 2, 3, 3), torch.inf)}, OPTIONS, SHAPE),
        ({"filters": torch.full((8, 2, 3, 3), torch.nan)}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(8, 2, 3, 3).double()}, OPTIONS, SHAPE),
        ({"filters": torch.zeros(1, 2, 3, 3)}, OPTIONS, (2, 2, 1, 8, 8)),
        ({"filters": torch.zeros(8, 1, 3, 3), "frames": torch.zeros(2, 2, 1, 8, 8)}, OPTIONS, SHAPE),
        ({"frames": torch.zeros(2, 2, 2, 8, 8)}, OPTIONS, SHAPE),
        ({"frames": last(torch.zeros(2, 2, 2, 8, 16))[..., ::2]}, OPTIONS, SHAPE),
        ({"frames": last(torch.zeros(2, 2, 2, 8, 8)).bfloat16()}, OPTIONS, SHAPE),
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


def test_either_frames_or_filters_are_channels_last(monkeypatch):
    monkeypatch.setattr(conv_launches, "_KINDS", {})
    monkeypatch.setattr(conv_launches, "_is_torchs", lambda *_: True)
    x, w, _ = exact()
    for frames in (x, x.contiguous()):
        for filters in (w, w.to(memory_format=torch.channels_last)):
            found = conv_launches.convolution(frames, filters, None, OPTIONS, SHAPE)
            assert (found is None) == (frames.is_contiguous() and filters.is_contiguous())
            assert found is None or found.strides == frames.stride()[1:]


@pytest.mark.parametrize("order", [True, False, None])
def test_one_channel_is_summed_as_torch_does(order, monkeypatch):
    """By columns where torch does so; by rows where it does not; not at all where it does neither."""
    tried = []
    monkeypatch.setattr(conv_launches, "_KINDS", {})
    monkeypatch.setattr(conv_launches, "_is_torchs", lambda conv, *_: tried.append(conv) or conv.by_columns is order)
    frames, filters = torch.zeros(2, 2, 1, 8, 8), torch.zeros(8, 1, 3, 3).to(memory_format=torch.channels_last)
    found = conv_launches.convolution(frames, filters, None, OPTIONS, SHAPE)
    assert (None if found is None else found.by_columns) is order
    assert [some.by_columns for some in tried] == [True, False][: 1 if order else 2]


def test_uncompiled_kernels_convolve_nothing(monkeypatch):
    monkeypatch.setattr(conv_launches.config, "DISABLE_JIT", 1)
    assert conv_launches.convolution(*exact(), OPTIONS, SHAPE) is None


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work(threads):
    before = torch.get_num_threads()
    torch.manual_seed(0)
    of = exact(3, 20, 29)
    assert of[0].numel() * 20 / 3 * (costs.STEP + costs.CONVOLVED) > workers.ALONE, "less runs on one thread"
    y = torchs(*of, 1, 1)
    call = kernels.Call(y, node("lif", v_threshold=0.7), [2, 1], pool=layer.MaxPool2d(2))
    try:
        torch.set_num_threads(threads)
        assert 0.02 < agree(call, of, (1, 1), (1, 1)).mean() < 0.9
    finally:
        torch.set_num_threads(before)


def test_frames_that_are_infinite_or_no_numbers():
    """Where they are, they are in the drives; nothing else changes."""
    torch.manual_seed(0)
    of = exact()
    of[0][0, 0, 0, 3, 3], of[0][1, 1, 1, 0, 0], of[0][0, 1, 0, 7, 7] = torch.nan, torch.inf, -torch.inf
    y = torchs(*of, 1, 1)
    one = launch_of(kernels.Call(y, node("lif"), [1, 1]), of, (1, 1), (1, 1)).conv
    made = y.flatten(0, 1)
    numbers = made.isfinite()
    assert 0 < (~numbers).sum() < 300
    # Numbers that are none have many bits.
    assert conv_launches.differing(one, *of, made) <= made.isnan().sum()


def test_a_launch_refuses_what_it_was_not_made_for():
    torch.manual_seed(0)
    frames, filters, bias = exact()
    bias = torch.zeros(8)
    y = torchs(frames, filters, bias, 1, 1)
    call = kernels.Call(y, node("lif"), [2, 2])
    launch, before = launch_of(call, (frames, filters, bias), (1, 1), (1, 1)), RUNS["conv_fire", "numba"]
    wrong = [
        (frames[:1], filters, bias), (frames, filters[:2], bias), (frames, filters, None), (frames, filters, bias[:2]),
        (frames.double(), filters, bias), (frames, filters.half(), bias), (frames[..., 1:], filters, bias),
    ]  # fmt: skip
    for other in wrong:
        with pytest.raises(AssertionError):
            launch(other, None, None, (None, None), None, None)
    with pytest.raises(AssertionError):
        launch((frames, filters, bias), None, y, (None, None), None, None)
    with pytest.raises(AssertionError):
        launch((frames, filters, bias), torch.zeros(2, 8, 8, 7), None, (None, None), None, None)
    assert RUNS["conv_fire", "numba"] == before
    for other in (call._replace(residual=torch.zeros(4, *y.shape[1:])), call._replace(y=y.contiguous())):
        with pytest.raises(ValueError, match=r"one kernel got drives \[2, 2, 8, 8, 8\] of torch.float32, channels_last: "):
            ConvLaunch(kernels.operands(other, None), launch.conv)
