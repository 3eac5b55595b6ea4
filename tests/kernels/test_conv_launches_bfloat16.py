"""Convolution and ``fire`` in one kernel on the CPU in bfloat16: pairs of channels, sums in float32, drives rounded once.

torch's own convolution depends on the processor there: with AMX it adds its terms in another order.
"""

import pytest
import torch
from conv_cases import drives_in_rows, last
from fire_cases import one_thread  # noqa: F401
from hypothesis import HealthCheck, given, settings
from support import node
from test_conv_launches import (
    OPTIONS,
    SHAPE,
    compiled,
    exact,
    holds,
    launch_of,
    space,
    torch_convolves,
)

from sj_tac.kernels import fire as kernels
from sj_tac.kernels.cpu import conv_launches, halves

pytestmark = pytest.mark.usefixtures("one_thread")
needed = pytest.mark.skipif(not halves.can_multiply_pairs(), reason="the processor does not compute in bfloat16")


def narrow(of):
    return [None if some is None else some.bfloat16() for some in of]


@needed
@compiled
@settings(max_examples=2 * settings().max_examples, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(space)
def test_it_is_the_convolution_and_fire_to_the_last_bit(case):
    holds(case, torch.bfloat16)


def without_the_smallest(y):
    """Zeros, with their sign, in the place of numbers that have not all of bfloat16's precision."""
    return torch.where(y.abs() < torch.finfo(torch.bfloat16).tiny, y * 0, y)


def promised(x, w, bias, stride, padding, *_):
    """In torch's place: the kernel's order of additions, the smallest numbers kept."""
    return last(drives_in_rows(x[None], w, bias, stride, padding)[0])


@needed
@compiled
def test_drives_of_the_smallest_numbers_are_zeros(monkeypatch):
    """And a convolution that keeps them is not the kernel's."""
    x, w, _ = narrow(exact())
    x, bias = torch.zeros_like(x), torch.linspace(-2.0, 2.0, len(w)).mul(torch.finfo(torch.float32).tiny).bfloat16()
    y = last(without_the_smallest(drives_in_rows(x, w, bias, *OPTIONS[:2])))
    assert 0 < y.count_nonzero() < y.numel()
    conv = launch_of(kernels.Call(y, node("lif"), [1, 1]), (x, w, bias), *OPTIONS[:2]).conv
    assert conv_launches.differing(conv, x, w, bias, y.flatten(0, 1)) == 0
    torch_convolves(monkeypatch, lambda *a: without_the_smallest(promised(*a)))
    assert conv_launches.convolution(x, w, bias, OPTIONS, SHAPE, torch.bfloat16) is not None
    torch_convolves(monkeypatch, promised)
    assert conv_launches.convolution(x, w, bias, OPTIONS, SHAPE, torch.bfloat16) is None


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
