"""Which convs with a forward of their own may stand for the known ones, and what becomes of them."""

import copy

import pytest
import torch
from idioms.miniatures import by_hand
from idioms.own_forwards import FoldedStandardised, Standardised
from spikingjelly.activation_based import layer
from support import at_rest, conv, frames, node, same_state
from torch import nn
from torch.nn.utils import parametrizations

import sj_tac

LIF = {"v_threshold": 0.2}
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


class Chain(nn.Module):
    """A conv that converts, and behind it one with a forward of its own."""

    def __init__(self, own):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.lif, self.own, self.out = conv(2, 4), node("lif", **LIF), own(), node("lif", **LIF)

    def forward(self, x):
        x = self.lif(self.conv(x))
        if isinstance(self.own, layer.Conv2d):
            return self.out(self.own(x))
        return self.out(self.own(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


@pytest.fixture
def x():
    return frames(6, 3, 2, 8, 8)


def verdict(own, x):
    return sj_tac.plan(Chain(own), k=2, example_input=x)["own"]


def defined_by_hooks(net, k):
    return by_hand(net, k, {"conv": None, "own": None if isinstance(net.own, layer.Conv2d) else (6, 3)})


def bent(name, change):
    """A conv of torch's whose output, or input, goes through ``change``."""

    def forward(self, x):
        return change(self, x, lambda x: nn.Conv2d.forward(self, x))

    return type(name, (nn.Conv2d,), {"forward": forward})


class Submanifold(nn.Conv2d):
    """Puts nothing out where nothing came in, as convolutions of event cameras do."""

    def forward(self, x):
        return super().forward(x) * (x != 0).any(1, keepdim=True)


class Placed(nn.Conv2d):
    """Is handed fewer channels than its class says: coordinates come in addition."""

    def __init__(self, inputs, *args, **more):
        super().__init__(inputs + 1, *args, **more)

    def forward(self, x):
        return super().forward(torch.cat([x, torch.linspace(-1, 1, x.shape[-1]).to(x).expand_as(x[:, :1])], 1))


REFUSED = {
    "looks for zeros": (Submanifold, "NOT_AFFINE"),
    "quantised input": (bent("Quantised", lambda self, x, f: f((x * 4).round() / 4)), "NOT_AFFINE"),
    "mean of the batch": (bent("Centered", lambda self, x, f: f(x - x.mean(0))), "NOT_ALIKE"),
    "written input": (bent("Writing", lambda self, x, f: f(x.mul_(0.5))), "NOT_ALIKE"),
}


@pytest.mark.parametrize("which", list(REFUSED))
def test_what_is_no_affine_map_of_every_frame_is_refused_and_says_why(which, x):
    cls, why = REFUSED[which]
    found = verdict(lambda: cls(4, 4, 3, padding=1), x)
    assert (found.status, found.reason) == ("refused", why)


def test_more_channels_than_it_is_handed_are_its_own_affair(x):
    assert verdict(lambda: Placed(4, 4, 3, padding=1), x).status == "converted"


def test_trials_call_nobodys_hooks_draw_nobodys_numbers_and_leave_nothing(x):
    class OfADomain(FoldedStandardised):
        """Parameters have a domain; and its train returns nothing, as those who freeze a norm often have it."""

        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.share = nn.Parameter(torch.tensor(0.3))

        def train(self, mode=True):
            super().train(mode)

        def forward(self, x):
            return super().forward(x) * (1 - self.share**2).sqrt()

    net, seen = Chain(lambda: OfADomain(4, 4, 3, padding=1)).eval(), []
    net.own.register_forward_hook(lambda m, args, out: seen.append(out))
    held = {name: dict(vars(m)) for name, m in net.named_modules()}
    numbers = torch.get_rng_state()
    assert sj_tac.plan(net, k=2, example_input=x)["own"].status == "converted"
    assert torch.equal(torch.get_rng_state(), numbers)
    assert seen == []
    assert {name: dict(vars(m)) for name, m in net.named_modules()} == held


@pytest.mark.skipif(not hasattr(layer, "WSConv2d"), reason="this host has no WSConv2d")
def test_the_hosts_standardised_layers_need_no_example(x):
    net = nn.Sequential(
        layer.WSConv2d(2, 4, 3, step_mode="m"), node("lif", **LIF), layer.Flatten(step_mode="m"),
        layer.WSLinear(144, 5, step_mode="m"), node("lif", **LIF),
    )  # fmt: skip
    fast = sj_tac.convert(net, {"layers": ["conv", "linear"], "default": {"mode": "preserve", "k": 1}})
    assert len(sj_tac.report(fast).converted) == 2
    with torch.no_grad():
        net, fast, x = net.double(), fast.double(), x.double()
        spikes = net(x)
        torch.testing.assert_close(fast(x), spikes, **CLOSE)
    assert 0.05 < spikes.mean() < 0.5


PARAMETRIZED = {
    "weight norm": lambda: parametrizations.weight_norm(conv(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(Standardised(4, 4, 3, padding=1)),
    "folded": lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1)),
}


@pytest.mark.parametrize("which", list(PARAMETRIZED))
def test_parametrized_ones_aggregate_and_come_back(which, x, tmp_path):
    net, x = Chain(PARAMETRIZED[which]).double().eval(), x.double()
    fast = sj_tac.convert(net, k=2, example_input=x)
    expected, source = at_rest(fast, x), at_rest(net, x)
    torch.testing.assert_close(expected, at_rest(defined_by_hooks(net, 2), x), **CLOSE)
    assert not torch.equal(expected, source)
    made = copy.deepcopy(fast)
    assert torch.equal(at_rest(made, x), expected)
    sj_tac.save(fast, tmp_path / "net.safetensors")
    again = sj_tac.load(tmp_path / "net.safetensors", Chain(PARAMETRIZED[which]).double().eval(), example_input=x)
    torch.testing.assert_close(at_rest(again, x), expected, **CLOSE)
    back = sj_tac.restore(made)
    assert same_state(back, net)
    assert torch.equal(at_rest(back, x), source)
    nn.utils.parametrize.remove_parametrizations(fast.own, "weight")
    torch.testing.assert_close(at_rest(fast, x), expected, **CLOSE)
