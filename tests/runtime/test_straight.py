"""Calls without gradients: what they give is the definition's, and never anything of before where something changed."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from straight_cases import CHANGES, NEURONS, POOLS, awake, compare, each
from support import frames
from torch import nn
from torch.nn.utils import parametrize

import sj_tac
from sj_tac.host.types import IS_V2


def clip(*shape, seed=3):
    return (torch.rand(shape or (6, 2, 2, 8, 8), generator=torch.Generator().manual_seed(seed)) < 0.4).float()


def converted(kind="LIF", pool="none", layers=3, k=2):
    torch.manual_seed(0)
    return sj_tac.convert(awake(NEURONS[kind], POOLS[pool], layers), "preserve", k)


@pytest.mark.parametrize(
    ("kind", "pool", "dtype"),
    [
        *(("LIF", pool, torch.float32) for pool in POOLS),
        *((kind, "none", torch.float32) for kind in NEURONS if kind != "LIF"),
        ("LIF", "none", torch.float64),
    ],
)
def test_it_gives_what_the_definition_gives(kind, pool, dtype):
    net = converted(kind, pool, 2).to(dtype)
    for shape in ((6, 2, 2, 16, 16), (5, 2, 2, 16, 16), (6, 3, 2, 8, 12)):
        assert 0.02 < compare(net, clip(*shape).to(dtype)) < 0.9
    if kind == "LIF" and pool != "average":
        net, x = net.to(memory_format=torch.channels_last), clip(6, 2, 2, 16, 16).to(dtype)
        assert compare(net, x) > 0.02
        assert compare(net, x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (6, 2))) > 0.02


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_calls_is_seen(change):
    net, x = converted(pool="2x2" if "pool" in change else "none"), clip()
    compare(net, x)
    with torch.no_grad():
        before = net(x).clone()
        CHANGES[change](net)
        functional.reset_net(net)
        after = net(x)
    assert compare(net, x, exact=change != "another surrogate") > 0.001
    # The older host's LIF does not call its surrogate in eval mode.
    unseen = ("store_v_seq",) if IS_V2 else ("store_v_seq", "another surrogate")
    if "pool" not in change and change not in unseen:
        assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("name", "how", "value", "later"),
    [
        ("tau", "buffer", 2.0, 5.0), ("v_reset", "parameter", 0.0, -0.5), ("v_threshold", "buffer", 1.0, 0.6),
        ("decay_input", "tensor", True, False),
    ],
)  # fmt: skip
def test_numbers_that_a_neuron_holds_elsewhere(name, how, value, later):
    net, x = converted(), clip()
    for node in each(net, neuron.BaseNode):
        del node.__dict__[name]
        if how == "tensor":
            setattr(node, name, torch.tensor(value))
        elif how == "buffer":
            node.register_buffer(name, torch.tensor(value))
        else:
            node.register_parameter(name, nn.Parameter(torch.tensor(value), requires_grad=False))
    before = compare(net, x)
    assert before > 0.01
    for node in each(net, neuron.BaseNode):
        getattr(node, name).data.fill_(later)
    assert compare(net, x) != before


class Shifted(nn.Module):
    by = 0.0

    def forward(self, w):
        return w + self.by


@pytest.mark.parametrize("how", ["through .data", "parametrized", "a plain tensor", "learned weights"])
def test_weights_that_hang_on_parameters_follow_them(how, monkeypatch):
    torch.manual_seed(0)
    weights = "learned" if how == "learned weights" else "decay"
    net = sj_tac.convert(awake(NEURONS["PLIF"]), {"default": {"mode": "preserve", "k": 2, "weights": weights}})
    for node in each(net, neuron.BaseNode):
        if how == "parametrized":
            parametrize.register_parametrization(node, "w", Shifted())
        elif how == "a plain tensor":
            w = node.w.detach().clone()
            del node._parameters["w"]
            node.w = w
    before = compare(net, clip())
    monkeypatch.setattr(Shifted, "by", -2.0)
    for conv, node in zip(each(net, nn.Conv2d), each(net, neuron.BaseNode), strict=True):
        if how == "learned weights":
            conv.tac_logits.data.copy_(torch.linspace(3.0, 0.0, conv.tac_logits.numel()))
        elif how != "parametrized":
            node.w.data.sub_(2.0)
    assert compare(net, clip()) != before


@pytest.mark.parametrize("patched", [nn.Conv2d, layer.Conv2d, neuron.LIFNode])
def test_a_class_whose_forward_is_patched(patched, monkeypatch):
    net, x, calls = converted(), clip(), []
    compare(net, x)
    forward = patched.forward
    monkeypatch.setattr(patched, "forward", lambda self, *a: (calls.append(1), forward(self, *a))[1])
    with torch.no_grad():
        net(x)
    assert len(calls) == 3


def test_a_norm_of_other_channels_has_words():
    net, x = converted(), clip()
    compare(net, x)
    for name, value in (("running_mean", torch.zeros(4)), ("running_var", torch.ones(4))):
        net[1]._buffers[name] = value
    for name in ("weight", "bias"):
        net[1]._parameters[name] = nn.Parameter(torch.ones(4))
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=r"scale|size of tensor"):
        net(x)


@pytest.mark.parametrize(
    "surrogate_function", [surrogate.LeakyKReLU(), surrogate.Sigmoid(spiking=False)], ids=["spikes", "none"]
)
def test_other_surrogates(surrogate_function):
    torch.manual_seed(0)
    net = awake(lambda: neuron.LIFNode(surrogate_function=surrogate_function))
    compare(sj_tac.convert(net, "preserve", 2), clip(), exact=surrogate_function.spiking)


def test_voltages_of_lines_have_the_hosts_shape_and_are_no_views():
    """[T, N, C, L], as transformers have them; a view could nobody detach in place."""
    torch.manual_seed(0)
    net = nn.Sequential(layer.Conv1d(2, 8, 3, padding=1), layer.BatchNorm1d(8), NEURONS["LIF"]()).eval()
    nn.init.uniform_(net[1].bias, 0.5, 2.0)
    functional.set_step_mode(net, "m")
    net = sj_tac.convert(net, "preserve", 2)
    for shape in ((5, 2, 2, 10), (6, 3, 2, 7), (6, 4, 2, 1)):
        assert 0.02 < compare(net, frames(*shape)) < 0.9
    with torch.no_grad():
        net(frames(6, 2, 2, 10))
    assert net[2].v.shape == (2, 8, 10)
    functional.detach_net(net)
    assert not net[2].v._is_view()
