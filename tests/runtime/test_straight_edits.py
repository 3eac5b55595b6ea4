"""Edits that leave little trace: what a launch does not know must take the long way, whatever the edit was."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from straight_cases import awake, compare, each
from torch import nn
from torch.nn.utils import parametrize

import sj_tac
from sj_tac.runtime.borders import definition


def clip():
    return (torch.rand(6, 2, 2, 8, 8, generator=torch.Generator().manual_seed(3)) < 0.4).float()


def as_buffer(name, value):
    def change(node):
        node.__dict__.pop(name, None)
        node.register_buffer(name, torch.tensor(value))

    return change


def as_parameter(name, value):
    def change(node):
        node.__dict__.pop(name, None)
        node.register_parameter(name, nn.Parameter(torch.tensor(value), requires_grad=False))

    return change


def as_tensor(name, value):
    return lambda node: setattr(node, name, torch.tensor(value))


# What is put in a number's place, and what it is written to afterwards.
HELD = {
    "tau, a buffer": (as_buffer("tau", 2.0), lambda node: node.tau.fill_(5.0)),
    "tau, a parameter": (as_parameter("tau", 2.0), lambda node: node.tau.data.fill_(5.0)),
    "tau, a tensor": (as_tensor("tau", 2.0), lambda node: node.tau.fill_(5.0)),
    "v_reset, a parameter": (as_parameter("v_reset", 0.0), lambda node: node.v_reset.data.fill_(-0.5)),
    "v_threshold, a buffer": (as_buffer("v_threshold", 1.0), lambda node: node.v_threshold.fill_(0.6)),
    "decay_input, a tensor": (as_tensor("decay_input", True), lambda node: node.decay_input.fill_(False)),
    "detach_reset, a buffer": (as_buffer("detach_reset", True), lambda node: None),
    "a surrogate's forward": (
        lambda node: None,
        lambda node: setattr(node.surrogate_function, "forward", lambda h: (h >= 0.3).to(h)),
    ),
    "a parameter of another name": (lambda node: setattr(node, "w", nn.Parameter(torch.rand(3))), lambda node: None),
}


@pytest.mark.parametrize("held", HELD)
def test_numbers_that_a_neuron_holds_elsewhere(held):
    torch.manual_seed(0)
    net = sj_tac.convert(awake(), "preserve", 2)
    x, (put, write) = clip(), HELD[held]
    for node in each(net, neuron.BaseNode):
        put(node)
    assert compare(net, x) > 0.01
    with torch.no_grad():
        for node in each(net, neuron.BaseNode):
            write(node)
    compare(net, x)


class Shifted(nn.Module):
    by = 0.0

    def forward(self, w):
        return w + self.by


@pytest.mark.parametrize("how", ["parametrized", "a plain tensor"])
def test_a_plifs_w_that_is_no_parameter(how, monkeypatch):
    torch.manual_seed(0)
    net = sj_tac.convert(awake(lambda: neuron.ParametricLIFNode(surrogate_function=surrogate.ATan())), "preserve", 2)
    x = clip()
    for node in each(net, neuron.BaseNode):
        if how == "parametrized":
            parametrize.register_parametrization(node, "w", Shifted())
        else:
            w = node.w.detach().clone()
            del node._parameters["w"]
            node.w = w
    before = compare(net, x)
    monkeypatch.setattr(Shifted, "by", -2.0)
    for node in each(net, neuron.BaseNode):
        if how != "parametrized":
            node.w.sub_(2.0)
    assert compare(net, x) != before


def test_a_weight_in_front_of_the_parameter():
    torch.manual_seed(0)
    net = sj_tac.convert(awake(), "preserve", 2)
    x = clip()
    compare(net, x)
    with torch.no_grad():
        before = net(x).clone()
        functional.reset_net(net)
        for conv in each(net, nn.Conv2d):
            conv.__dict__["weight"] = conv.weight * 1.5
        found = net(x).clone()
        functional.reset_net(net)
        for conv in each(net, nn.Conv2d):
            conv._parameters["weight"].copy_(conv.__dict__.pop("weight"))
        assert torch.equal(found, net(x))
        assert not torch.equal(found, before)


PATCHED = {"torch's conv": nn.Conv2d, "the host's conv": layer.Conv2d, "the host's neuron": neuron.LIFNode}


@pytest.mark.parametrize("patched", PATCHED)
def test_a_class_whose_forward_is_patched(patched, monkeypatch):
    torch.manual_seed(0)
    net = sj_tac.convert(awake(), "preserve", 2)
    x, kind, calls = clip(), PATCHED[patched], []
    compare(net, x)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *a: (calls.append(1), forward(self, *a))[1])
    with torch.no_grad():
        net(x)
    assert len(calls) == 3


def test_a_norm_of_other_channels_has_words():
    torch.manual_seed(0)
    net = sj_tac.convert(awake(), "preserve", 2)
    x = clip()
    compare(net, x)
    for name, value in (("running_mean", torch.zeros(4)), ("running_var", torch.ones(4))):
        net[1]._buffers[name] = value
    for name in ("weight", "bias"):
        net[1]._parameters[name] = nn.Parameter(torch.ones(4))
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=r"scale|size of tensor"):
        net(x)


def test_a_statistic_that_lies_otherwise_in_the_same_memory():
    torch.manual_seed(0)
    net = sj_tac.convert(awake(), "preserve", 2)
    x = clip()
    compare(net, x)
    mean = net[1].running_mean
    mean.data = mean.data[:1].expand(8)
    assert compare(net, x) > 0.01


def test_under_another_default_device():
    torch.manual_seed(0)
    net = sj_tac.convert(awake(), "preserve", 2)
    x = clip()
    with torch.no_grad():
        expected = net(x).clone()
        functional.reset_net(net)
        with torch.device("meta"):
            found = net(x)
    assert torch.equal(found, expected)


def test_inference_mode_and_no_grad_take_turns():
    torch.manual_seed(0)
    net = sj_tac.convert(awake(lambda: neuron.ParametricLIFNode(surrogate_function=surrogate.ATan())), "preserve", 2)
    x = clip()
    with torch.inference_mode():
        first = net(x).clone()
    functional.reset_net(net)
    with definition(net), torch.no_grad():
        expected = net(x)
    assert torch.equal(first, expected)
    compare(net, x)
    functional.reset_net(net)
    net(x).sum().backward()
    assert each(net, neuron.BaseNode)[0].w.grad is not None
