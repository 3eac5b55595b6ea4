"""Old code on the installed host. test_old_code.py runs this file in a Python of its own: what it imports stays changed."""

import copy
import importlib
import pickle
import sys

import pytest
import torch
from spikingjelly import activation_based as installed
from spikingjelly.activation_based import layer as installed_layer, neuron as installed_neuron

import sj_tac.compat.clock_driven

# isort: split
import old_code
import spikingjelly
from spikingjelly.cext import neuron as cext
from spikingjelly.clock_driven import encoding, functional, layer, neuron, surrogate

from sj_tac import host
from sj_tac.errors import BackendError, HostError

KINDS = ("IFNode", "LIFNode", "ParametricLIFNode")


def by_equations(x, rate, gain, threshold, v_reset, analog=False):
    """What neurons of 0.0.0.0.12 compute: every step's spikes, or voltages above 0, and the voltage behind the last."""
    rest = v_reset or 0.0
    v, out = torch.full_like(x[0], rest), []
    for frame in x:
        h = v - rate * (v - rest) + gain * frame
        spike = (h >= threshold).to(x)
        out.append(h.relu() if analog else spike)
        v = h - spike * threshold if v_reset is None else (1 - spike) * h + spike * v_reset
    return torch.stack(out), v


def settings(kind, decays):
    """Arguments in front of the threshold, and the rate and gain that they mean."""
    if kind == "IFNode":
        return (), 0.0, 1.0
    tau = 2.7 if kind == "ParametricLIFNode" else 3.0
    return (tau, decays), 1 / tau, 1 / tau if decays else 1.0


@pytest.mark.parametrize("v_reset", [0.0, None, -0.3, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_neurons_step_by_the_equations(kind, v_reset):
    """Also those that step by themselves, with the hooks that they inherited."""
    torch.manual_seed(0)
    x = (torch.randn(8, 3, 50, dtype=torch.float64) + 0.6).requires_grad_()
    for decays in (True, False):
        given, rate, gain = settings(kind, decays)
        rest, close = (
            (0.7, v_reset, surrogate.ATan(), True),
            {"rtol": 1e-6, "atol": 1e-6},
        )  # a PLIF's w was rounded to float32
        expected, v = by_equations(x, rate, gain, 0.7, v_reset)
        assert 0.02 < expected.mean() < 0.9
        for node in (getattr(neuron, kind)(*given, *rest), getattr(neuron, f"MultiStep{kind}")(*given, *rest, "cupy")):
            node.double()
            out = node(x) if node.step_mode == "m" else torch.stack([node(frame) for frame in x])
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
            torch.testing.assert_close(node.v, v, **close)
        node = old_code.analog(getattr(neuron, kind))(*given, *rest).double()
        assert node.train(decays).v_seq is None
        voltages, v = by_equations(x, rate, gain, 0.7, v_reset, analog=True)
        out = node(x)
        assert node.v_seq is out
        torch.testing.assert_close((out, node.v), (voltages, v), **close)
        # A spike that the reset detaches is a number, so that the equations have the same gradient.
        weight = torch.arange(1.0, 9).view(-1, 1, 1)
        found, wanted = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (out, voltages))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        functional.reset_net(node)
        assert node.v_seq is None
        with pytest.raises(AssertionError, match="v has been set"):
            node.register_memory("v", 1.0)
        torch.testing.assert_close(node(x), out, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("QIFNode", {"tau": 2.5, "v_c": 0.7, "a0": 1.1, "v_threshold": 0.9, "v_rest": 0.1, "v_reset": -0.2}),
        ("EIFNode", {"tau": 2.5, "delta_T": 1.1, "theta_rh": 0.7, "v_threshold": 0.9, "v_rest": 0.1, "v_reset": -0.2}),
    ],
)
def test_other_neurons_take_their_arguments_in_the_old_order(name, given):
    x = torch.rand(6, 50) * 3
    own = getattr(installed_neuron, name)(**given)
    expected = torch.stack([own(frame) for frame in x])
    assert 0 < expected.mean() < 1
    made = getattr(neuron, name)(*given.values())
    assert torch.equal(torch.stack([made(frame) for frame in x]), expected)
    if name == "EIFNode":
        assert torch.equal(neuron.MultiStepEIFNode(*given.values())(x), expected)
    if host.IS_V2:  # it is broken in 0.0.0.0.14
        made = neuron.LIAFNode(torch.relu, False, 3.0, False, 0.9, None, surrogate.ATan(), True, cupy_fp32_inference=True)
        found = made.tau, made.decay_input, made.v_threshold, made.v_reset, made.detach_reset
        assert found == (3.0, False, 0.9, None, True)


def test_the_classes_are_subclasses_of_the_hosts_that_pickle_and_copy():
    assert spikingjelly.clock_driven.neuron is neuron
    assert spikingjelly.cext.neuron is cext
    assert issubclass(neuron.MultiStepLIFNode, neuron.LIFNode)
    assert issubclass(neuron.LIFNode, neuron.BaseNode)
    assert issubclass(cext.MultiStepIFNode, installed.neuron.IFNode)
    assert layer.SeqToANNContainer is installed_layer.SeqToANNContainer
    node = neuron.MultiStepParametricLIFNode(backend="cupy")
    x = torch.rand(4, 2, 3) * 2
    expected = node(x).detach()
    node.reset()
    for other in (pickle.loads(pickle.dumps(node)), copy.deepcopy(node)):
        assert type(other) is type(node)
        assert torch.equal(other(x), expected)
    node.store_v_seq = True
    node(x)
    assert node.v_seq.shape == x.shape
    for kind in KINDS:
        mine = type("Mine", (getattr(neuron, kind),), {})
        for made in (getattr(neuron, kind)(), getattr(neuron, f"MultiStep{kind}")(), mine(v_threshold=0.5)):
            assert host.kind(made) is getattr(host.neuron, kind)


def test_the_neurons_of_cext_take_the_name_of_a_surrogate():
    out = []
    for node in (
        cext.MultiStepLIFNode(2, 1, 0, surrogate_function="Sigmoid", alpha=3.0, detach_reset=True),
        neuron.MultiStepLIFNode(2.0, True, 1.0, 0.0, surrogate.Sigmoid(3.0), True),
    ):
        x = torch.linspace(0, 3, 240).view(4, 2, 30).requires_grad_()
        z = node(x)
        z.sum().backward()
        out.append((z.detach(), x.grad))
    assert out[0][0].mean() > 0.1
    assert all(torch.equal(a, b) for a, b in zip(*out, strict=True))
    assert cext.MultiStepIFNode(surrogate_function="ATan", alpha=3.0).surrogate_function.alpha == 3.0
    assert cext.LIFNode().tau == 100.0
    assert cext.ParametricLIFNode(4, 1, None).w.sigmoid().item() == pytest.approx(0.25)
    with pytest.raises(ValueError, match=r"'Erf'.*'ATan', 'Sigmoid'"):
        cext.MultiStepIFNode(surrogate_function="Erf")


def test_what_the_host_changed_is_as_it_was():
    x = torch.linspace(-1.5, 1.5, 31, requires_grad=True)
    for function in (surrogate.PiecewiseLeakyReLU(0.5, 0.1), lambda v: surrogate.piecewise_leaky_relu.apply(v, 0.5, 0.1)):
        spikes = function(x)
        assert torch.equal(spikes, (x >= 0).float())
        slope = torch.where(x.abs() < 0.5, 2.0, 0.1)
        assert torch.equal(torch.autograd.grad(spikes.sum(), x)[0], slope)
    if host.IS_V2:  # 2.0 lets its surrogates' gradients be called by themselves
        assert torch.equal(surrogate.PiecewiseLeakyReLU.backward(torch.full((31,), 3.0), x, 0.5, 0.1), 3 * slope)
    spikes = (torch.arange(12.0).view(3, 4) % 3 == 0).float()
    encoder = encoding.PeriodicEncoder(spikes)
    assert torch.equal(torch.stack([encoder(torch.zeros(4)) for _ in range(7)]), spikes.repeat(3, 1)[:7])
    torch.manual_seed(0)
    for dropout, shape in ((layer.MultiStepDropout(0.3), (5, 2, 40)), (layer.MultiStepDropout2d(0.3), (5, 2, 40, 3, 3))):
        kept = dropout(torch.ones(shape))
        assert torch.equal(kept, kept[:1].expand(shape))  # one mask for all frames
        assert 0.5 < (kept > 0).float().mean() < 0.9
    norm = layer.MultiStepThresholdDependentBatchNorm2d(2.0, 0.5, 3)
    assert norm(torch.rand(2, 2, 3, 4, 4)).shape == (2, 2, 3, 4, 4)


def test_old_nets_are_planned_and_converted():
    """Convolutions in containers are found; where the decay of a neuron of one's own is unseen, frames weigh the same."""
    x = torch.rand(6, 2, 2, 8, 8)
    assert len(sj_tac.plan(old_code.Sew().eval(), "preserve", 2, example_input=x).verdicts) == 5
    containers = [layer.SeqToANNContainer(torch.nn.Conv2d(a, 4, 3), torch.nn.BatchNorm2d(4)) for a in (2, 4)]
    own = old_code.analog(neuron.LIFNode)(detach_reset=True)
    net = torch.nn.Sequential(containers[0], neuron.MultiStepLIFNode(v_threshold=0.1), containers[1], own).eval()
    fast = sj_tac.convert(net, k=2, example_input=x)
    assert [v.status for v in sj_tac.report(fast).verdicts] == ["converted"] * 2
    assert "the decay of '3' is unknown: all frames of a group weigh the same" in sj_tac.report(fast)["2.0"].detail
    assert fast(x).shape == (6, 2, 4, 4, 4)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from spikingjelly.clock_driven.layer import DCT", "layer.DCT has no counterpart"),
        ("from spikingjelly.clock_driven import layer; layer.STDPLearner", "learning.STDPLearner"),
        ("from spikingjelly.clock_driven.neuron import Foo", "'Foo'"),
        ("from spikingjelly.clock_driven import neuron; neuron.Foo", "neuron of SpikingJelly 0.0.0.0.12 has no 'Foo'"),
        # Copies of the old neuron.py, which published models have, import it, and call it never.
        ("from spikingjelly.clock_driven.lava_exchange import to_lava_neuron", "activation_based.lava_exchange"),
        ("from spikingjelly.clock_driven import ann2snn", "spikingjelly.clock_driven.ann2snn"),
        ("import spikingjelly.clock_driven.model.sew", "spikingjelly.clock_driven.model"),
        ("from spikingjelly.cext import functional", "covers neuron of spikingjelly.cext"),
    ],
)
def test_what_is_not_there_is_named(code, told):
    with pytest.raises((ImportError, AttributeError), match=told):
        exec(code)


def test_arguments_that_meant_something_else_are_refused():
    for backend in ("lava", "cuda"):
        with pytest.raises(BackendError, match=f"'{backend}' of MultiStepIFNode .*'torch', 'cupy'"):
            neuron.MultiStepIFNode(backend=backend)
    # LIFNode(tau, v_threshold, v_reset) of 0.0.0.0.8 would fire at a threshold of 0, without a word.
    for name in ("LIFNode", "MultiStepLIFNode", "ParametricLIFNode", "MultiStepParametricLIFNode"):
        with pytest.raises(HostError, match=rf"{name}: decay_input=1\.0 is no bool; code .* before 0.0.0.0.10"):
            getattr(neuron, name)(2.0, 1.0, 0.0)


class Leaky(neuron.LIFNode):
    def neuronal_charge(self, x):
        self.v = 0.9 * self.v + x


class Fires(neuron.LIFNode):
    def neuronal_fire(self):
        return super().neuronal_fire() * 0.5


class Calls(neuron.LIFNode):
    """Its own step leads back to the host's, which has no use for its charge."""

    def forward(self, x):
        return super().forward(x)

    def neuronal_charge(self, x):
        self.v = x


class LeakyBase(neuron.BaseNode):
    neuronal_charge = Leaky.neuronal_charge


def test_dynamics_of_ones_own_are_refused_where_the_host_would_ignore_them():
    for kind, hook in ((Leaky, "charge"), (Fires, "fire"), (Calls, "charge")):
        with pytest.raises(HostError, match=rf"{kind.__name__} \(of .*\) overrides neuronal_{hook}.*what .*IFNode does"):
            kind()
    if host.IS_V2:
        with pytest.raises(HostError, match="its steps would not run"):
            LeakyBase()
    else:
        assert LeakyBase().eval()(torch.full((3,), 2.0)).sum() == 3
    assert type("Mine", (neuron.MultiStepLIFNode,), {})(3.0).tau == 3.0  # nothing of its own


class OwnStep(neuron.LIFNode):
    """A published kind of neuron, which steps by itself and inherits how it fires and resets."""

    def forward(self, x):
        self.neuronal_charge(x)
        spike = self.neuronal_fire()
        self.neuronal_reset(spike)
        return spike

    def neuronal_charge(self, x):
        self.v = 0.25 * self.v + x


@pytest.mark.parametrize("v_reset", [None, 0.25])
def test_a_neuron_whose_own_step_calls_its_own_charge_runs_them(v_reset):
    torch.manual_seed(0)
    x = torch.rand(8, 500) * 1.5
    v, expected = torch.tensor(v_reset or 0.0), []
    for frame in x:
        v = 0.25 * v + frame
        expected.append((v >= 1).float())
        v = v - expected[-1] if v_reset is None else torch.where(v >= 1, torch.full((), v_reset), v)
    node = OwnStep(2.0, False, 1.0, v_reset, surrogate.ATan())
    for training in (True, False):
        node.train(training).reset()
        found = torch.stack([node(frame) for frame in x])
        assert torch.equal(found, torch.stack(expected))
        assert 0.05 < found.mean() < 0.8


def test_importing_twice_changes_nothing_more():
    finders = len(sys.meta_path)
    importlib.reload(sys.modules["sj_tac.compat.clock_driven"])
    assert importlib.import_module("spikingjelly.clock_driven.neuron") is neuron
    assert len(sys.meta_path) == finders


class OnlyConstructed(installed_neuron.LIFNode):
    def __init__(self):
        super().__init__(tau=3.0, step_mode="m")


def test_neurons_that_are_only_constructed_otherwise_run_in_kernels():
    torch.manual_seed(0)
    nodes = neuron.MultiStepLIFNode(v_threshold=0.1), OnlyConstructed()
    nodes[1].v_threshold = 0.02
    convs = [installed_layer.Conv2d(i, 4, 3, padding=1, step_mode="m") for i in (2, 4)]
    net = torch.nn.Sequential(convs[0], nodes[0], convs[1], nodes[1]).eval()
    fast = sj_tac.convert(net, "preserve", 2, example_input=torch.rand(4, 2, 2, 8, 8))
    assert [v.kernel for v in sj_tac.report(fast).converted] == ["cpp, fused"] * 2
    again = pickle.loads(pickle.dumps(fast))
    assert [type(m).__name__ for m in again] == [type(m).__name__ for m in net]
    x = 3 * torch.rand(4, 2, 2, 8, 8)
    with torch.no_grad():
        expected = fast(x)
        assert 0.02 < expected.mean() < 0.95
        assert torch.equal(again(x), expected)
    assert [type(m) for m in sj_tac.restore(fast)] == [type(m) for m in net]
