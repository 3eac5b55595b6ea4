"""The plan by measurement, on nets that could be taken for others; shared convolutions against hooks on the source."""

import copy

import pytest
import torch
from measure.small_nets import CASES, MEET, T
from torch import nn

from sj_tac.definition import convs
from sj_tac.rewrites.measure.measured import Shared, measure
from sj_tac.verdicts import Refusal

CODES = {
    MEET: "FRAMES_MEET",
    "drives no neuron": "NO_NEURON",
    "keeps a state": "NOT_ALIKE",
    "does not treat frames alike": "NOT_ALIKE",
    "no other number of frames": "NOT_ALIKE",
    "time is inside": "TIME_INSIDE",
    "time is among its channels": "TIME_IN_CHANNELS",
    "no order": "NO_ORDER",
    "called 4 times": "ONE_STEP",
}
EVERY = pytest.mark.parametrize("name", CASES)
SHARED = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.order])


def frames(shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(name):
    torch.manual_seed(1)
    return CASES[name].make().double().eval()


@pytest.fixture(scope="module")
def planned():
    """Plans, each made once."""
    plans = {}

    def find(name):
        if name not in plans:
            plans[name] = measure(made(name), (frames(CASES[name].shape),))
        return plans[name]

    return find


@EVERY
def test_what_the_plan_says_of_a_convolution(name, planned):
    case, found = CASES[name], planned(name).convolutions["conv"]
    if case.order is None:
        assert isinstance(found, Refusal)
        assert case.why in found.detail
        assert found.reason == CODES[case.why]
        return
    assert isinstance(found, Shared)
    layout = found.layout
    said = {(True, False): "folded", (True, True): "folded, samples first"}.get((layout.folded, layout.samples_first))
    assert (said or ("time second" if layout.dim else "time first")) == case.order
    assert layout.T == T
    assert found.decay == pytest.approx(1.0 if case.beta is None else case.beta, abs=1e-3)
    assert (found.off < 1e-9) == case.exact


def by_hooks(net, k, order, beta):
    """The source with hooks on its convolution: its input is summed by groups of k frames, its output is repeated."""
    net = copy.deepcopy(net)

    def to_frames(x, steps):
        if order == "folded":
            return x.reshape(steps, -1, *x.shape[1:])
        if order == "folded, samples first":
            return x.reshape(-1, steps, *x.shape[1:]).transpose(0, 1)
        return x if order == "time first" else x.transpose(0, 1)

    def back(f):
        if order == "folded":
            return f.flatten(0, 1)
        if order == "folded, samples first":
            return f.transpose(0, 1).flatten(0, 1)
        return f if order == "time first" else f.transpose(0, 1)

    def before(module, args):
        sums = []
        for group in to_frames(args[0], net.steps).split(k):
            weights = [beta ** (len(group) - 1 - j) for j in range(len(group))]
            sums.append(sum(w * x for w, x in zip(weights, group, strict=True)) / sum(weights))
        return (back(torch.stack(sums)),)

    def behind(module, args, out):
        groups = -(-net.steps // k)
        return back(to_frames(out, groups).repeat_interleave(k, 0)[: net.steps])

    net.conv.register_forward_pre_hook(before)
    net.conv.register_forward_hook(behind)
    return net


def seen(net, x):
    """The output and all gradients of a call."""
    net.zero_grad()
    x = x.clone().requires_grad_()
    out = net(x)
    (out * torch.linspace(0.5, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return {"output": out.detach(), "input": x.grad} | {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def steps_of(case, shape):
    at = 1 if "samples first" in case.make().neuron.order else 0
    return shape[at] if len(shape) == 5 else T


@SHARED
@pytest.mark.parametrize("training", [False, True])
def test_shared_convolutions_are_the_source_at_k_1_and_hooks_at_k_2(name, training, planned):
    """At the example's shape, at another batch size, and at another T where the net takes one."""
    case, net = CASES[name], made(name)
    beta = planned(name).convolutions["conv"].decay
    for shape in (case.shape, *case.others):
        x = frames(shape, seed=7)
        for k in (1, 2, 3):
            fast = copy.deepcopy(net).train(training)
            convs.share(fast, {"conv": planned(name).sharings(k, fast, approximate=True)["conv"]})
            slow = copy.deepcopy(net) if k == 1 else by_hooks(net, k, case.order, beta)
            slow.steps = steps_of(case, shape) if hasattr(case.make().neuron, "order") else shape[0]
            a, b = seen(fast, x), seen(slow.train(training), x)
            assert a.keys() == b.keys()
            assert 0.02 < a["output"].mean() < 0.6, "awake"
            for key in a:
                torch.testing.assert_close(a[key], b[key], rtol=0, atol=0 if k == 1 else 1e-9, msg=f"{key}, k={k}, {shape}")
            assert any(not torch.equal(a[key], c) for key, c in seen(copy.deepcopy(net), x).items()) == (k > 1)


@EVERY
def test_a_plan_leaves_the_net_and_the_random_stream_as_they_were(name):
    net = made(name).train()
    before = copy.deepcopy(net.state_dict())
    keys = [sorted(vars(m)) for m in net.modules()]
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    called = []
    net.register_forward_hook(lambda *args: called.append(args))
    notes = measure(net, (frames(CASES[name].shape),)).notes
    assert "planned without the hooks of ['Net']" in notes[0]
    assert torch.equal(torch.rand(3), wanted)
    assert not called
    assert net.training
    assert [sorted(vars(m)) for m in net.modules()] == keys
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_a_frozen_net_and_a_call_under_no_grad_are_planned_as_well():
    net, x = made("plain"), frames(CASES["plain"].shape)
    net.requires_grad_(False)
    with torch.no_grad():
        assert isinstance(measure(net, (x,)).convolutions["conv"], Shared)
    with torch.inference_mode():
        assert isinstance(measure(net, (x,)).convolutions["conv"], Shared)


def test_a_residual_branch_that_ends_in_zeros_is_seen():
    torch.manual_seed(0)
    net = made("plain")
    net.conv.weight.data.zero_()
    net.conv.bias.data.zero_()
    assert isinstance(measure(net, (frames(CASES["plain"].shape),)).convolutions["conv"], Shared)


def test_linear_layers_are_planned_on_request():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.neuron = nn.Linear(4, 6), CASES["plain"].make().neuron

        def forward(self, x):
            return self.neuron(self.fc(x)[..., None, None])

    x = frames((T, 3, 4))
    assert not measure(Tokens().double(), (x,)).convolutions
    found = measure(Tokens().double(), (x,), linears=True).convolutions["fc"]
    assert (found.layout.dim, found.layout.folded) == (0, False)
