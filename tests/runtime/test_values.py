"""What a value is besides its operations: a tensor that can be copied, printed and pickled; what a report says of it."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from spikingjelly.activation_based import base, functional, neuron
from support import conv, csnn, frames, node, norm, only_v2
from torch import Tensor, nn

import sj_tac
from sj_tac.errors import PlanNotKeptWarning

X = frames(6, 2, 2, 6, 6).double()


class Uses(nn.Module):
    """Two blocks; what happens between them is given, and happens where ``when``."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(conv(2, 4), norm(4), node("lif", v_threshold=0.3))
        self.b = nn.Sequential(conv(4, 4), norm(4), node("lif", v_threshold=0.3))
        self.between, self.when = between, False

    def forward(self, x):
        x = self.a(x)
        if self.when:
            x = self.between(x)
        return self.b(x)


@pytest.mark.parametrize("place", ["spikes", "drives"])
@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_it_is_asked_copied_printed_and_pickled_as_a_tensor(policy, place):
    found = []
    for fuse in (True, False):
        net = sj_tac.convert(Uses(None).double().eval(), policy, 2, fuse=fuse)
        with torch.no_grad():
            net(X)
            functional.reset_net(net)
            x = net.a(X) if place == "spikes" else net.b[0](net.a(X))
        told = (x.shape, x.dtype, x.device, x.dim(), len(x), x.numel(), x.ndim, x.size(1), x.is_floating_point())
        twins = [copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.tensor(x.tolist()), torch.from_numpy(x.numpy())]
        assert all(type(twin) is Tensor for twin in twins)
        found.append([told, *twins, x.sum().item(), repr(x)[:20]])
        assert repr(x).startswith("tensor(")
    for one, other in zip(*found, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == pytest.approx(other) if isinstance(one, float) else one == other


def test_a_plan_that_is_not_kept_is_told_once_and_reported():
    def writes(x):
        x.add_(0.25)
        return x

    net = sj_tac.convert(Uses(writes).eval(), "preserve", 2)
    x = frames(6, 2, 2, 6, 6)
    with torch.no_grad():
        net(x)
        assert [(v.reads, v.last_read, v.last_gave) for v in sj_tac.report(net).converted] == [
            ("frames", "frames", "sums"), ("sums", "sums", "frames"),
        ]  # fmt: skip
        net.when = True
        with pytest.warns(PlanNotKeptWarning, match=r"layer 'b.0': sums .*was planned.*it was written.*made for add_"):
            net(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(x)
    verdict = sj_tac.report(net)["b.0"]
    assert verdict.last_read == "frames of a value"
    assert verdict.unplanned.startswith("slower than planned: the last call gave it frames of a value")
    assert sj_tac.report(net)["a.0"].frames_made == {"add_": 2}
    assert "slower than planned" in str(sj_tac.report(net))


@pytest.mark.parametrize("policy", ["preserve", "collapse"])
def test_nothing_of_a_call_outlives_it(policy):
    """Besides outputs, voltages and the net, no tensor of the call is alive afterwards."""
    net = sj_tac.convert(Uses(None).double().eval(), policy, 2)

    def alive():
        gc.collect()
        return sum(1 for o in gc.get_objects() if issubclass(type(o), Tensor))

    with torch.no_grad():
        net(X)
        functional.reset_net(net)
        before = alive()
        net(X)
    functional.reset_net(net)
    assert alive() <= before


# ---- the host's own ways of calling a net --------------------------------------------------------------------------------
POLICIES = {
    "preserve": {"mode": "preserve", "k": 2},
    "count": {"mode": "collapse", "k": 2, "spikes": "count"},
    "binary": {"mode": "collapse", "k": 2, "spikes": "binary"},
}


def gradients(net, out):
    net.zero_grad()
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in net.parameters())]


@only_v2
@pytest.mark.parametrize(("policy", "fuse"), [("preserve", True), ("count", True), ("binary", True), ("count", False)])
def test_a_net_by_its_states_and_in_memopts_checkpoints_is_the_net(policy, fuse):
    from spikingjelly.activation_based import memopt

    x = frames(4, 2, 2, 8, 8).double()
    fast = sj_tac.convert(csnn().double().eval(), {"default": POLICIES[policy]}, fuse=fuse)
    functional.reset_net(fast)
    expected = gradients(fast, fast(x))
    voltages = base.extract_memories(fast)
    functional.reset_net(fast)
    states = tuple(base.extract_memories(fast))
    (out,), after = base.to_functional_forward(fast)((x,), states)
    torch.testing.assert_close(gradients(fast, out[:]), expected)
    torch.testing.assert_close(list(after), list(voltages))
    assert tuple(base.extract_memories(fast)) == states  # the net's own stay at rest
    functional.reset_net(fast)
    memopt.optimize_memory(fast, neuron.BaseNode, lambda net: net(x), level=1, compress=False)
    functional.reset_net(fast)
    torch.testing.assert_close(gradients(fast, fast(x)), expected)
