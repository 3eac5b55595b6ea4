"""Convolution and ``fire`` in one kernel on the CPU in bfloat16: pairs of channels, sums in float32, drives rounded once."""

import pairs
import pytest
import torch
import torch.nn.functional as F
from conv_cases import last
from hypothesis import given, settings, strategies as st
from spikingjelly.activation_based import layer
from support import node
from test_conv_launches import (
    OPTIONS,
    SHAPE,
    SHAPES,
    STEPPING,
    agree,
    compiled,
    convolved,
    exact,
    holds,
    launch_of,
    space,
    torch_convolves,
    torchs,
)

from sj_tac.kernels import fire as kernels
from sj_tac.kernels.cpu import conv_launches, halves

needed = pytest.mark.skipif(not halves.can_multiply_pairs(), reason="the processor does not compute in bfloat16")


def narrow(of):
    return [None if some is None else some.bfloat16() for some in of]


@needed
@compiled
@settings(max_examples=150, deadline=None)
@given(space, st.sampled_from(STEPPING[:2]))
def test_it_is_the_convolution_and_fire_to_the_last_bit(case, neuron):
    """Of few neurons: a kernel is compiled for each, and test_stepping.py has all of them in bfloat16."""
    holds(case | {"neuron": neuron}, torch.bfloat16)


@needed
@pairs.parametrize(lie=["both", "neither"], shape=SHAPES, bias=[True, False], density=[1.0, 0.1])
def test_where_the_check_says_so_drives_are_torchs_own(lie, shape, bias, density, monkeypatch):
    """On other numbers than the check's, with zeros among them."""
    monkeypatch.setattr(conv_launches, "_KINDS", {})
    monkeypatch.setattr(conv_launches, "LARGE", 0)
    monkeypatch.setattr(conv_launches, "FULL", 0)
    inputs, outputs, kernel, stride, padding, frames = shape
    if lie == "neither" and (max(stride) > 1 or kernel == (1, 1)):
        pytest.skip("contiguous ones are of stride 1, and one pixel lies in both formats")
    torch.manual_seed(1)
    x, w, more = narrow(convolved(inputs, outputs, kernel, frames, bias, density))
    lies = torch.channels_last if lie == "both" else torch.contiguous_format
    of = x if lie == "both" else x.contiguous(), w.contiguous(memory_format=lies), more
    y = torchs(*of, stride, padding)
    one = conv_launches.convolution(*of, (stride, padding, (1, 1), 1), y.shape, torch.bfloat16)
    if one is None:
        pytest.skip("torch's convolution of this shape takes its sums in another order on this processor")
    assert one.dtype is torch.bfloat16
    call = kernels.Call(y, node("lif", v_threshold=0.7), [1] * frames[0], pool=layer.MaxPool2d(2))
    assert 0.02 < agree(call, of, stride, padding, one).float().mean() < 0.9
    made = y.flatten(0, 1)
    assert conv_launches.differing(one, *of, made) == 0
    made[0, 1, 2, 0] += made[0, 1, 2, 0].abs() / 128 + 1e-30
    assert conv_launches.differing(one, *of, made) == 1


def in_the_order_of_channels(x, w, stride, padding):
    """A convolution in float32, rounded: of two channels the first is added first."""
    (down, along), (above, before) = stride, padding
    x, w, y = F.pad(x.float(), [before, before, above, above]), w.float(), 0
    high, wide = ((size - k) // s + 1 for size, k, s in zip(x.shape[2:], w.shape[2:], stride, strict=True))
    for row in range(w.shape[2]):
        for column in range(w.shape[3]):
            for at in range(w.shape[1]):
                read = x[:, at, row : row + down * high : down, column : column + along * wide : along]
                y = y + read[:, None] * w[None, :, at, row, column, None, None]
    return y.bfloat16().contiguous(memory_format=torch.channels_last)


@needed
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_numbers_that_cancel_tell_the_order_of_additions(shape, monkeypatch):
    """Of ordinary numbers hardly any sum differs once it is rounded."""
    inputs, outputs, kernel, stride, padding, frames = shape
    of = narrow(convolved(inputs, outputs, kernel, frames, False))
    y, options = last(torchs(*of, stride, padding)), (stride, padding, (1, 1), 1)
    conv = launch_of(kernels.Call(y, node("lif"), [1] * frames[0]), of, stride, padding).conv
    monkeypatch.setattr(torch, "conv2d", lambda x, w, *_: in_the_order_of_channels(x, w, stride, padding))
    ordinary, cancelling = (
        conv_launches._differing(conv, 2, of[1], options, draw) / y[0, 0].numel() / 2
        for draw in (conv_launches._like_normal, conv_launches._cancelling)
    )
    assert ordinary < 0.002
    assert cancelling > 0.5


def in_two_sums(x, w, bias, stride, padding, *_):
    """A convolution in float32 that adds the products with every second row of a window by themselves, rounded."""
    even = torch.arange(w.shape[2])[:, None] % 2 == 0
    found = sum(F.conv2d(x.float(), w.float() * rows, None, stride, padding) for rows in (even, ~even))
    return (found + bias.float()[:, None, None]).bfloat16().contiguous(memory_format=torch.channels_last)


@needed
def test_few_filters_of_few_numbers_tell_the_order_of_additions_too(monkeypatch):
    """All pixels of frames of ones are alike, so that there are as many different sums as filters."""
    of = narrow(convolved(1, 17, (7, 1), (2, 2, 32, 32), True))
    y, options = last(torchs(*of, (1, 1), (3, 0))), ((1, 1), (3, 0), (1, 1), 1)
    conv = launch_of(kernels.Call(y, node("lif"), [1, 1]), of, (1, 1), (3, 0)).conv
    monkeypatch.setattr(torch, "conv2d", in_two_sums)
    assert conv_launches._differing(conv, 4, of[1], options, conv_launches._cancelling) > 0.5 * y.numel()


@needed
def test_another_order_of_additions_is_found(monkeypatch):
    def another(x, w, bias, *options):
        y = F.conv2d(x.double(), w.double(), bias, *options)
        return y.bfloat16().contiguous(memory_format=torch.channels_last)

    torch_convolves(monkeypatch, another)
    assert conv_launches.convolution(*exact(), OPTIONS, SHAPE, torch.bfloat16) is None
    assert list(conv_launches._FOUND.values()) == [False]


def smallest():
    """Frames without events, and a bias on both sides of the smallest number that has all of bfloat16's precision."""
    x, w, _ = narrow(exact())
    return torch.zeros_like(x), w, torch.linspace(-2.0, 2.0, len(w)).mul(torch.finfo(torch.float32).tiny).bfloat16()


@needed
def test_drives_of_the_smallest_numbers_are_torchs_zeros():
    x, w, bias = smallest()
    y = torchs(x, w, bias, 1, 1).flatten(0, 1)
    assert 0 < y.count_nonzero() < bias.count_nonzero() * y[:, 0].numel()
    one = conv_launches.convolution(x, w, bias, OPTIONS, SHAPE, torch.bfloat16)
    assert one is not None
    assert conv_launches.differing(one, x, w, bias, y) == 0


@needed
def test_a_convolution_that_keeps_the_smallest_numbers_is_found(monkeypatch):
    def keeps(x, w, bias, *options):
        y = F.conv2d(x, w, bias, *options)
        empty = not x.any()
        return (y * 0 + bias[:, None, None]).contiguous(memory_format=torch.channels_last) if empty else y

    torch_convolves(monkeypatch, keeps)
    assert conv_launches.convolution(*smallest(), OPTIONS, SHAPE, torch.bfloat16) is None


def test_it_needs_a_processor_that_computes_so(monkeypatch):
    monkeypatch.setattr(conv_launches, "_is_torchs", lambda *_: True)
    for can in (True, False):
        monkeypatch.setattr(conv_launches, "_KINDS", {})
        monkeypatch.setattr(halves, "can_multiply_pairs", lambda can=can: can)
        assert (conv_launches.convolution(*exact(), OPTIONS, SHAPE, torch.bfloat16) is not None) is can
        assert conv_launches.convolution(*exact(), OPTIONS, SHAPE) is not None
        assert conv_launches.convolution(*exact(), OPTIONS, SHAPE, torch.float16) is None
    monkeypatch.setattr(halves, "can_multiply_pairs", lambda: True)
    x, w, _ = exact()
    for of in ((x.half(), w, None), (x, w.double(), None), (x, w * 1e39, None), (x, w, torch.zeros(8).half())):
        assert conv_launches.convolution(*of, OPTIONS, SHAPE, torch.bfloat16) is None
    found = conv_launches.convolution(x, w.bfloat16(), None, OPTIONS, SHAPE, torch.bfloat16)
    assert found is not None
    assert found.narrow


@needed
def test_a_launch_refuses_drives_of_another_dtype():
    of = exact()
    call = kernels.Call(torchs(*narrow(of), 1, 1), node("lif"), [2, 2])
    one = launch_of(call, narrow(of), (1, 1), (1, 1)).conv
    wide = kernels.Call(torchs(*of, 1, 1), node("lif"), [2, 2])
    with pytest.raises(ValueError, match=r"got drives .* of torch.float32.* it takes torch.bfloat16"):
        conv_launches.ConvLaunch(kernels.operands(wide, None), one)
