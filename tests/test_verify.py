"""With an example input, a conversion that went wrong is an error that names the layer, and leaves the model as it was."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, csnn, frames, node, norm, same_state
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError
from sj_tac.kernels import fire_op
from sj_tac.runtime.drives import SharedDriveSite
from sj_tac.runtime.swapped import TACLIFNode


@pytest.fixture
def x():
    return frames(6, 2, 2, 8, 8)


def broken(change):
    """SharedDriveSite.forward of the layer '4' with its output changed."""
    original = SharedDriveSite.forward

    def forward(self, x):
        y = original(self, x)
        return change(y) if self._tac.name == "4" else y

    return forward


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("k", "change", "message"),
    [
        (2, lambda y: y[..., :-1], r"layer '4' puts out \(\(6, 2, 4, 4, 3\),\), the source \(\(6, 2, 4, 4, 4\),\)"),
        (1, lambda y: y + 1e-3, "layer '4' is the first whose output differs from the source's at k=1"),
        (1, lambda y: y.flip(0), "layer '4' is the first whose output differs from the source's at k=1"),
        (2, lambda y: y.no_such_thing, r"does not run on example_input of shape \[6, 2, 2, 8, 8\] in module '4'"),
    ],
)
def test_the_first_layer_that_differs_is_named(x, k, change, message, inplace, monkeypatch):
    net = csnn()
    net[0].register_forward_hook(lambda m, a, y: None)
    before = copy.deepcopy(net)
    monkeypatch.setattr(SharedDriveSite, "forward", broken(change))
    sj_tac.convert(net, "preserve", k)  # without an example nobody looks
    with pytest.raises(ConversionError, match="verification failed: .*" + message):
        sj_tac.convert(net, "preserve", k, example_input=x, inplace=inplace)
    assert [type(m) for m in net.modules()] == [type(m) for m in before.modules()]
    assert all("_tac" not in vars(m) for m in net.modules())
    assert len(net._forward_pre_hooks) == len(before._forward_pre_hooks) == 0
    assert same_state(net, before)
    with torch.no_grad():
        functional.reset_net(net)
        assert torch.equal(net(x), before(x))


def test_a_fault_of_the_fused_kernels_is_told_from_one_of_the_layers(x, monkeypatch):
    original = fire_op.fire_now

    def fire_now(*arguments):
        out, v = original(*arguments)
        return out * float("nan"), v

    monkeypatch.setattr(fire_op, "fire_now", fire_now)
    net = csnn()[:13]  # ends with Linear: a neuron makes a spike or none of anything
    with pytest.raises(ConversionError, match=r"failed in the fused kernels alone: the output is not finite.*fuse=False"):
        sj_tac.convert(net, "preserve", 2, example_input=x)
    assert len(sj_tac.report(sj_tac.convert(net, "preserve", 2, example_input=x, fuse=False)).converted) == 3


def test_numbers_that_are_not_finite_are_traced_to_their_layer(x, monkeypatch):
    original = TACLIFNode.multi_step_forward
    monkeypatch.setattr(TACLIFNode, "multi_step_forward", lambda self, x: original(self, x) / 0)
    with pytest.raises(ConversionError, match="layer '2' puts out numbers that are not finite, the source's are"):
        sj_tac.convert(csnn()[:13], "preserve", 2, example_input=x)


def test_an_interrupted_verification_leaves_the_model_as_it_was(x, monkeypatch):
    net = csnn()
    monkeypatch.setattr(fire_op, "fire_now", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        sj_tac.convert(net, "preserve", 2, example_input=x, inplace=True)
    assert all("_tac" not in vars(m) for m in net.modules())


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
    assert not any(t is not None and t.numel() > 64 for t in [*fast._sj_tac.analysis.seen.output])
    assert fast._sj_tac.analysis.seen.calls == []


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
