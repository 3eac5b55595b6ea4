"""Neurons with a time constant for each channel: a group's weights need one, so their convolutions stay as they are."""

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import only_v2
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


MANY = {"ParametricLIFNode": (lambda: with_rates(TAUS.clone()), "whose w is a tensor of [6, 1, 1] numbers")}
# The older host's LIFNode takes numbers alone.
if host.IS_V2:
    MANY |= {
        "LIFNode": (lambda: with_taus(TAUS.clone()), "whose tau is a tensor of [6, 1, 1] numbers"),
        "LIFNode, trained": (lambda: with_taus(nn.Parameter(TAUS.clone())), "whose tau is a tensor of [6, 1, 1] numbers"),
    }


def build(last):
    torch.manual_seed(0)
    net = nn.Sequential(layer.Conv2d(2, 6, 3), neuron.LIFNode(v_threshold=0.2), layer.Conv2d(6, 6, 3), last).double()
    functional.set_step_mode(net, "m")
    return net.train()


@torch.no_grad()
def run(net):
    functional.reset_net(net)
    return net(X)


@pytest.mark.parametrize(("make", "told"), MANY.values(), ids=MANY)
@pytest.mark.parametrize("example", [None, X], ids=["no example", "example"])
@pytest.mark.parametrize("fuse", [False, True])
def test_its_convolutions_are_refused_and_the_rest_is_converted(make, told, example, fuse):
    net = build(make())
    source = run(net)
    assert 0.01 < source.mean() < 0.9
    functional.reset_net(net)
    for k in (1, 2):
        fast = sj_tac.convert(net, k=k, fuse=fuse, example_input=example)
        found = sj_tac.report(fast)
        assert found["0"].status == "converted"
        assert (found["2"].status, found["2"].reason) == ("refused", "UNSUPPORTED_NEURON")
        assert told in found["2"].detail
        assert found["2"].detail.startswith("its neuron is '3'")
        out = run(fast)
        assert "UNSUPPORTED_NEURON" in str(sj_tac.report(fast))
        if k == 1:
            torch.testing.assert_close(out, source, rtol=0, atol=0)
        else:
            definition = run(sj_tac.convert(net, k=2, fuse=False))
            torch.testing.assert_close(out, definition, rtol=0, atol=0)
            assert not torch.equal(out, source)
        assert torch.equal(run(sj_tac.restore(fast)), source)


@pytest.mark.parametrize(("make", "told"), MANY.values(), ids=MANY)
def test_a_plan_says_so(make, told):
    net = build(make())
    assert told in sj_tac.plan(net, k=2, example_input=X)["2"].detail
    assert told in sj_tac.plan(net, k=2)["2"].detail


def test_several_shapes_of_one_number_are_one():
    for shape in ((), (1,), (1, 1, 1)):
        taus = [with_taus(torch.full(shape, 2.5, dtype=torch.float64))] if host.IS_V2 else []
        for last in (*taus, with_rates(torch.zeros(shape))):
            net = build(last)
            fast = sj_tac.convert(net, k=2, example_input=X)
            assert [v.status for v in sj_tac.report(fast)] == ["converted"] * 2
            definition = run(sj_tac.convert(net, k=2, fuse=False))
            torch.testing.assert_close(run(fast), definition, rtol=0, atol=0)


@only_v2
def test_a_class_that_was_registered_decays_as_its_function_says():
    class Mean(neuron.LIFNode):
        def extra_repr(self):
            return "of channels"

        def multi_step_forward(self, x_seq):
            return super().multi_step_forward(x_seq)

    sj_tac.register_neuron(Mean, decay=lambda node: 1 - 1 / node.tau.mean())
    last = Mean(v_threshold=0.1)
    last.tau = TAUS.clone()
    assert not host.many_numbers(last)
    found = sj_tac.report(sj_tac.convert(build(last), k=2, example_input=X))
    assert [v.status for v in found] == ["converted"] * 2


@pytest.mark.skipif(not hasattr(neuron, "ILIFNode"), reason="the older host has none")
def test_the_hosts_own_registered_classes_need_one_tau_too():
    last = neuron.ILIFNode(v_threshold=0.1)
    last.tau = TAUS.clone()
    assert host.many_numbers(last)
    detail = sj_tac.plan(build(last), k=2, example_input=X)["2"].detail
    assert "(ILIFNode), whose tau is a tensor of [6, 1, 1] numbers" in detail
