"""Numbers of a neuron that are tensors, by channel or by place: they broadcast as in the source."""

import copy

import pytest
import torch
from defined import defined, given, same
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import awake, only_v2
from torch import nn

import sj_tac

T, N = 4, 3


def _lif():
    return neuron.LIFNode(tau=2.0, detach_reset=True, surrogate_function=surrogate.ATan())


def _convs(conv, norm, channels):
    return nn.Sequential(conv(2, channels, 3, padding=1, bias=False), norm(channels), _lif())


def _linear():
    return nn.Sequential(
        *_convs(layer.Conv2d, layer.BatchNorm2d, 4), layer.Flatten(), layer.Linear(144, 10), _lif(), layer.Linear(10, 2)
    )


# A net, a frame of one sample, the shape of a number by channel or by place. Where sizes are alike, the wrong dimension
# broadcasts without a word.
NETS = {
    "Linear, by sample": (_linear, (2, 6, 6), (N, 10)),
    "lines, C == L": (lambda: _convs(layer.Conv1d, layer.BatchNorm1d, 6), (2, 6), (6, 1)),
    "lines, by place": (lambda: _convs(layer.Conv1d, layer.BatchNorm1d, 6), (2, 5), (5,)),
    "volumes, C == N": (lambda: _convs(layer.Conv3d, layer.BatchNorm3d, N), (2, 4, 5, 6), (N, 1, 1, 1)),
    "maps": (lambda: _convs(layer.Conv2d, layer.BatchNorm2d, 6), (2, 5, 5), (6, 1, 1)),
}
NAMES = pytest.mark.parametrize("name", NETS)


def made(name):
    """A net, its frames, and numbers by place for its last neuron, of about 1."""
    build, frame, shape = NETS[name]
    torch.manual_seed(0)
    net, x = build(), torch.rand(T, N, *frame, dtype=torch.float64)
    functional.set_step_mode(net, "m")
    return awake(net.double().eval(), x), x, 0.5 + torch.rand(shape, dtype=torch.float64)


def last_neuron(net):
    return [m for m in net if isinstance(m, neuron.LIFNode)][-1]


def called(net, x, grad):
    """All that two calls show."""
    return given(net, x, grad, lambda x: (net(x), net(x.flip(0))))


def check(fast, net, x, grads=(False, True)):
    for grad in grads:
        same(called(fast, x, grad), called(net, x, grad), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("fuse", [True, False])
@NAMES
def test_a_threshold_by_place(name, fuse):
    net, x, numbers = made(name)
    fast = sj_tac.convert(net, "preserve", k=1, fuse=fuse, example_input=x)
    last_neuron(net).v_threshold = last_neuron(fast).v_threshold = numbers * last_neuron(net).v_threshold
    check(fast, net, x)
    assert called(net, x, False)["output 0"].any()
    check(sj_tac.convert(copy.deepcopy(net), "preserve", k=1, fuse=fuse, example_input=x), net, x, [True])


@NAMES
def test_a_threshold_by_place_behind_a_collapse(name):
    net, x, numbers = made(name)
    for spikes in ("count", "binary"):
        policy = {"version": 1, "default": {"mode": "collapse", "k": 2, "spikes": spikes}}
        fast = sj_tac.convert(net, policy, example_input=x)
        wanted = defined(net, fast)
        last_neuron(wanted).v_threshold = last_neuron(fast).v_threshold = numbers * last_neuron(net).v_threshold
        check(fast, wanted, x, [True])


@only_v2
@NAMES
def test_a_surrogates_alpha_or_a_reset_by_place(name):
    net, x, numbers = made(name)
    fused, unfused = (sj_tac.convert(net, "preserve", k=1, fuse=fuse, example_input=x) for fuse in (True, False))
    for each in (net, fused, unfused):
        last_neuron(each).surrogate_function.alpha = 2 * numbers
    check(fused, net, x, [True])
    check(unfused, net, x, [True])
    last_neuron(net).v_reset = last_neuron(fused).v_reset = -0.2 * numbers
    check(fused, net, x)
