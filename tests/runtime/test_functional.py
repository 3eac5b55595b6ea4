"""The host's functional interface (2.0) calls neurons past their forward, with their states: it gives what a call gives."""

import pytest
import torch
from spikingjelly.activation_based import base, functional, neuron
from support import csnn, frames, only_v2

import sj_tac

pytestmark = only_v2

X = frames(4, 2, 2, 8, 8).double()
POLICIES = {
    "preserve": {"mode": "preserve", "k": 2},
    "count": {"mode": "collapse", "k": 2, "spikes": "count"},
    "binary": {"mode": "collapse", "k": 2, "spikes": "binary"},
}


def gradients(net, out):
    net.zero_grad()
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_net_by_its_states_is_the_net(policy, fuse):
    net = csnn().double().eval()
    fast = sj_tac.convert(net, {"default": POLICIES[policy]}, fuse=fuse)
    functional.reset_net(fast)
    expected = gradients(fast, fast(X))
    voltages = base.extract_memories(fast)
    functional.reset_net(fast)
    states = tuple(base.extract_memories(fast))
    (out,), after = base.to_functional_forward(fast)((X,), states)
    for a, b in zip(gradients(fast, out[:]), expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(after, voltages, strict=True):
        torch.testing.assert_close(a, b)
    assert tuple(base.extract_memories(fast)) == states  # the net's own stay at rest


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_memopts_checkpoints_are_the_net(policy, fuse):
    from spikingjelly.activation_based import memopt

    net = csnn().double().eval()
    fast = sj_tac.convert(net, {"default": POLICIES[policy]}, fuse=fuse)
    functional.reset_net(fast)
    expected = gradients(fast, fast(X))
    functional.reset_net(fast)
    memopt.optimize_memory(fast, neuron.BaseNode, lambda net: net(X), level=1, compress=False)
    functional.reset_net(fast)
    for a, b in zip(gradients(fast, fast(X)), expected, strict=True):
        torch.testing.assert_close(a, b)
