"""Voltages that the user sets: numbers, tensors that broadcast, tensors in another memory format."""

import copy

import pytest
import torch
from defined import given, same
from spikingjelly.activation_based import functional, layer, neuron
from support import awake, frames, only_v2
from torch import nn

import sj_tac

X = frames(4, 3, 2, 6, 6, dtype=torch.float64)


@pytest.fixture(scope="module")
def source():
    torch.manual_seed(0)
    net = nn.Sequential(
        layer.Conv2d(2, 4, 3, padding=1, bias=False), layer.BatchNorm2d(4), neuron.LIFNode(), layer.Flatten(),
        layer.Linear(144, 5), neuron.LIFNode(),
    )  # fmt: skip
    functional.set_step_mode(net, "m")
    return awake(net.double().eval(), X)


def called(net, *voltages):
    """The output and the last voltages of a call from voltages that are set."""
    functional.reset_net(net)
    net[2].v, net[5].v = voltages
    with torch.no_grad():
        return [net(X)[:], net[2].v, net[5].v]


@pytest.mark.parametrize("mode", ["preserve", "collapse"])
@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=only_v2)])  # the older host takes floats alone
def test_a_whole_number_is_that_number(source, fuse, mode):
    fast = sj_tac.convert(source, mode, k=2, fuse=fuse)
    for number in (1, True, -1):
        expected = called(fast, float(number), float(number))
        torch.testing.assert_close(called(fast, number, number), expected)
        for node in (fast[2], fast[5]):
            node.set_reset_value("v", number)
        functional.reset_net(fast)
        torch.testing.assert_close(called(fast, fast[2].v, fast[5].v), expected)


TENSORS = {
    "by channel": (torch.linspace(0, 0.3, 4).view(4, 1, 1), torch.linspace(0, 0.3, 5)),
    "of one sample": (torch.linspace(0, 0.3, 144).view(1, 4, 6, 6), torch.linspace(0, 0.3, 5).view(1, 5)),
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_broadcast(source, name, fuse):
    voltages = [v.double() if v.is_floating_point() else v for v in TENSORS[name]]
    fast = sj_tac.convert(source, "preserve", k=1, fuse=fuse)
    torch.testing.assert_close(called(fast, *voltages), called(copy.deepcopy(source), *voltages))


@pytest.mark.parametrize(("fuse", "trains"), [(False, True), (True, True), (True, False)])
def test_gradients_with_a_voltage_in_another_memory_format(trains, fuse):
    """Of one sample, torch's BatchNorm misreads a gradient that is channels_last where its input is not."""
    torch.manual_seed(0)
    modules = [layer.Conv2d(2, 3, 3, padding=1), layer.BatchNorm2d(3), neuron.LIFNode(), layer.Conv2d(3, 3, 3, padding=1)]
    net, x = nn.Sequential(*modules), torch.rand(7, 1, 2, 8, 8, dtype=torch.float64)
    functional.set_step_mode(net, "m")
    policy = {"version": 1, "default": {"mode": "collapse", "k": 4, "spikes": "binary"}}
    fast = sj_tac.convert(awake(net.double(), x).train(), policy, fuse=fuse)
    fast[1].train(trains)
    voltage, found = fast[2].v_threshold * torch.rand(1, 3, 8, 8, dtype=torch.float64), []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        functional.reset_net(fast)
        fast[2].v = voltage.contiguous(memory_format=memory_format)
        found.append(given(fast, x, reset=False))
    same(found[1], found[0], rtol=1e-7, atol=1e-7)
