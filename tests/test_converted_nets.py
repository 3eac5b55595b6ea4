"""A converted net computes its definition: values, gradients, voltages, statistics, whoever looks, however it is called."""

import copy

import pairs
import pytest
import quickstart
import torch
from defined import backend, check, defined, given, same
from spikingjelly.activation_based import functional, layer, surrogate
from support import awake, conv, csnn, frames, node, norm, only_v2
from torch import nn

import sj_tac

M = {"step_mode": "m"}
X = frames(7, 2, 2, 8, 8, dtype=torch.float64)


class Block(nn.Module):
    """A stem, a residual block of one of three kinds with a projection, and a conv that reads its sum."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.stem = nn.Sequential(conv(2, 4), norm(4), node("lif"))
        self.conv, self.norm = conv(4, 4), norm(4)
        if kind == "ms":
            self.node = node("lif", v_threshold=0.37)  # it steps on spikes
        self.down = nn.Sequential(layer.Conv2d(4, 4, 1, bias=False, **M), norm(4))
        if kind != "ms":
            self.node = node("lif", tau=2.0 if kind == "sew" else 1.5)
        self.last = nn.Sequential(conv(4, 3), norm(3), node("lif"))

    def forward(self, x):
        x = self.stem(x)
        if self.kind == "spiking":
            y = self.norm(self.conv(x))
            y += self.down(x)
            x = self.node(y + x)
        elif self.kind == "ms":
            x = self.norm(self.conv(self.node(x))) + self.down(x)
        else:
            x = self.node(self.norm(self.conv(x)) + self.down(x)) + x
        return self.last(x)


class Stem(nn.Module):
    """The stem of an MS net: its drive goes to a neuron, to a projection and into the sum, and stays one drive."""

    def __init__(self):
        super().__init__()
        self.stem, self.spike = nn.Sequential(conv(2, 3), norm(3)), node("lif")
        self.conv, self.down = nn.Sequential(conv(3, 3), norm(3)), nn.Sequential(conv(3, 3), norm(3))
        self.last = node("lif")

    def forward(self, x):
        x = self.stem(x)
        return self.last(self.conv(self.spike(x)) + self.down(x))


def every_neuron():
    """Every neuron, a hard reset elsewhere than at 0, a soft one, both pools, a conv without norm, and a spiking readout."""
    return nn.Sequential(
        *[conv(2, 4, bias=False), norm(4), node("lif", tau=3.0, detach_reset=True), layer.MaxPool2d(2, **M)],
        *[conv(4, 4, bias=False), norm(4), node("plif", v_reset=-0.1), layer.AvgPool2d(2, **M)],
        *[conv(4, 4), node("if", v_reset=None), layer.Flatten(**M), layer.Dropout(0.2, **M)],
        *[layer.Linear(16, 6, **M), node("lif", decay_input=False), layer.VotingLayer(2, **M)],
    )


LAST = {"stem.0": "stem.2", "conv": "node", "down.0": "last.2", "last.0": "last.2"}
NETS = {
    "every neuron": (every_neuron, None),
    "chain": (lambda: csnn().eval(), None),
    "spiking": (lambda: Block("spiking"), LAST | {"down.0": "node"}),
    "sew": (lambda: Block("sew"), LAST | {"down.0": "node"}),
    "ms": (lambda: Block("ms"), LAST | {"conv": "last.2"}),
    "stem": (Stem, {"stem.0": "spike", "conv.0": "last", "down.0": "last"}),
}


def build(name, x=X):
    torch.manual_seed(0)
    make, neurons = NETS[name]
    return awake(make().to(x.dtype).eval(), x), neurons


@pairs.parametrize(
    name=NETS,
    mode=["preserve", "collapse"],
    more=[{"k": 2}, {"k": 3}, {"k": 3, "weights": "uniform"}, {"k": 2, "normalize": False}],
    train=[False, True],
)
def test_values_gradients_voltages_and_statistics(name, mode, more, train):
    net, neurons = build(name)
    fast = check(net, {"default": {"mode": mode} | more}, X, neurons, train)
    assert {v.status for v in sj_tac.report(fast).verdicts} <= {"converted", "stretched", "refused"}
    assert {v.k for v in sj_tac.report(fast).converted} == {more["k"]}


@pairs.parametrize(name=["every neuron", "chain"], normalize=[True, False], train=[False, True])
def test_a_binary_collapse(name, normalize, train):
    net, _ = build(name)
    check(net, {"default": {"mode": "collapse", "spikes": "binary", "k": 3, "normalize": normalize}}, X, train=train)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_k_1_is_the_source(name, fuse):
    net, _ = build(name)
    expected = given(net, X)
    functional.reset_net(net)
    same(given(sj_tac.convert(net, "preserve", 1, example_input=X, fuse=fuse, backend=backend(net)), X), expected)


@pytest.mark.parametrize("which", ["digits", pytest.param("events", marks=pytest.mark.exhaustive)])
def test_real_data(which):
    """In float64 the definition's; in float32, where rounding may tip a spike over, nearly so."""
    task = getattr(quickstart, which)()
    net, x = task.net, task.frames[:10, :8]
    double = check(copy.deepcopy(net).double(), "preserve" if which == "digits" else "collapse", x.double(), k=4)
    functional.reset_net(double)
    with torch.no_grad():
        y, expected = sj_tac.convert(net, sj_tac.policy_of(double))(x), double(x.double())
    assert 0.01 < y.mean() < 0.9
    assert (y - expected).abs().gt(1e-4).float().mean() <= 0.01


@pytest.mark.captured
@pytest.mark.parametrize("kind", [pytest.param("threshold", marks=only_v2), "no affine", "identity"])
def test_every_norm(kind):
    torch.manual_seed(0)
    made = {
        "threshold": lambda: [layer.ThresholdDependentBatchNorm2d(1.0, 0.5, 4)],
        "no affine": lambda: [layer.BatchNorm2d(4, affine=False, **M)],
        "identity": lambda: [nn.Identity(), norm(4)],
    }[kind]
    net = nn.Sequential(*(m for inputs in (2, 4) for m in (conv(inputs, 4), *made(), node("lif")))).double().eval()
    for module in net:
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    assert len(sj_tac.report(check(awake(net, X), "preserve", X, k=3)).converted) == 2


@pytest.mark.captured
def test_readers_that_want_different_groups_get_frames_and_a_time_constant_may_change_later():
    net, neurons = build("sew")
    policy = {"default": {"k": 2}, "rules": [{"match": "down.0", "weights": "uniform"}, {"match": "last.0", "k": 4}]}
    fast = check(net, policy, X, neurons)
    wanted = defined(net, fast, neurons)
    fast.node.tau = wanted.node.tau = 4.0
    same(given(fast, X), given(wanted, X))


def test_a_drive_that_neurons_of_different_decay_read_is_weighted_for_the_first():
    net, _ = build("stem")
    assert sj_tac.plan(net)["stem.0"].detail == ""
    net.last.tau = 3.0
    found = sj_tac.plan(net)["stem.0"]
    assert found.status == "converted"
    assert found.detail == "its neurons decay by [0.5, 0.6667]; the frames are weighed for 'spike'"
    check(net, "preserve", X, NETS["stem"][1])


@only_v2
@pytest.mark.captured
def test_kept_voltages_and_other_surrogates_are_named_and_right():
    net = csnn(make=lambda: node("lif", surrogate_function=surrogate.Rect())).double()
    net[2].store_v_seq, net[2].surrogate_function = True, surrogate.ATan()
    fast = check(net, "preserve", X, k=2)
    fast = sj_tac.convert(net, "preserve", 2, example_input=X)
    fast(X)
    assert fast[2].v_seq.shape[0] == 7
    report = sj_tac.report(fast)
    assert [report[n].kernel for n in ("0", "4")] == ["reference"] * 2
    assert report["0"].detail == "not fused: store_v_seq wants every step's voltage"
    assert report["4"].detail.startswith("not fused: the compiled kernels have no derivative of surrogate Rect")


@pytest.mark.captured
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_nets(dtype):
    """The unfused BatchNorm rounds its output to half, the fused one does not."""
    x = frames(6, 2, 2, 8, 8, dtype=dtype)
    unfused, fused = (sj_tac.convert(csnn().to(dtype), "preserve", 2, fuse=fuse) for fuse in (False, True))
    with torch.no_grad():
        expected, got = unfused(x), fused(x)
    assert got.dtype == dtype
    assert fused[2].v.dtype == torch.float32
    assert expected.float().mean() > 0.05
    assert (expected != got).float().mean() < 0.2
