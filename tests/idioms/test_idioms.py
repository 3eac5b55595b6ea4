"""What published models are written like: each idiom against its source, and against hooks on the source that aggregate."""

import copy
import functools
import pickle

import pytest
import torch
from defined import given, same
from idioms.miniatures import IDIOMS as OF_MINIATURES, N, OwnNeuron, T, by_hand
from idioms.own_forwards import OWN
from spikingjelly.activation_based import functional, neuron
from support import at_rest, only_v2
from torch import nn

import sj_tac
from sj_tac import host

IDIOMS = OF_MINIATURES | OWN
sj_tac.register_neuron(OwnNeuron, decay=lambda module: module.leak)
EVERY = pytest.mark.parametrize("name", list(IDIOMS))
# Folded, expanded, of layers that fold themselves, with values that are written.
SOME = ("folded", "static", "containers", "buffers", "own forwards")
AT_LENGTH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.exhaustive) for name in IDIOMS]
)


def inputs(idiom, dtype=torch.float32, seed=0, shape=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape or idiom.shape, generator=generator)
    return (x if len(idiom.shape) == 4 else (x > 0.5).float() * 1.5).to(dtype)


def neurons(net):
    return {n: m for n, m in net.named_modules() if isinstance(m, (neuron.BaseNode, OwnNeuron))}


def rates_of(net, x):
    rates, handles = {}, []
    for n, module in neurons(net).items():
        handles.append(module.register_forward_hook(lambda m, a, out, n=n: rates.update({n: out.mean().item()})))
    at_rest(net, x)
    for handle in handles:
        handle.remove()
    return rates


def move_thresholds(net, x):
    """Until every neuron fires at a rate of 0.1 to 0.4, from the first on."""
    for _ in range(60):
        rates = rates_of(net, x)
        wrong = [n for n, rate in rates.items() if not 0.1 < rate < 0.4 and not isinstance(net.get_submodule(n), OwnNeuron)]
        if not wrong:
            return
        net.get_submodule(wrong[0]).v_threshold *= 0.85 if rates[wrong[0]] <= 0.1 else 1.1


def make(name, dtype=torch.float32):
    """The source net, awake: BatchNorm has the statistics of its input, and is moved upwards; and its sample."""
    return copy.deepcopy(_awake(name, dtype)), inputs(IDIOMS[name], dtype, 9)


@functools.cache
def _awake(name, dtype):
    idiom = IDIOMS[name]
    torch.manual_seed(3)
    net = idiom.make().to(dtype)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 1.0, 1.6)
            nn.init.uniform_(module.bias, 0.5, 1.1)
    net.train()
    with torch.no_grad():
        for seed in range(6):
            functional.reset_net(net)
            net(inputs(idiom, dtype, seed))
    functional.reset_net(net)
    move_thresholds(net.eval(), inputs(idiom, dtype, 9))
    return train_neurons(net.eval())


def policy(name, k):
    return {"layers": list(IDIOMS[name].layers), "default": {"mode": "preserve", "k": k}}


def train_neurons(net):
    """The older host's neurons pass gradients while training alone, which changes nothing else in them."""
    for module in neurons(net).values():
        module.train(not host.IS_V2)
    return net


def convert(name, net, x, k, **more):
    return train_neurons(sj_tac.convert(net, policy(name, k), example_input=x, **more))


def oracle(name, net, k, steps=T):
    """The source, with hooks that hand each conv the sum of its group's frames in every frame's place."""
    idiom = IDIOMS[name]
    return by_hand(net, k, {c: (steps, -1) if c in idiom.folded else None for c in idiom.converted if c not in idiom.exact})


def run(net, x):
    """All that a call shows; there are gradients to compare."""
    found = given(net, x)
    assert any(value.abs().sum() > 0 for name, value in found.items() if name.startswith("gradient of "))
    return found


CLOSE = {"rtol": 1e-9, "atol": 1e-10}


@EVERY
def test_its_convolutions_are_converted(name):
    net, x = make(name, torch.float64)
    rates = rates_of(net, x)
    assert len(rates) == len(neurons(net))
    assert all(0.03 < rate < 0.5 for rate in rates.values()), f"the net is not awake: {rates}"
    report = sj_tac.plan(net, policy(name, 2), example_input=x)
    assert {v.layer for v in report.converted} == set(IDIOMS[name].converted), report
    assert not [v for v in report.refused if isinstance(net.get_submodule(v.layer), nn.modules.conv._ConvNd)]


@EVERY
@pytest.mark.parametrize(("k", "fuse"), [(1, True), (2, True), (3, False), (T, True)])
def test_groups_of_frames_are_what_hooks_on_the_source_make(name, k, fuse):
    """At k = 1 the hooks change nothing: it is the source."""
    net, x = make(name, torch.float64)
    fast = convert(name, net, x, k, fuse=fuse)
    expected = run(oracle(name, net, k), x)
    same(run(fast, x), expected, **CLOSE)
    if k == 2 and set(IDIOMS[name].converted) != set(IDIOMS[name].exact):
        assert not torch.equal(expected["output 0"], run(net, x)["output 0"]), (
            "aggregation changes nothing here: the test sees nothing"
        )


@EVERY
def test_other_numbers_of_samples_and_steps_and_another_k(name):
    """N = 1 among them, for which folded frames look like others."""
    net, x = make(name, torch.float64)
    idiom, fast = IDIOMS[name], convert(name, net, x, 2)
    batch_first = idiom.shape[0] == N
    for steps, samples, k in ((T, 1, 2), (5, 5, 2), (4, 2, 3)):
        if len(idiom.shape) == 4:
            steps, shape = T, (samples, *idiom.shape[1:])
        else:
            shape = ((samples, steps) if batch_first else (steps, samples)) + idiom.shape[2:]
        if k == 3:
            sj_tac.set_k(fast, k)
        z = inputs(idiom, torch.float64, 5, shape)
        same(run(fast, z), run(oracle(name, net, k, steps), z), **CLOSE)


@AT_LENGTH
def test_training_of_everything_but_batchnorm(name):
    """Fine-tuning: gradients with the neurons in training mode, BatchNorm frozen."""
    net, x = make(name, torch.float64)
    fast = convert(name, net, x, 2)
    sj_tac.freeze_bn(fast)
    reference = oracle(name, net, 2)
    fast.train()
    reference.train()
    for module in reference.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    same(run(fast, x), run(reference, x), **CLOSE)


@AT_LENGTH
def test_keys_copies_and_the_way_back(name):
    net, x = make(name)
    fast = convert(name, net, x, 2)
    assert list(fast.state_dict()) == list(net.state_dict())
    fast.load_state_dict(net.state_dict(), strict=True)
    net.load_state_dict(fast.state_dict(), strict=True)
    expected = at_rest(fast, x)
    for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        assert torch.equal(at_rest(again, x), expected)
    back = sj_tac.restore(fast)
    assert [type(m) for m in back.modules()] == [type(m) for m in net.modules()]
    assert torch.equal(at_rest(back, x), at_rest(net, x))


@only_v2
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n, idiom in IDIOMS.items() if not idiom.exact])
def test_compiled_it_is_the_same(name):
    net, x = make(name, torch.float64)
    fast = convert(name, net, x, 2)
    expected = at_rest(fast, x)
    with torch.no_grad():
        found = torch.compile(fast, backend="eager")(x)
    torch.testing.assert_close(found, expected, **CLOSE)
