"""The measured plan on the idioms of published nets, and on SpikingJelly's own nets: against hooks, and in any size."""

import copy

import pytest
import torch
from idioms.miniatures import N, T
from idioms.test_idioms import AT_LENGTH, CLOSE, EVERY, IDIOMS, inputs, make, oracle, run, same, train_neurons
from spikingjelly.activation_based import functional
from support import ZOO, awake, frames, only_v2
from torch import nn

from sj_tac.definition import convs, neurons
from sj_tac.rewrites.measure.measured import measure
from sj_tac.verdicts import Refusal

PLANS = {}


def planned(name):
    """The plan of an idiom; each is made once."""
    if name not in PLANS:
        net, x = make(name, torch.float64)
        PLANS[name] = measure(net, (x,), linears="linear" in IDIOMS[name].layers)
    return PLANS[name]


def shared(name, net, k):
    fast = copy.deepcopy(net)
    neurons.swap(fast)
    plan = planned(name).sharings(k, fast)
    convs.share(fast, {layer: sharing for layer, sharing in plan.items() if layer in IDIOMS[name].converted})
    return train_neurons(fast)


@EVERY
def test_its_convolutions_are_planned_and_are_what_hooks_make(name):
    """Values, voltages and gradients at k = 1, 2, 3; at k = 1 the hooks change nothing."""
    net, x = make(name, torch.float64)
    assert planned(name).shared.keys() >= set(IDIOMS[name].converted), planned(name).convolutions
    for k in (1, 2, 3):
        same(run(shared(name, net, k), x), run(oracle(name, net, k), x), **CLOSE)


@AT_LENGTH
def test_the_plan_holds_for_other_numbers_of_samples_and_steps(name):
    net, _ = make(name, torch.float64)
    shape = IDIOMS[name].shape
    for steps, samples in ((T, 1), (5, 5)):
        if len(shape) == 4:
            steps, other = T, (samples, *shape[1:])
        else:
            other = ((samples, steps) if shape[0] == N else (steps, samples)) + shape[2:]
        z = inputs(IDIOMS[name], torch.float64, 5, other)
        same(run(shared(name, net, 2), z), run(oracle(name, net, 2, steps), z), **CLOSE)


QUICK = ("CIFAR10Net", "spiking_vgg11_bn", "sew_resnet18", "ms_resnet18")


@only_v2
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in ZOO])
def test_nets_of_spikingjelly(name):
    """At least the convolutions that are known to drive neurons; and k = 1 is the source."""
    torch.manual_seed(0)
    builder, (channels, side, _), chains, _ = ZOO[name]
    side = min(side, 32) if "Net" not in name else side
    net, x = builder().eval(), frames(4, 2, channels, side, side, rate=0.3)
    functional.set_step_mode(net, "m")
    awake(net, x)
    found = measure(net, (x,))
    assert len(found.convolutions) == len([m for m in net.modules() if isinstance(m, nn.modules.conv._ConvNd)])
    affine = [layer for layer, each in found.shared.items() if each.is_affine]
    assert len(affine) >= chains, {n: each.detail for n, each in found.convolutions.items() if isinstance(each, Refusal)}
    fast = copy.deepcopy(net)
    convs.share(fast, found.sharings(1, fast, approximate=True))
    with torch.no_grad():
        functional.reset_net(net)
        assert torch.equal(fast(x), net(x))
