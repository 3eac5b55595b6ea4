"""profile: mass, against the definition by hooks on a plain net."""

import copy

import pytest
import torch
import torch.nn.functional as F
from matched import fitted
from spikingjelly.activation_based import functional, layer
from support import awake, conv, frames, node, norm, same_state
from torch import nn

import sj_tac
from sj_tac.errors import PolicyError
from sj_tac.functional import aggregate, decay_weights, expand

MASS = {"default": {"k": 4, "profile": "mass"}}
BETA = {"if": 1.0, "lif": 0.5, "plif": 0.5}


def by_mass(source, k, beta):
    """The definition: what every convolution gives for its group, times the frame's part of the mass under the filter."""
    net = copy.deepcopy(source)

    def share(module, args, out):
        x = args[0]
        weights = decay_weights(beta, [1] * k, True) if beta < 1 else [1 / k] * k
        group = expand(_folded(lambda t: plain_forward(module, t), aggregate(x, weights, k)), k, len(x))
        mass = _folded(lambda t: window_sums(module, t), x.abs().sum(2, keepdim=True))
        of_group = expand(aggregate(mass, weights, k), k, len(x))
        share = torch.where(of_group > 0, mass / of_group.clamp_min(1e-12), torch.ones_like(mass))
        bias = 0 if module.bias is None else module.bias.view(-1, 1, 1)
        return bias + (group - bias) * share

    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(share)
    return net


def plain_forward(module, x):
    return F.conv2d(x, module.weight, module.bias, module.stride, module.padding, module.dilation)


def window_sums(module, x):
    """By unfolding, not by a convolution."""
    columns = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    return columns.sum(1).reshape(x.shape[0], 1, *plain_forward(module, x.expand(-1, module.in_channels, -1, -1)).shape[2:])


def _folded(function, x):
    y = function(x.flatten(0, 1))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def made(kind, **first):
    torch.manual_seed(0)
    front = [conv(2, 6, **first), norm(6), node(kind), layer.MaxPool2d(2, 2, step_mode="m")]
    net = nn.Sequential(*front, conv(6, 6, bias=False), norm(6), node(kind), layer.Flatten(step_mode="m"))
    return awake(net.eval(), frames(8, 3, 2, 9, 9)).double()


@pytest.mark.parametrize("steps", [8, 7, 3])
@pytest.mark.parametrize("kind", ["if", "lif", "plif"])
@pytest.mark.parametrize("fuse", [True, False])
def test_it_is_the_definition(kind, fuse, steps):
    source = made(kind)
    x = frames(steps, 3, 2, 9, 9).double()
    fast = sj_tac.convert(source, MASS, fuse=fuse)
    expected, got = by_mass(source, 4, BETA[kind])(x), fast(x)
    torch.testing.assert_close(got, expected)
    assert 0.02 < expected.mean() < 0.6
    held = sj_tac.convert(source, "preserve", 4)(x)
    assert not torch.equal(held, got)
    assert fast[0]._tac.ran == ("mass" if fuse else "plain")


@pytest.mark.parametrize(
    "first", [{"stride": 2}, {"padding": 0}, {"dilation": 2, "padding": 2}, {"kernel_size": 1, "padding": 0}]
)
def test_windows(first):
    source = made("lif", **first)
    x = frames(8, 3, 2, 9, 9).double()
    torch.testing.assert_close(sj_tac.convert(source, MASS)(x), by_mass(source, 4, 0.5)(x))


@pytest.mark.parametrize("kind", ["lif", "if"])
def test_gradients(kind):
    source = made(kind)
    x = frames(8, 3, 2, 9, 9).double()
    grads = []
    for net in (by_mass(source, 4, BETA[kind]), sj_tac.convert(source, MASS)):
        given = x.clone().requires_grad_()
        for neuron in net.modules():
            if hasattr(neuron, "v_threshold"):
                neuron.train()
        (net(given) * torch.linspace(0, 1, 8, dtype=x.dtype).view(8, 1, 1)).sum().backward()
        grads.append([given.grad, *[p.grad for p in net.parameters()]])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert theirs.abs().sum() > 0


def test_frames_that_are_alike_share_as_before_and_frames_of_nothing_hold():
    source = made("if")
    x = frames(1, 3, 2, 9, 9).double().expand(8, 3, 2, 9, 9)
    # The first layer alone: behind it frames differ.
    only = {"default": {"mode": "keep"}, "rules": [{"match": "0", "mode": "preserve", "k": 4, "profile": "mass"}]}
    torch.testing.assert_close(sj_tac.convert(source, only)(x), source(x))
    functional.reset_net(source)
    nothing = torch.zeros(8, 3, 2, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(sj_tac.convert(source, only)(nothing), source(nothing))


def test_k_1_is_the_source_and_the_way_back():
    source = made("lif")
    x = frames(8, 3, 2, 9, 9).double()
    fast = sj_tac.convert(source, MASS)
    expected = source(x)
    assert same_state(sj_tac.restore(fast), source)
    sj_tac.set_k(fast, 1)
    torch.testing.assert_close(fast(x), expected)
    assert fast[0]._tac.ran == "frames"


def test_folded_frames():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.lif = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), node("lif")

        def forward(self, x):
            steps, batch = x.shape[:2]
            y = self.norm(self.conv(x.flatten(0, 1)))
            return self.lif(y.reshape(steps, batch, *y.shape[1:]))

    torch.manual_seed(0)
    x = frames(8, 3, 2, 9, 9)
    source = awake(Folded().eval(), x).double()
    plain = nn.Sequential(layer.Conv2d(2, 6, 3, padding=1, step_mode="m"), norm(6), node("lif")).double().eval()
    plain.load_state_dict(dict(zip(plain.state_dict(), source.state_dict().values(), strict=True)))
    plain[2].__dict__.update({k: v for k, v in source.lif.__dict__.items() if k in ("v_threshold", "tau", "v_reset")})
    fast = sj_tac.convert(source, MASS, example_input=x.double())
    torch.testing.assert_close(fast(x.double()), by_mass(plain, 4, 0.5)(x.double()))


@pytest.mark.parametrize("method", ["moments", "rates"])
def test_it_can_be_matched(method):
    from matched import X, narrow, watched

    source = narrow(lambda: node("if")).double()
    fast = sj_tac.convert(source, MASS)
    expected = watched(source, X[:, ::2].double())
    plain = by_mass(source, 4, 1.0)
    before = watched(plain, X[:, ::2].double())
    done = fitted(fast, method, X.double())
    assert done.corrected
    assert not done.skipped
    own = copy.deepcopy(source)
    own.load_state_dict(fast.state_dict())
    after = watched(by_mass(own, 4, 1.0), X[:, ::2].double())
    if method == "moments":
        for name in ("1", "4", "7"):
            torch.testing.assert_close(after[name][1], expected[name][1], rtol=1e-6, atol=1e-6)
    else:
        apart = [sum((found[n] - expected[n]).abs().sum().item() for n in ("2", "5", "8")) for found in (before, after)]
        assert apart[1] < 0.5 * apart[0]
    assert same_state(sj_tac.restore(fast), source)


def test_what_cannot_be_is_said():
    with pytest.raises(PolicyError, match="mode: preserve"):
        sj_tac.convert(made("lif"), {"default": {"mode": "collapse", "profile": "mass"}})
    with pytest.raises(PolicyError, match="sum to 1"):
        sj_tac.convert(made("lif"), {"default": {"normalize": False, "profile": "mass"}})
    net = nn.Sequential(layer.SeqToANNContainer(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), node("lif"), conv(3, 3), node("lif"))
    assert sj_tac.plan(net.eval(), MASS)["0.0"].reason == "NO_PROFILE"
    rules = [{"match": "0", "mode": "collapse", "k": 2}, {"match": "[4]", "profile": "mass"}]
    assert "behind a collapse" in sj_tac.plan(made("lif"), {"rules": rules} | {"default": {"k": 4}})["4"].detail
