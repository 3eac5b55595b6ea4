"""``fire`` on the CPU where its kernels are left as Python: every neuron, surrogate, pool, layout and dtype, on small maps.

test_fire.py runs this in a process of its own: Numba compiles seconds for each kind of neuron, dtype and layout.
"""

import pytest
import torch
from fire_cases import assert_gradient_to_the_time_constant, assert_is_the_reference, build, space
from hypothesis import given, settings
from numba import config
from support import NEURONS, node

from sj_tac.functional import fire
from sj_tac.kernels import fire_op

assert config.DISABLE_JIT


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(space)
def test_fire_and_its_gradients_are_the_references(case):
    before = fire_op.RUNS["fire", "numba"]
    assert_is_the_reference("numba", *build(case))
    assert fire_op.RUNS["fire", "numba"] == before + 2  # forward and backward: the kernel really ran


@pytest.mark.parametrize("decay_input", [True, False])
@pytest.mark.parametrize("v_reset", [None, -0.5])
def test_gradient_to_the_time_constant(decay_input, v_reset):
    assert_gradient_to_the_time_constant("numba", v_reset, decay_input)


@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), NEURONS[::3])
def test_gradcheck_where_the_map_is_differentiable(kind, v_reset, decay_input):
    """Below threshold with detach_reset the voltage is linear in everything; weights always enter linearly."""
    torch.manual_seed(0)
    y = torch.randn(2, 1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    v0 = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    quiet = node(kind, v_reset, decay_input, 3.0, detach_reset=True, v_threshold=1e6).double()
    loud = node(kind, v_reset, decay_input, 3.0, v_threshold=0.3).double()

    def voltage(y, v0, scale, shift):
        return fire(y, quiet, 3, steps=5, v=v0, scale=scale, shift=shift, backend="numba")[1]

    def counts(weights):
        return fire(y.detach(), loud, 3, steps=5, weights=weights, group=2, backend="numba")[0]

    assert torch.autograd.gradcheck(voltage, (y, v0, scale, shift))
    assert torch.autograd.gradcheck(counts, (weights,))
