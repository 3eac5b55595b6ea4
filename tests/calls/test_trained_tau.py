"""A LIFNode whose tau is trained: the weights of a group have their part of its gradient, as those of a PLIF's w do."""

import copy

import pairs
import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import only_v2
from torch import nn

import sj_tac

pytestmark = only_v2
X = torch.rand(7, 2, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LOSS = torch.linspace(0.5, 2, 7, dtype=torch.float64).view(7, 1, 1, 1, 1)


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


class Own(nn.Module):
    """The definition in plain PyTorch: sums of groups, convolutions, and the steps of a leaky neuron."""

    def __init__(self, net, k):
        super().__init__()
        self.net, self.k = copy.deepcopy(net), k

    def summed(self, x, tau):
        beta, groups = 1 - 1 / tau, []
        for begin in range(0, len(x), self.k):
            group = x[begin : begin + self.k]
            powers = [beta**j for j in reversed(range(len(group)))]
            total = sum(w * frame for w, frame in zip(powers, group, strict=True)) / sum(powers)
            groups += [total] * len(group)
        return torch.stack(groups)

    def steps(self, node, drives):
        rest = 0.0 if node.v_reset is None else node.v_reset
        v, spikes = torch.full_like(drives[0], rest), []
        for x in drives:
            h = v + (x - (v - rest)) / node.tau if node.decay_input else v - (v - rest) / node.tau + x
            spikes.append(node.surrogate_function(h - node.v_threshold))
            s = spikes[-1]
            v = h - s * node.v_threshold if node.v_reset is None else (1 - s) * h + s * node.v_reset
        return torch.stack(spikes)

    def forward(self, x):
        conv1, norm, lif1, conv2, lif2 = self.net
        x = self.steps(lif1, norm(conv1(self.summed(x, lif1.tau))))
        return self.steps(lif2, conv2(self.summed(x, lif2.tau)))


def grads(net, modules):
    functional.reset_net(net)
    for p in net.parameters():
        p.grad = None
    taus = [modules[2].tau, modules[4].tau]
    for tau in taus:
        tau.grad = None
    x = X.clone().requires_grad_()
    out = net(x)
    (out * LOSS).square().sum().backward()
    weights = [modules[0].weight.grad, modules[1].weight.grad, modules[3].weight.grad]
    return [out.detach(), x.grad, *[tau.grad for tau in taus], *weights]


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


GIVEN = {
    "decays its input": {},
    "adds its input": {"decay_input": False, "v_reset": None},
    "another rest": {"v_reset": -0.1},
    "a tensor": {"parameter": False},
}


@pairs.parametrize(given=GIVEN, k=[1, 2, 3], fuse=[True, False])
def test_the_gradient_of_tau_has_the_weights_part(given, k, fuse):
    given = GIVEN[given]
    own, fast = Own(build(**given), k), sj_tac.convert(build(**given), k=k, fuse=fuse, example_input=X)
    expected = grads(own, own.net)
    assert 0.02 < expected[0].mean() < 0.8
    assert all(tau.abs() > 1e-3 for tau in expected[2:4])
    same(grads(fast, fast), expected)


@pytest.mark.parametrize(("fuse", "warm"), [(True, "nothing"), (True, "inference"), (False, "training")])
def test_weights_follow_an_optimizers_steps(fuse, warm):
    own = Own(build(), 2)
    fast = sj_tac.convert(build(), k=2, fuse=fuse)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-6) for net in (own, fast)]
    before = None
    for _ in range(3):
        if warm == "inference":
            with torch.no_grad():
                functional.reset_net(fast)
                fast(X)
        elif warm == "training":
            grads(fast, fast)
        expected = grads(own, own.net)
        assert 0.02 < expected[0].mean() < 0.8
        same(grads(fast, fast), expected)
        with torch.no_grad():
            functional.reset_net(fast)
            same([fast(X)], [own(X)])
        assert before is None or not torch.equal(expected[2], before)
        before = expected[2]
        for net, optimizer in zip((own.net, fast), optimizers, strict=True):
            optimizer.step()
            net[2].tau.data.add_(0.3)  # what leaves no trace
    assert own.net[2].tau != 2.6


@pytest.mark.parametrize(("fuse", "normalize"), [(True, True), (True, False), (False, True)])
def test_merged_steps_differentiate_by_tau(fuse, normalize):
    """A binary collapse: one step of beta^K and gamma S_K for a group."""
    policy = {"default": {"mode": "collapse", "k": 3, "spikes": "binary", "normalize": normalize, "emit": "groups"}}
    torch.manual_seed(1)
    net = nn.Sequential(layer.Conv2d(2, 4, 3), trained(v_threshold=0.3)).double()
    functional.set_step_mode(net, "m")
    fast = sj_tac.convert(net, policy, fuse=fuse)
    fast(X[:6]).square().sum().backward()
    found = [fast[1].tau.grad, fast[0].weight.grad]

    conv, node = net
    beta, v, out = 1 - 1 / node.tau, 0.0, []
    total = 1 + beta + beta**2
    for x in X[:6].split(3):
        w = [beta**2, beta, 1] if not normalize else [beta**2 / total, beta / total, 1 / total]
        drive = conv(sum(a * b for a, b in zip(w, x, strict=True))[None])[0]
        h = beta**3 * v + (total if normalize else 1) / node.tau * drive
        s = node.surrogate_function(h - node.v_threshold)
        out.append(s)
        v = (1 - s) * h
    out = torch.stack(out)
    assert 0.02 < out.mean() < 0.8
    out.square().sum().backward()
    assert node.tau.grad.abs() > 1e-3
    same(found, [node.tau.grad, conv.weight.grad])
