"""A model is as before when it was looked at, converted, or interrupted; and other threads run theirs meanwhile."""

import copy
import random
import threading
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac.errors import ConversionError, SjTacError
from sj_tac.rewrites import swap

X = frames(5, 2, 2, 6, 6)


class Writing(nn.Module):
    """A forward that writes wherever a module can be written to."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))
        self.feat, self.calls = None, 0
        self.hist, self.recent, self.kinds = [], deque(maxlen=2), set()
        self.nested = {"all": [(["x"], OrderedDict(a=1))], "by": defaultdict(list)}
        self.plain = [nn.Module()]  # no submodule of this one
        self.total = torch.tensor([float("nan"), 0.0])
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        if self.total[1] > 3:
            x = x * 2
        x = x.sub_(0.1)
        y = self.body(x)
        self.feat, self.body[0].feat, self.plain[0].feat = x, y, y
        self.calls += 1
        self.hist.append(y)
        self.recent.append(y)
        self.kinds.add(str(type(y)))
        self.nested["all"][0][0].append(y)
        self.nested["all"][0][1]["b"] = self.nested["all"][0][1].pop("a", 0)
        self.nested["by"]["y"].append(y)
        self.seen += 1
        self.total[1] += 1
        self.last = self.last + 1
        self.body[2].v_threshold = 0.3 + 0 * random.random() * np.random.rand()
        self.noise = torch.rand(1)
        return y


class Untraceable(Writing):
    """Only a sample gets through."""

    def forward(self, x):
        assert len(x) == x.shape[0]
        return super().forward(x) if float(x.sum()) > 0 else x


class Interrupted(Writing):
    def forward(self, x):
        super().forward(x)
        raise self.error


def everything(net):
    """What a net holds, hooks and modes among it, with the identities of all of it; and random numbers."""

    def told(value):
        if isinstance(value, nn.Module):
            return id(value), {key: told(v) for key, v in vars(value).items()}
        if isinstance(value, dict):
            return id(value), type(value), [(key, told(v)) for key, v in value.items()]
        if isinstance(value, (list, deque, tuple)):
            return id(value), [told(v) for v in value]
        if isinstance(value, torch.Tensor):
            return id(value), str(value.tolist())
        return id(value), str(value)

    return told(net), random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


LOOKS = {
    "plan": lambda net, x: sj_tac.plan(net, k=2, example_input=x),
    "convert": lambda net, x: sj_tac.restore(sj_tac.convert(net, k=2, example_input=x, inplace=True), inplace=True),
    "diagnose": lambda net, x: sj_tac.diagnose([x], net, permutations=19),
}


def held(kind):
    """A net in the middle of its use: with a voltage, a hook of the user's and one module in another mode."""
    net = kind().train()
    net.body[1].eval()
    net.body[2].v = torch.zeros(())
    net.body.register_forward_hook(lambda m, a, y: None)
    return net


@pytest.mark.parametrize("kind", [Writing, Untraceable])
@pytest.mark.parametrize("look", [look for look in LOOKS if look != "convert"])
def test_whatever_forward_writes_is_put_back(kind, look):
    net = held(kind)
    before, given = everything(net), X.clone()
    LOOKS[look](net, given)
    assert everything(net) == before
    assert look != "plan" or torch.equal(given, X)


def test_a_converted_net_holds_what_its_source_held():
    net = Writing()
    for one in (sj_tac.convert(net, k=1, example_input=X), net):
        assert (one.feat, one.calls, one.hist, list(one.recent), one.kinds) == (None, 0, [], [], set())
        assert one.nested == {"all": [(["x"], {"a": 1})], "by": {}}
        assert (one.seen.tolist(), one.last.item(), one.total[1].item()) == ([0, 0], 0, 0)
        assert not hasattr(one, "noise")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("look", LOOKS)
def test_an_interruption_puts_everything_back(look, error):
    net = held(Interrupted)
    net.error = error("now")
    before, asked = everything(net), (nn.Module.__call__, torch.is_tensor, torch.is_grad_enabled())
    with pytest.raises((error, SjTacError)):
        LOOKS[look](net, X)
    assert everything(net) == before
    assert (nn.Module.__call__, torch.is_tensor, torch.is_grad_enabled()) == asked


def test_a_forward_that_replaces_a_module_is_a_clear_error_and_changes_nothing():
    class Replacing(Writing):
        def forward(self, x):
            self.body[2] = node("lif")
            return self.body(x)

    for example in (X, None):
        net = Replacing()
        before = everything(net)
        with pytest.raises(ConversionError, match=r"NO_NEURON|NOT_LINEAR|tracing failed|INSIDE_LEAF"):
            sj_tac.convert(net, k=1, example_input=example, inplace=True)
        assert everything(net) == before


# ---- the way that a converted net takes ------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.c1, self.n1 = layer.Conv2d(2, 6, 3, padding=1), neuron.LIFNode(v_threshold=0.1)
        self.c2, self.n2 = layer.Conv2d(6, 6, 3, padding=1), neuron.LIFNode(v_threshold=0.1)
        functional.set_step_mode(self.double().eval(), "m")

    def forward(self, x):
        return self.n2(self.c2(self.n1(self.c1(x))))


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


class Isinstance(Body):
    """What the error asks for."""

    def forward(self, x):
        for m in self.children():
            x = m(x) * 3 if isinstance(m, layer.Conv2d) else m(x)
        return x


@pytest.mark.parametrize(("kind", "k"), [(Rates, 1), (Rates, 2), (Gains, 2), (Gains, 3)])
def test_a_forward_that_asks_for_the_class_of_a_module_is_refused(kind, k):
    net = kind()
    before = {name: type(m) for name, m in net.named_modules()}
    with pytest.raises(ConversionError, match=r"asks for the class of a module .* ask isinstance"):
        sj_tac.convert(net, k=k, example_input=X.double(), inplace=True)
    assert {name: type(m) for name, m in net.named_modules()} == before
    assert len(sj_tac.plan(Isinstance(), k=k, example_input=X.double()).converted) == 2
    sj_tac.convert(Isinstance(), k=k, example_input=X.double())


@pytest.mark.parametrize(("at", "inplace"), [(1, True), (4, True), (3, False)])
def test_an_interruption_while_modules_are_swapped(monkeypatch, at, inplace):
    net, x = Body(), X.double()
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
    net, real, calls = Body(), swap.host.forget_reset_cache, []

    def interrupted(model):
        calls.append(model)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(model)

    monkeypatch.setattr(swap.host, "forget_reset_cache", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sj_tac.convert(net, k=2, inplace=True)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
        assert not getattr(net, hooks)
    assert not any("_tac" in vars(m) for m in net.modules())


# ---- other threads ---------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A net whose forward calls ``meanwhile`` before its layers, so that another thread can do something during a trace."""

    def __init__(self, meanwhile):
        super().__init__()
        self.meanwhile = meanwhile
        self.layers = nn.Sequential(conv(), norm(), node("lif")).eval()

    def forward(self, x):
        self.meanwhile()
        return self.layers(x)


def output(net, x):
    functional.reset_net(net)
    with torch.no_grad():
        return net(x)


def test_two_nets_are_converted_at_once():
    """The first would end in the middle of the second. A wait has an end, for the two may well wait for each other."""
    first_inside, second_inside, first_done = (threading.Event() for _ in range(3))

    def of_first():
        first_inside.set()
        second_inside.wait(0.2)

    def of_second():
        second_inside.set()
        first_done.wait(0.2)

    first, second, before = Watched(of_first), Watched(of_second), nn.Module.__call__
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(sj_tac.convert, first, "preserve", 2)
        one.add_done_callback(lambda _: first_done.set())
        assert first_inside.wait(60)
        other = pool.submit(sj_tac.convert, second, "preserve", 2)
        made = one.result(), other.result()
    assert nn.Module.__call__ is before
    for source, net in zip((first, second), made, strict=True):
        assert [v.mode for v in sj_tac.report(net).verdicts] == ["preserve"]
        assert torch.equal(output(net, X), output(sj_tac.convert(source, "preserve", 2), X))
