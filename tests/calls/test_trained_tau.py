"""A LIFNode whose tau is trained: the weights of a group have their part of its gradient, as those of a PLIF's w do."""

import pairs
import pytest
import torch
from defined import given, same
from definition import Setting, define
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import only_v2
from torch import nn

import sj_tac

pytestmark = only_v2
X = torch.rand(7, 2, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def trained(tau=2.6, parameter=True, decay_input=True, v_reset=0.0, v_threshold=0.2):
    made = neuron.LIFNode(2.0, decay_input, v_threshold, v_reset, surrogate.ATan())
    del made.tau
    value = torch.tensor(tau, dtype=torch.float64)
    made.tau = nn.Parameter(value) if parameter else value.requires_grad_()
    return made


def build(**given):
    torch.manual_seed(1)
    net = nn.Sequential(
        layer.Conv2d(2, 4, 3), layer.BatchNorm2d(4), trained(**given), layer.Conv2d(4, 4, 3), trained(1.7, v_threshold=0.05)
    ).double()
    functional.set_step_mode(net, "m")
    # In training BatchNorm's statistics are those of groups where frames are shared, which is no matter of tau's.
    return net.eval()


def defined(net, k):
    """The definition in plain PyTorch, through which tau has its gradient."""
    return define(net, {"0": Setting("preserve", k, "2"), "3": Setting("preserve", k, "4")})


def called(net):
    """All that a call shows, and the gradients of both taus, which need be no parameters."""
    taus = {"first tau": net[2].tau, "second tau": net[4].tau}
    for tau in taus.values():
        tau.grad = None
    return given(net, X) | {name: tau.grad.clone() for name, tau in taus.items()}


GIVEN = {
    "decays its input": {},
    "adds its input": {"decay_input": False, "v_reset": None},
    "another rest": {"v_reset": -0.1},
    "a tensor": {"parameter": False},
}


@pairs.parametrize(options=GIVEN, k=[1, 2, 3], fuse=[True, False])
def test_the_gradient_of_tau_has_the_weights_part(options, k, fuse):
    source = build(**GIVEN[options])
    fast, expected = sj_tac.convert(source, k=k, fuse=fuse, example_input=X), called(defined(source, k))
    assert 0.02 < expected["output 0"].mean() < 0.8
    assert min(expected["first tau"].abs(), expected["second tau"].abs()) > 1e-3
    same(called(fast), expected, atol=1e-10)


@pytest.mark.parametrize(("fuse", "warm"), [(True, "nothing"), (True, "inference"), (False, "training")])
def test_weights_follow_an_optimizers_steps(fuse, warm):
    own, fast = defined(build(), 2), sj_tac.convert(build(), k=2, fuse=fuse)
    optimizers, before = [torch.optim.SGD(net.parameters(), 1e-6) for net in (own, fast)], None
    for _ in range(3):
        if warm == "inference":
            given(fast, X, grad=False)
        elif warm == "training":
            called(fast)
        expected = called(own)
        assert 0.02 < expected["output 0"].mean() < 0.8
        same(called(fast), expected, atol=1e-10)
        assert before is None or not torch.equal(expected["first tau"], before)
        before = expected["first tau"]
        for net, optimizer in zip((own, fast), optimizers, strict=True):
            optimizer.step()
            net[2].tau.data.add_(0.3)  # what leaves no trace
    assert own[2].tau != 2.6


@pytest.mark.parametrize(("fuse", "normalize"), [(True, True), (True, False), (False, True)])
def test_merged_steps_differentiate_by_tau(fuse, normalize):
    """A binary collapse: one step of beta^K and gamma S_K for a group."""
    torch.manual_seed(1)
    net = nn.Sequential(layer.Conv2d(2, 4, 3), trained(v_threshold=0.3)).double()
    functional.set_step_mode(net, "m")
    default = {"mode": "collapse", "k": 3, "spikes": "binary", "normalize": normalize}
    fast = sj_tac.convert(net, {"default": default}, fuse=fuse)
    expected = given(define(net, {"0": Setting("collapse", 3, "1", normalize=normalize, spikes="binary")}), X[:6])
    assert 0.02 < expected["output 0"].mean() < 0.8
    assert expected["gradient of 1.tau"].abs() > 1e-3
    same(given(fast, X[:6]), expected, atol=1e-10)
