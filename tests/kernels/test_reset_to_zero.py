"""A neuron that resets hard to 0 has a kernel with less in it: the same numbers as the one for any rest, to the last bit."""

import pytest
import torch
from spikingjelly.activation_based import neuron
from torch import nn

from sj_tac.kernels import fire as kernels
from sj_tac.kernels.cpu import fire
from sj_tac.kernels.cpu.launches import Launch

NEURONS = {
    "LIF": lambda v: neuron.LIFNode(tau=2.0, v_reset=v),
    "LIF, tau 3": lambda v: neuron.LIFNode(tau=3.0, v_reset=v),
    "LIF, tau 3, drives not divided": lambda v: neuron.LIFNode(tau=3.0, decay_input=False, v_reset=v),
    "LIF, drives not divided": lambda v: neuron.LIFNode(tau=4.0, decay_input=False, v_reset=v),
    "IF": lambda v: neuron.IFNode(v_reset=v),
    "PLIF": lambda v: neuron.ParametricLIFNode(init_tau=2.7, v_reset=v),
    "never fires": lambda v: neuron.LIFNode(v_threshold=float("inf"), v_reset=v),
    "fires below 0": lambda v: neuron.LIFNode(v_threshold=-0.2, v_reset=v),
}


def operands(node, y, pool, affine):
    channels = y.shape[2]
    scale, shift = (torch.rand(channels) + 0.5, torch.randn(channels)) if affine else (None, None)
    node.step_mode = "m"
    call = kernels.Call(y, node, [2] * y.shape[0], None, None, scale, shift, pool, torch.rand(2 * y.shape[0]), 2)
    return kernels.operands(call, None)


def hostile(*shape):
    """Drives of which every third is none that a net should have: infinite, no number, the smallest, zeros of both signs."""
    y = 3 * torch.randn(shape)
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38])
    flat = y.view(-1)
    flat[::3] = odd.repeat(flat.numel() // 3 + 1)[: flat[::3].numel()]
    return y


def bits(x):
    """Its numbers as they are held; what is no number is alike."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int32)


@pytest.mark.parametrize("drives", [torch.randn, hostile])
@pytest.mark.parametrize("pool", [None, nn.MaxPool2d(2)])
@pytest.mark.parametrize("name", NEURONS)
def test_it_is_the_neuron_of_any_rest_to_the_last_bit(name, pool, drives):
    torch.manual_seed(0)
    y = drives(4, 2, 5, 6, 8)
    with torch.no_grad():
        o = operands(NEURONS[name](0.0), y, pool, drives is torch.randn)
        launch = Launch(o)
        assert launch.neuron.rest is launch.neuron.high is None
        got = launch(y, None, None, (o.scale, o.shift))
        launch.neuron = type(launch.neuron)(*fire._neuron_of(o))
        assert launch.neuron.rest == launch.neuron.high == 0
        expected = launch(y, None, None, (o.scale, o.shift))
        # Once more from voltages that are not at rest.
        v = torch.randn(2, 5, 6, 8)
        later = launch(y, v, None, (o.scale, o.shift))
        launch.neuron = fire.neuron_of_tiles(o)
        got += launch(y, v, None, (o.scale, o.shift))
    for a, b in zip(got, (*expected, *later), strict=True):
        assert torch.equal(bits(a), bits(b))
    if drives is torch.randn and name != "never fires":
        assert 0.01 < (got[0] > 0).float().mean() <= 1


@pytest.mark.parametrize("v_reset", [-0.0, 0.1, -1.0, None])
def test_every_other_reset_has_the_general_one(v_reset):
    o = operands(neuron.LIFNode(v_reset=v_reset), torch.randn(1, 1, 2, 4, 4), None, False)
    assert fire.neuron_of_tiles(o) == fire._neuron_of(o)
    assert None not in fire.neuron_of_tiles(o)
