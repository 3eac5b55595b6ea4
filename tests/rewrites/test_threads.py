"""torch.fx patches the class of all modules while it traces: other threads convert and run their nets meanwhile."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from spikingjelly.activation_based import functional
from support import conv, frames, node, norm
from torch import nn

import sj_tac


class Watched(nn.Module):
    """A net whose forward calls ``meanwhile`` before its layers, so that another thread can do something during a trace."""

    def __init__(self, meanwhile):
        super().__init__()
        self.meanwhile = meanwhile
        self.layers = nn.Sequential(conv(), norm(), node("lif"))

    def forward(self, x):
        self.meanwhile()
        return self.layers(x)


def output(net, x):
    functional.reset_net(net)
    with torch.no_grad():
        return net(x)


@pytest.fixture(autouse=True)
def class_of_modules():
    before = nn.Module.__call__, nn.Module.__getattr__
    yield
    assert (nn.Module.__call__, nn.Module.__getattr__) == before


def test_another_net_runs_during_a_trace():
    x = frames(4, 2, 2, 6, 6)
    other = nn.Sequential(conv(), norm(), node("lif")).eval()
    expected, found = output(other, x), []

    def run_other():
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(output, other, x).result())

    net = Watched(run_other).eval()
    made = sj_tac.convert(net, "preserve", 1)
    assert found
    assert all(torch.equal(out, expected) for out in found)
    assert [v.mode for v in sj_tac.report(made).verdicts] == ["preserve"]
    assert torch.equal(output(made, x), output(net, x))


def test_a_layer_of_the_net_itself_runs_during_its_trace():
    """Its weights are weights there, not symbols."""
    x = frames(4, 2, 2, 6, 6)
    found = []

    def run_own():
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(lambda: net.layers[0](x).detach()).result())

    net = Watched(run_own).eval()
    expected = net.layers[0](x).detach()
    sj_tac.convert(net, "preserve", 1, inplace=True)
    assert found
    assert all(torch.equal(out, expected) for out in found)


def test_two_nets_are_converted_at_once():
    """The first would end in the middle of the second. A wait has an end, for the two may well wait for each other."""
    x, first_inside, second_inside, first_done = frames(4, 2, 2, 6, 6), *(threading.Event() for _ in range(3))

    def of_first():
        first_inside.set()
        second_inside.wait(0.5)

    def of_second():
        second_inside.set()
        first_done.wait(0.5)

    first, second = Watched(of_first).eval(), Watched(of_second).eval()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(sj_tac.convert, first, "preserve", 2)
        one.add_done_callback(lambda _: first_done.set())
        assert first_inside.wait(60)
        other = pool.submit(sj_tac.convert, second, "preserve", 2)
        made = one.result(), other.result()
    for source, net in zip((first, second), made, strict=True):
        alone = sj_tac.convert(source, "preserve", 2)
        assert [v.mode for v in sj_tac.report(net).verdicts] == ["preserve"]
        assert torch.equal(output(net, x), output(alone, x))
