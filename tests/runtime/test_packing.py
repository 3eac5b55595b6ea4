"""Convolutions of small maps with weights that stay in oneDNN's layout: the same bits, whatever becomes of the weights.

Weights are multiples of 1/64 and sums of frames have weights that are powers of two, so that every order of additions gives
the same drives: whoever convolves, on whatever processor, has the definition's bits.
"""

import copy
from unittest.mock import Mock

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from straight_cases import compare, each
from torch import nn

import sj_tac
from sj_tac.runtime import packing

CHANNELS = 32


def packs_have_torchs_bits():
    """Whether this processor convolves from packed weights to torch's own bits, which the package tries, too."""
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(n, 32, s, s, generator=generator).to(memory_format=torch.channels_last) for n, s in ((6, 4), (32, 3))
    )
    try:
        packed = torch._C._nn.mkldnn_reorder_conv2d_weight(w.to_mkldnn(), (1, 1), (1, 1), (1, 1), 1, list(x.shape))
        found = torch.ops.mkldnn._convolution_pointwise(x, packed, None, (1, 1), (1, 1), (1, 1), 1, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(found, torch.conv2d(x, w, None, 1, 1))


pytestmark = pytest.mark.skipif(
    not packs_have_torchs_bits(), reason="packed weights give other bits here, or there is no oneDNN"
)


def source(**options):
    """Three layers of small maps in channels_last, whose neurons fire."""
    torch.manual_seed(0)
    modules, options = [], {"kernel_size": 3, "padding": 1, "bias": False} | options
    for _ in range(3):
        conv = layer.Conv2d(CHANNELS, CHANNELS, **options)
        for parameter in conv.parameters():
            parameter.data.mul_(64).round_().div_(64)
        norm = layer.BatchNorm2d(CHANNELS)
        norm.running_mean.uniform_(-0.2, 0.2)
        norm.running_var.uniform_(0.05, 0.2)
        nn.init.uniform_(norm.bias, 0.0, 0.6)
        modules += [conv, norm, neuron.LIFNode(surrogate_function=surrogate.ATan())]
    net = nn.Sequential(*modules)
    functional.set_step_mode(net, "m")
    return net.eval().to(memory_format=torch.channels_last)


def converted(k=2, net=None, **more):
    return sj_tac.convert(net or source(), {"default": {"mode": "preserve", "k": k, "normalize": False}}, **more)


def frames(steps=6, batch=2, size=4):
    x = (torch.rand(steps * batch, CHANNELS, size, size) < 0.3).float()
    return x.contiguous(memory_format=torch.channels_last).unflatten(0, (steps, batch))


def known(net):
    """What each layer knows of its calls."""
    return [set(conv._tac.packing.calls.values()) for conv in each(net, nn.Conv2d)]


ALL_PACK, ALL_PLAIN = [{packing.PACKS}] * 3, [{packing.PLAIN}] * 3


@torch.no_grad()
def settled(net, *inputs):
    """Call it until nothing is tried any more."""
    for x in inputs:
        for _ in range(3):
            functional.reset_net(net)
            net(x)
    functional.reset_net(net)
    return net


def packed(k=2, **options):
    net, x = converted(k, source(**options)), frames()
    assert known(settled(net, x)) == ALL_PACK
    return net, x


@pytest.mark.parametrize(
    ("k", "options"),
    [(1, {}), (3, {"bias": True, "groups": 2}), (2, {"dilation": 2, "padding": 2}), (1, {"kernel_size": 1, "padding": 0})],
    ids=str,
)
def test_the_same_bits_as_the_definition(k, options, monkeypatch):
    """Where nobody differentiates; a copy starts anew."""
    net, x = packed(k, **options)
    others = [frames(5), frames(6, 3), frames(6, 2, size=6)]
    settled(net, *others, frames(4, 4, size=16))
    assert packing.PLAIN in known(net)[0], "a large map"
    for of in (net, copy.deepcopy(net)):
        for other in (*others, x):
            assert 0.02 < compare(of, other) < 0.9
    assert not any("pack" in key for key in net.state_dict())
    monkeypatch.setattr(packing, "_run", lambda *_: pytest.fail("it has no backward"))
    net(x).sum().backward()


LYING = (CHANNELS, CHANNELS, 3, 3)
EDITS = {
    "one number": lambda conv: conv.weight.data[3, 1, 0, 2].add_(1.0),
    "through NumPy": lambda conv: conv.weight.detach().numpy().__imul__(1.5),
    "other data": lambda conv: setattr(conv.weight, "data", conv.weight.data * 0.75),
    "another parameter": lambda conv: setattr(conv, "weight", nn.Parameter(conv.weight.detach() * 0.75)),
    "a bias": lambda conv: setattr(conv, "bias", nn.Parameter(torch.arange(CHANNELS) / 64)),
    "dilated": lambda conv: conv.__dict__.update(dilation=(2, 2), padding=(2, 2)),
    "other strides": lambda conv: setattr(
        conv.weight, "data", conv.weight.data.as_strided(LYING, torch.empty(LYING).stride())
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_becomes_of_a_layer_is_seen(edit):
    net, x = packed()
    with torch.no_grad():
        before = net(x).clone()
        EDITS[edit](net[3])
        functional.reset_net(net)
        assert not torch.equal(net(x), before)
    for _ in range(3):  # plain; laid out anew; tried, where it is a call of another kind
        compare(net, x)


@pytest.mark.parametrize("other", [lambda y: y * (1 + 1e-6), lambda y: y.contiguous()], ids=["bits", "strides"])
def test_a_kind_of_call_with_other_results_runs_as_it_did(other, monkeypatch):
    """It is tried on numbers that are drawn: sums of weights that are zero as yet are alike in any order."""
    run, net = packing._run, converted()
    monkeypatch.setattr(packing, "_run", lambda *arguments: other(run(*arguments)))
    for conv in each(net, nn.Conv2d):
        conv.weight.data.zero_()
    assert known(settled(net, frames())) == ALL_PLAIN
    assert all(conv._tac.packing.pack is None for conv in each(net, nn.Conv2d))


def test_a_build_of_torch_that_refuses(monkeypatch):
    refuses = Mock(side_effect=RuntimeError("could not create a primitive"))
    lay_out, convolve = packing._onednn()
    for onednn in (packing._OneDNN(refuses, convolve), packing._OneDNN(lay_out, refuses), None):
        monkeypatch.setattr(packing, "_onednn", lambda onednn=onednn: onednn)
        net = settled(converted(), frames())
        assert known(net) == ALL_PLAIN
        compare(net, frames())
