"""Tracing: control flow on shapes and values beside a real sample, and a model that is as before afterwards."""

import random
import sys
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron
from support import conv, frames, node, norm
from torch import nn

import sj_tac
from rewrites.graph import read
from rewrites.trace import trace
from rewrites.verify import run
from sj_tac.errors import ConversionError, SjTacError


class Branching(nn.Module):
    """Everything that symbols cannot decide: shapes, loops over them, unpacking, a test of the data, an option."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))
        self.left, self.right = conv(3, 3), conv(3, 3)
        self.node = node("lif", v_threshold=0.3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, x, flip=False):
        t, n = x.shape[:2]
        assert len(x) == t
        if x.sum() < 0 or flip:
            x = -x
        y = self.stem(x) * self.scale + self.offset
        for _ in range(int(t) % 2 + 1):
            y = y + 0
        side = self.left if float(y.mean()) >= 0 else self.right
        first, *rest = torch.split(side(y), [1, t - 1])
        return self.node(torch.cat([first, *rest])).reshape(t, n, -1)


def test_values_decide_what_symbols_cannot():
    net, x = Branching().eval(), frames(5, 2, 2, 6, 6)
    report = sj_tac.plan(net, example_input=x)
    assert [(v.layer, v.status, v.reason) for v in report.verdicts] == [
        ("stem.0", "converted", None),
        ("left", "refused", "NOT_LINEAR"),
        ("right", "refused", "NEVER_CALLED"),
    ]
    fast = sj_tac.convert(net, "preserve", 1, example_input=x)
    with torch.no_grad():
        assert torch.equal(fast(x), net(x))


def test_tracing_leaves_state_mode_hooks_and_random_numbers_alone():
    net, x = Branching().train(), frames(5, 2, 2, 6, 6)
    with torch.no_grad():
        net(x)
    net.stem[1].eval()
    voltage, values = net.node.v, net.node.v.clone()
    statistics = net.stem[1].running_mean.clone()
    handle = net.stem.register_forward_hook(lambda m, a, out: pytest.fail("the user's hook ran"))
    random = torch.get_rng_state()
    attributes = [sorted(vars(m)) for m in net.modules()]
    trace(net, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert net.node.v is voltage
    assert torch.equal(voltage, values)
    assert torch.equal(net.stem[1].running_mean, statistics)
    assert [m.training for m in (net, net.stem, net.stem[1], net.node)] == [True, True, False, True]
    assert list(net.stem._forward_hooks) == [handle.id]
    assert [sorted(vars(m)) for m in net.modules()] == attributes


def test_a_loop_over_time_is_seen_as_calls_for_every_step():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.node = layer.Conv2d(2, 3, 3), neuron.LIFNode()

        def forward(self, x):
            return torch.stack([self.node(self.conv(frame)) for frame in x])

    report = sj_tac.plan(Loop(), example_input=frames(4, 2, 2, 6, 6))
    assert report["conv"].reason == "TIME_LOOP"
    assert "4 times" in report["conv"].detail


def test_containers_of_the_host_are_looked_at_as_a_whole():
    net = nn.Sequential(
        layer.MultiStepContainer(layer.Conv2d(2, 3, 3), neuron.LIFNode()),
        layer.SeqToANNContainer(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)),
        conv(3, 3),
        node("lif"),
    )
    x = frames(4, 2, 2, 8, 8)
    for example in (None, x):
        assert [v.reason for v in sj_tac.plan(net, example_input=example).verdicts] == ["INSIDE_LEAF", None, None]
    functional.reset_net(net)


def test_several_inputs_by_position():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(), norm(), node("lif"))

        def forward(self, x, gate, power=2):
            if gate.shape[0] != x.shape[0]:
                raise ValueError("one gate per frame")
            return self.body(x * gate.view(-1, 1, 1, 1, 1) ** power)

    x, gate = frames(4, 2, 2, 6, 6), torch.rand(4)
    fast = sj_tac.convert(Two(), example_input=(x, gate))
    assert len(sj_tac.report(fast).converted) == 1
    assert fast(x, gate).shape == (4, 2, 3, 6, 6)


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
    """What a net holds, with the identities of all of it."""

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
    "trace": trace,
    "verify": lambda net, x: run(net, (x,), {}, exact=True),
    "unwatched": lambda net, x: run(net, (x,), {}, watched=False),
    "diagnose": lambda net, x: sj_tac.diagnose([x], net, permutations=19),
    "convert": lambda net, x: sj_tac.restore(sj_tac.convert(net, k=1, example_input=x, inplace=True)),
}


@pytest.mark.parametrize("kind", [Writing, Untraceable])
@pytest.mark.parametrize("look", [look for look in LOOKS if look != "convert"])
def test_whatever_forward_writes_is_put_back(kind, look):
    net, x = kind().train(), frames(5, 2, 2, 6, 6)
    before = everything(net)
    found = LOOKS[look](net, x)
    assert not getattr(found, "failure", "")
    assert everything(net) == before
    if look == "trace" and kind is Writing:
        trace(net)
        assert everything(net) == before


@pytest.mark.parametrize("kind", [Writing, Untraceable])
def test_a_converted_net_holds_what_its_source_held(kind):
    net, x = kind(), frames(5, 2, 2, 6, 6)
    fast = sj_tac.convert(net, k=1, example_input=x)
    for held in (net, fast):
        assert (held.feat, held.calls, held.hist, list(held.recent), held.kinds) == (None, 0, [], [], set())
        assert held.nested == {"all": [(["x"], {"a": 1})], "by": {}}
        assert held.seen.tolist() == [0, 0]
        assert (held.last.item(), held.total[1].item()) == (0, 0)
        assert not hasattr(held, "noise")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.parametrize("look", LOOKS)
def test_an_interruption_puts_everything_back(look, error):
    net, x = Interrupted().train(), frames(5, 2, 2, 6, 6)
    net.error = error("now")
    net.body[2].v = voltage = torch.zeros(())
    net.body.register_forward_hook(lambda m, a, y: None)
    before = everything(net)
    limit = sys.getrecursionlimit()
    call, grads = nn.Module.__call__, torch.is_grad_enabled()
    try:
        LOOKS[look](net, x)
    except (error, SjTacError):
        pass
    else:
        assert error is RuntimeError  # verification says in its Run how it failed
    assert everything(net) == before
    assert net.body[2].v is voltage
    assert (nn.Module.__call__, torch.is_grad_enabled(), sys.getrecursionlimit()) == (call, grads, limit)


def test_what_forward_writes_into_its_input_does_not_reach_the_callers():
    class Centred(Writing):
        def forward(self, x):
            return self.body(x.sub_(0.5))

    x = frames(5, 2, 2, 6, 6)
    before = x.clone()
    fast = sj_tac.convert(Centred(), k=1, example_input=x)
    assert torch.equal(x, before)
    assert len(sj_tac.report(fast).converted) == 1


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(), norm(), node("lif", v_threshold=0.3))


class Keyword(Base):
    def forward(self, x, *, scale=1.0, **more):
        assert not more
        return self.body(x * scale)


class Many(Base):
    def forward(self, x, *more, flip=False):
        return self.body(x if flip else x + sum(more))


class OfDict(Base):
    def forward(self, batch):
        assert isinstance(batch, dict)
        return self.body({key: value for key, value in batch.items()}["x"] * batch.get("scale", 1))


class OfList(Base):
    def forward(self, items):
        return self.body(torch.stack([*items]) if len(items) > 2 else items[0])


class Optional(Base):
    def forward(self, x, gate=None, power=2):
        return self.body(x if gate is None else torch.relu(x * gate**power))


X = frames(4, 2, 2, 6, 6)


@pytest.mark.parametrize(
    ("kind", "example"),
    [
        (Keyword, X),
        (Many, X),
        (Many, (X, X, X)),
        (OfDict, {"x": X}),
        (OfDict, {"x": X, "scale": 2.0}),
        (OfList, ([X, X],)),
        (OfList, ([*X],)),
        (Optional, (X, None)),
        (Optional, (X, torch.ones(()), 3)),
    ],
)
def test_inputs_of_every_shape(kind, example):
    net, arguments = kind(), example if isinstance(example, tuple) else (example,)
    fast = sj_tac.convert(net, k=1, example_input=example)
    assert len(sj_tac.report(fast).converted) == 1
    with torch.no_grad():
        assert torch.equal(fast(*arguments), net(*arguments))


def test_an_optional_input_that_is_given_is_traced():
    for example, expected in (((X, torch.ones(())), True), (X, False)):
        assert (torch.relu in {n.target for n in trace(Optional().eval(), example).graph.nodes}) is expected


class Needs(Base):
    def forward(self, x, *, mask):
        return self.body(x * mask)


class OnlyTrains(Base):
    def forward(self, x):
        if not self.training:
            raise ValueError("only trains")
        return self.body(x)


class Gradient(Base):
    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.body(x) + torch.autograd.grad(self.body(x).sum(), x)[0].sum()


class Replacing(Base):
    def forward(self, x):
        self.body[2] = node("lif")
        return self.body(x)


@pytest.mark.parametrize(
    ("kind", "example", "message"),
    [
        (Needs, X, r"Needs does not take example_input of shape \[\[4, 2, 2, 6, 6\]\].*'mask'.*give the others a default"),
        (Optional, [X] * 5, "too many positional arguments"),
        (Optional, (), "missing a required argument: 'x'"),
        (Optional, {"x": X}, "example_input of shape .*'dict' object"),
        (Optional, "x", r"example_input of shape \['x'\].*'str' object"),
        (Optional, torch.ones(()), r"example_input of shape \[\] in module 'body.0'"),
        (OnlyTrains, X, r"only trains; check that model.eval\(\)"),
        (OnlyTrains, None, "in eval mode .*only trains"),
        (Gradient, X, "does not require grad.*without gradients"),
        (Replacing, X, "NO_NEURON|NOT_LINEAR|tracing failed"),  # the older host compiles its neurons
        (Replacing, None, "INSIDE_LEAF"),
    ],
)
def test_what_cannot_be_run_is_a_clear_error_and_changes_nothing(kind, example, message):
    net = kind()
    before = everything(net)
    with pytest.raises(ConversionError, match=message):
        sj_tac.convert(net, k=1, example_input=example, inplace=True)
    assert everything(net) == before


class Closed(nn.Module):
    def forward(self, x):
        y = x * 2 + 1
        return y if len(x) else x


def test_what_cannot_be_followed_is_one_node_and_the_forward_runs_once():
    calls = []
    net = nn.Sequential(Counting(calls), *(Closed() for _ in range(50)))
    traced = trace(net)
    assert sorted(traced.closed) == sorted(str(i) for i in range(1, 51))
    assert [n.op for n in traced.graph.nodes] == ["placeholder", "call_function", *["call_module"] * 50, "output"]
    assert len(calls) == 1  # and not once for everything that could not be followed


class Counting(nn.Module):
    def __init__(self, calls):
        super().__init__()
        object.__setattr__(self, "counted", calls.append)

    def forward(self, x):
        self.counted(1)
        return x + 0


def test_deep_nets_are_traced_and_run():
    net = nn.Sequential(Closed())
    for _ in range(200):
        net = nn.Sequential(nn.Identity(), net)
    x = torch.ones(3, 1, 2)
    for traced in (trace(net), trace(net, x)):
        assert len(traced.graph.nodes) > 200
        read(net, traced.graph)
    assert run(net, (x,), {}, exact=True).failure == ""
