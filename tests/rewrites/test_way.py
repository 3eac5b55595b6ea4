"""A converted net goes the way of its source, or is refused; and an interruption leaves nothing half converted."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from torch import nn

import sj_tac
from rewrites import swap
from rewrites.way import as_source
from sj_tac.errors import ConversionError


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1, self.n1 = layer.Conv2d(2, 6, 3, padding=1), layer.BatchNorm2d(6), neuron.LIFNode(v_threshold=0.3)
        self.pool = layer.MaxPool2d(2)
        self.c2, self.b2, self.n2 = layer.Conv2d(6, 6, 3, padding=1), layer.BatchNorm2d(6), neuron.LIFNode(v_threshold=0.2)
        functional.set_step_mode(self, "m")

    def forward(self, x):
        return self.n2(self.b2(self.c2(self.pool(self.n1(self.b1(self.c1(x)))))))


class Rates(Body):
    def forward(self, x):
        rates = x.new_zeros(())
        for m in self.children():
            x = m(x)
            if type(m) is neuron.LIFNode:
                rates = rates + x.mean()
        return x, rates


class Gains(Body):
    def forward(self, x):
        for m in self.children():
            x = m(x) * 3 if m.__class__.__name__ == "Conv2d" else m(x)
        return x


class Penalty(Body):
    def forward(self, x):
        return super().forward(x), sum((m.weight**2).sum() for m in self.modules() if type(m) is layer.Conv2d) + x.new_zeros(
            ()
        )


class Isinstance(Body):
    """What the error asks for."""

    def forward(self, x):
        rates = x.new_zeros(())
        for m in self.children():
            x = m(x) * 3 if isinstance(m, layer.Conv2d) else m(x)
            if isinstance(m, neuron.LIFNode):
                rates = rates + x.mean()
        return x, rates


def made(kind):
    torch.manual_seed(1)
    net = kind().double().eval()
    with torch.no_grad():
        for m in (net.c1, net.c2):
            m.weight.mul_(4)
    return net


def frames():
    torch.manual_seed(2)
    return torch.rand(6, 3, 2, 8, 8, dtype=torch.float64)


POLICIES = {
    "preserve": "preserve",
    "collapse": "collapse",
    "binary": {"default": {"mode": "collapse", "k": 2, "spikes": "binary"}},
    "learned": {"default": {"mode": "preserve", "k": 2, "weights": "learned"}},
    "mixed": {"default": {"mode": "preserve", "k": 2}, "rules": [{"match": "c1", "mode": "collapse", "k": 2}]},
}


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", [Rates, Gains, Penalty], ids=lambda kind: kind.__name__)
def test_a_forward_that_asks_for_the_class_of_a_module_is_refused(kind, k, fuse):
    net = made(kind)
    before = {name: type(m) for name, m in net.named_modules()}
    with pytest.raises(ConversionError, match=r"asks for the class of a module .* ask isinstance"):
        sj_tac.convert(net, k=k, fuse=fuse, example_input=frames(), inplace=True)
    assert {name: type(m) for name, m in net.named_modules()} == before


@pytest.mark.parametrize("k", [1, 2])
def test_one_that_asks_isinstance_converts(k):
    converted = sj_tac.convert(made(Isinstance), k=k, example_input=frames())
    with torch.no_grad():
        spikes, rates = converted(frames())
    assert 0.02 < spikes.mean() < 0.9
    assert rates > 0


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_with_nothing_shared_it_is_its_source_bit_for_bit(policy):
    """Whatever the policy made of it, and it is as before afterwards."""
    net, x = made(Body), frames()
    for fuse in (True, False):
        converted = sj_tac.convert(net, policy, 2, fuse=fuse, example_input=x)
        with torch.no_grad():
            wanted = converted(x)
            functional.reset_net(converted)
            roles = [dict(vars(m._tac)) for m in converted.modules() if "_tac" in vars(m)]
            with as_source(converted):
                found = converted(x)
            functional.reset_net(converted)
            functional.reset_net(net)
            assert torch.equal(found, net(x))
            assert [dict(vars(m._tac)) for m in converted.modules() if "_tac" in vars(m)] == roles
            assert torch.equal(converted(x), wanted)
            assert not torch.equal(wanted, found)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("at", range(1, 6))
def test_an_interruption_while_modules_are_swapped(monkeypatch, at, inplace):
    net, x = made(Body), frames()
    with torch.no_grad():
        wanted = copy.deepcopy(net)(x)
    swapped, real = [], swap.absorb

    def interrupted(module, role):
        swapped.append(module)
        if len(swapped) == at:
            raise KeyboardInterrupt
        real(module, role)

    monkeypatch.setattr(swap, "absorb", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sj_tac.convert(net, k=2, inplace=inplace, example_input=x)
    monkeypatch.undo()
    assert not any("sj_tac" in type(m).__module__ or "_tac" in vars(m) for m in net.modules())
    with torch.no_grad():
        assert torch.equal(net(x), wanted)
    sj_tac.convert(net, k=2, inplace=inplace)


def test_an_interruption_behind_the_hooks(monkeypatch):
    net = made(Body)
    real, calls = swap.host.forget_reset_cache, []

    def interrupted(model):
        calls.append(model)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(model)

    monkeypatch.setattr(swap.host, "forget_reset_cache", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sj_tac.convert(net, k=2, inplace=True)
    monkeypatch.undo()
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert not net._forward_hooks_always_called
    assert not net._forward_pre_hooks_with_kwargs
    assert not any("_tac" in vars(m) for m in net.modules())
