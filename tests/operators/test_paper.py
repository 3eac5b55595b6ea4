"""Algorithms 1 and 2 of arXiv 2603.13810, written out step by step, against ``normalize=False``; why weights are normalized.

decay_input=False and tau = 1 / (1 - beta) make SpikingJelly's LIF the paper's ``V = beta V + I``; soft reset, no BN.
"""

import copy

import pairs
import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import neuron, surrogate
from support import NEURONS, conv, frames, node, norm, plain

from sj_tac import TAC, TACTP

THRESHOLD = 1.0


def algorithm(x, weight, bias, beta, k, collapse):
    """Aggregate a group, convolve once; then one LIF update for every frame of it (TAC-TP), or one for all (TAC)."""
    v, spikes = 0.0, []
    for start in range(0, len(x), k):
        group = x[start : start + k]
        length = len(group)
        aggregated = torch.zeros_like(group[0])
        for j in range(length):
            aggregated = aggregated + beta ** (length - 1 - j) * group[j]
        current = F.conv2d(aggregated, weight, bias, padding=1)
        for _ in range(1 if collapse else length):
            v = (beta**length if collapse else beta) * v + current
            spike = (v >= THRESHOLD).to(v)
            v = v - spike * THRESHOLD
            spikes.append(spike)
    return torch.stack(spikes), v


@pairs.parametrize(collapse=[True, False], k=[2, 3, 8], steps=[1, 7, 8], beta=[0.5, 0.9])
def test_the_papers_algorithms(collapse, k, steps, beta):
    torch.manual_seed(0)
    convolution = conv().double()
    given = {"decay_input": False, "v_threshold": THRESHOLD, "v_reset": None, "surrogate_function": surrogate.ATan()}
    spiking = neuron.LIFNode(1 / (1 - beta), **given)
    x = frames(steps, 2, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        spikes, v = algorithm(x, convolution.weight, convolution.bias, beta, k, collapse)
        operator = (TAC if collapse else TACTP)(convolution, None, spiking, k, normalize=False)
        got = operator(x)
    assert 0 < spikes.mean() < 1 or steps == 1
    assert torch.equal(got, spikes)
    torch.testing.assert_close(operator.neuron.v, v, rtol=0, atol=1e-12)


def boundaries(steps, k):
    """Index of the last frame of every group."""
    return [min(start + k, steps) - 1 for start in range(0, steps, k)]


@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), NEURONS)
def test_normalised_membranes_are_exact_at_every_group_boundary(kind, v_reset, decay_input):
    """Below threshold, in float64: the reason for the weights."""
    torch.manual_seed(0)
    steps = 11
    x = frames(steps, 2, 2, 5, 5, dtype=torch.float64)
    for tau, k in ((1.25, 4), (10.0, 3)):
        # A threshold out of reach: what is compared is the membrane alone, with conv bias and BN in eval mode.
        spiking = node(kind, v_reset, decay_input, tau, v_threshold=1e6, store_v_seq=True)
        parts = [m.double() for m in (conv(), norm(), spiking)]
        exact, preserve = plain(*parts), TACTP(*copy.deepcopy(parts), k)
        binary = TAC(*copy.deepcopy(parts), k, spikes="binary")
        with torch.no_grad():
            for net in (exact, preserve, binary):
                net(x)
        expected = exact[-1].v_seq[boundaries(steps, k)]
        assert expected.std() > 1e-3
        torch.testing.assert_close(preserve.neuron.v_seq[boundaries(steps, k)], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(binary.neuron.v_seq, expected, rtol=0, atol=1e-12)
