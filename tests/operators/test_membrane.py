"""Below threshold, in float64, the membrane at every group boundary is the exact one: the reason for the weights."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional
from support import NEURONS, conv, frames, node, norm, plain

from sj_tac import TAC, TACTP


def boundaries(steps, k):
    """Index of the last frame of every group."""
    return [min(start + k, steps) - 1 for start in range(0, steps, k)]


@pytest.mark.parametrize("k", [2, 3, 4, 8])
@pytest.mark.parametrize("tau", [1.25, 2.0, 10.0])
@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), NEURONS)
def test_normalised_membranes_are_exact(kind, v_reset, decay_input, tau, k):
    torch.manual_seed(0)
    steps = 11
    # A threshold out of reach: what is compared is the membrane alone, with conv bias and BN in eval mode.
    spiking = node(kind, v_reset, decay_input, tau, v_threshold=1e6, store_v_seq=True)
    parts = [m.double() for m in (conv(), norm(), spiking)]
    x = frames(steps, 2, 2, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        exact = plain(*parts)
        exact(x)
        expected = exact[-1].v_seq[boundaries(steps, k)]
        assert expected.std() > 1e-3

        preserve = TACTP(*copy.deepcopy(parts), k)
        preserve(x)
        torch.testing.assert_close(preserve.neuron.v_seq[boundaries(steps, k)], expected, rtol=0, atol=1e-12)

        binary = TAC(*copy.deepcopy(parts), k, spikes="binary")
        binary(x)
        torch.testing.assert_close(binary.neuron.v_seq, expected, rtol=0, atol=1e-12)


def test_long_and_chunked_calls_agree_where_k_divides_the_chunks():
    torch.manual_seed(0)
    parts = [conv(), norm(), node("plif", v_threshold=0.3)]
    x = frames(14, 2, 2, 5, 5)
    with torch.no_grad():
        for build in (lambda p: TACTP(*p, 4), lambda p: TAC(*p, 4), lambda p: TAC(*p, 4, spikes="count")):
            operator = build(copy.deepcopy(parts))
            whole = operator(x)
            functional.reset_net(operator)
            pieces = torch.cat([operator(x[:8]), operator(x[8:])])
            assert torch.equal(whole, pieces)
            functional.reset_net(operator)
            shifted = torch.cat([operator(x[:6]), operator(x[6:])])
            assert shifted.shape[0] == (14 if isinstance(operator, TACTP) else 4)
