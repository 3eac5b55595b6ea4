"""With an example input, a conversion that went wrong is an error that names the layer, and leaves the model as it was."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, csnn, frames, node, norm, same_state
from torch import nn

import sj_tac
from sj_tac.definition.convs import SharedConv
from sj_tac.definition.neurons import OperatorNeuron
from sj_tac.errors import ConversionError


@pytest.fixture
def x():
    return frames(6, 2, 2, 8, 8)


def broken(change):
    """SharedConv.forward of the layer '4' with its output changed."""
    original = SharedConv.forward

    def forward(self, x):
        y = original(self, x)
        return change(y) if self.sharing.layer == "4" else y

    return forward


@pytest.mark.parametrize("change", [lambda y: y + 0.5, lambda y: y.flip(0)])
def test_the_first_layer_that_differs_is_named(x, change, monkeypatch):
    net = csnn()
    net[0].register_forward_hook(lambda m, a, y: None)
    before = copy.deepcopy(net)
    monkeypatch.setattr(SharedConv, "forward", broken(change))
    sj_tac.convert(net, "preserve", 1)  # without an example nobody compares
    with pytest.raises(ConversionError, match=r"verification failed: .*layer '4' is the first whose output differs"):
        sj_tac.convert(net, "preserve", 1, example_input=x)
    assert [type(m) for m in net.modules()] == [type(m) for m in before.modules()]
    assert all("_tac" not in vars(m) for m in net.modules())
    assert len(net._forward_pre_hooks) == len(before._forward_pre_hooks) == 0
    assert same_state(net, before)
    with torch.no_grad():
        functional.reset_net(net)
        assert torch.equal(net(x), before(x))


def test_numbers_that_are_not_finite_are_traced_to_their_layer(x, monkeypatch):
    original = OperatorNeuron.multi_step_forward
    monkeypatch.setattr(OperatorNeuron, "multi_step_forward", lambda self, x: original(self, x) / 0)
    with pytest.raises(ConversionError, match="layer '2' puts out numbers that are not finite"):
        sj_tac.convert(csnn()[:13], "preserve", 2, example_input=x)


def test_only_the_hosts_own_memories_are_reset(x):
    class Counter(nn.Module):
        resets = 0

        def reset(self):
            self.resets += 1

        def forward(self, x):
            return x

    net = nn.Sequential(csnn(), Counter())
    sj_tac.convert(net, "preserve", 2, example_input=x, inplace=True)
    assert net[1].resets == 0


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
@pytest.mark.parametrize("k", [1, 3])
def test_verification_leaves_nothing_behind(x, policy, k):
    net = csnn().train()
    net[11].p = 0.9
    seen = []
    net[2].register_forward_hook(lambda m, a, y: seen.append(len(y)))
    random = torch.get_rng_state()
    fast = sj_tac.convert(net, policy, k, example_input=x)
    assert torch.equal(torch.get_rng_state(), random)
    assert seen == []
    assert fast.training
    assert all(isinstance(m.v, float) for m in fast.modules() if isinstance(m, neuron.BaseNode))
    assert not any(neuron.outputs or neuron.drives.numel() for neuron in fast._sj_tac.plan.measured.neurons.values())


def test_groups_several_outputs_and_numbers_that_are_no_numbers_in_the_source(x):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))

        def forward(self, x):
            y = self.body(x)
            return {"spikes": y, "rates": [y.mean(0), torch.log(y.sum(0) * 0)]}

    fast = sj_tac.convert(Several(), "preserve", 1, example_input=x)
    assert fast(x)["spikes"].shape == (6, 2, 3, 8, 8)
    policy = {"default": {"mode": "collapse", "k": 4, "emit": "groups"}}
    net = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3), layer.AvgPool2d(2, step_mode="m"))
    assert sj_tac.convert(net, policy, example_input=x)(x).shape[0] == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_part_takes_no_hooks_and_needs_none(x):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))
            self.head = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))

        def forward(self, x):
            return self.head(self.body(x).mean(0))

    net, x = Net().double().eval(), x.double()
    fast = sj_tac.convert(net, k=1, example_input=x)
    assert len(sj_tac.report(fast).converted) == 1
    with torch.no_grad():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-9, atol=1e-9)
