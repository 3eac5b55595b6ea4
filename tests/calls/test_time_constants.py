"""Neurons with a time constant for each channel: a group's weights need one, so it is the mean of their decays."""

import pytest
import torch
from definition import Setting, define
from idioms.miniatures import by_hand
from spikingjelly.activation_based import functional, layer, neuron
from support import at_rest, only_v2
from torch import nn

import sj_tac
from sj_tac import host

TAUS = torch.linspace(1.5, 4.0, 6, dtype=torch.float64).view(6, 1, 1)
X = torch.rand(5, 3, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def with_taus(taus):
    made = neuron.LIFNode(v_threshold=0.1)
    del made.tau
    made.tau = taus
    return made


def with_rates(rates):
    made = neuron.ParametricLIFNode(v_threshold=0.1)
    made.w = nn.Parameter(rates)
    return made


# The older host's LIFNode takes numbers alone.
MANY = {
    "ParametricLIFNode": (lambda: with_rates(TAUS.clone()), "w"),
    "LIFNode": (lambda: with_taus(nn.Parameter(TAUS.clone())), "tau"),
}
CASES = [pytest.param(*MANY[name], id=name, marks=only_v2 if name == "LIFNode" else ()) for name in MANY]


def build(last):
    torch.manual_seed(0)
    net = nn.Sequential(layer.Conv2d(2, 6, 3), neuron.LIFNode(v_threshold=0.2), layer.Conv2d(6, 6, 3), last).double()
    functional.set_step_mode(net, "m")
    return net.train()


@pytest.mark.parametrize(("make", "held"), CASES)
def test_frames_are_weighed_by_the_mean_of_its_decays(make, held):
    net = build(make())
    source = at_rest(net, X)
    assert 0.01 < source.mean() < 0.9
    fast = sj_tac.convert(net, k=2, example_input=X)
    found = sj_tac.report(fast)
    assert [(v.status, v.reason) for v in found] == [("converted", None)] * 2
    assert f"{held} is a tensor of [6, 1, 1] numbers in '3': the mean of its decays is taken" in found["2"].detail
    beta = (1 - (TAUS.sigmoid() if held == "w" else 1 / TAUS)).mean().item()
    wanted = by_hand(define(net, {"0": Setting("preserve", 2, "1")}), 2, {"2": None}, beta=beta)
    out = at_rest(fast, X)
    torch.testing.assert_close(out, at_rest(wanted, X), rtol=0, atol=1e-9)
    assert not torch.equal(out, source)
    assert torch.equal(at_rest(sj_tac.restore(fast), X), source)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)], ids=str)
def test_several_shapes_of_one_number_are_one(shape):
    taus = [with_taus(torch.full(shape, 2.5, dtype=torch.float64))] if host.IS_V2 else []
    for last in (*taus, with_rates(torch.zeros(shape))):
        net = build(last)
        fast = sj_tac.convert(net, k=2, example_input=X)
        assert [v.status for v in sj_tac.report(fast)] == ["converted"] * 2
        defined = define(net, {"0": Setting("preserve", 2, "1"), "2": Setting("preserve", 2, "3")})
        torch.testing.assert_close(at_rest(fast, X), at_rest(defined, X), rtol=0, atol=1e-9)
