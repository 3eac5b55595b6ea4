"""Algorithms 1 and 2 of arXiv 2603.13810, written out step by step, against ``normalize=False``.

decay_input=False and tau = 1 / (1 - beta) make SpikingJelly's LIF the paper's ``V = beta V + I``; soft reset, no BN.
"""

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, neuron, surrogate
from support import conv, frames

from sj_tac import TAC, TACTP

THRESHOLD = 1.0


def groups_of(x, k):
    """The frames in groups of k; the last group holds what is left."""
    return [x[start : start + k] for start in range(0, len(x), k)]


def algorithm_1(x, weight, bias, beta, k):
    """TAC: aggregate the group, convolve once, one LIF update with the decay of the whole group, one spike frame."""
    v, spikes = 0.0, []
    for group in groups_of(x, k):
        length = len(group)
        aggregated = torch.zeros_like(group[0])
        for j in range(length):
            aggregated = aggregated + beta ** (length - 1 - j) * group[j]
        current = F.conv2d(aggregated, weight, bias, padding=1)
        v = beta**length * v + current
        spike = (v >= THRESHOLD).to(v)
        v = v - spike * THRESHOLD
        spikes.append(spike)
    return torch.stack(spikes), v


def algorithm_2(x, weight, bias, beta, k):
    """TAC-TP: aggregate and convolve once per group, then one LIF update for every frame of it, on the same current."""
    v, spikes = 0.0, []
    for group in groups_of(x, k):
        length = len(group)
        aggregated = torch.zeros_like(group[0])
        for j in range(length):
            aggregated = aggregated + beta ** (length - 1 - j) * group[j]
        current = F.conv2d(aggregated, weight, bias, padding=1)
        for _ in range(length):
            v = beta * v + current
            spike = (v >= THRESHOLD).to(v)
            v = v - spike * THRESHOLD
            spikes.append(spike)
    return torch.stack(spikes), v


def lif(beta):
    return neuron.LIFNode(
        1 / (1 - beta), decay_input=False, v_threshold=THRESHOLD, v_reset=None, surrogate_function=surrogate.ATan()
    )


@pytest.mark.parametrize("beta", [0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 7, 8, 13])
@pytest.mark.parametrize("k", [2, 3, 4, 8])
@pytest.mark.parametrize("which", ["TAC", "TACTP"])
def test_the_papers_algorithms(which, k, steps, beta):
    torch.manual_seed(0)
    convolution = conv().double()
    x = frames(steps, 2, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        algorithm = algorithm_1 if which == "TAC" else algorithm_2
        spikes, v = algorithm(x, convolution.weight, convolution.bias, beta, k)
        if which == "TAC":
            operator = TAC(convolution, None, lif(beta), k, normalize=False, spikes="binary")
        else:
            operator = TACTP(convolution, None, lif(beta), k, normalize=False)
        got = operator(x)
    assert 0 < spikes.mean() < 1 or steps == 1
    assert torch.equal(got, spikes)
    torch.testing.assert_close(operator.neuron.v, v, rtol=0, atol=1e-12)


def test_the_test_would_notice_the_normalised_form():
    torch.manual_seed(0)
    convolution = conv().double()
    x = frames(8, 2, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        spikes, _ = algorithm_2(x, convolution.weight, convolution.bias, 0.5, 4)
        operator = TACTP(convolution, None, lif(0.5), 4)
        assert not torch.equal(operator(x), spikes)
        functional.reset_net(operator)
