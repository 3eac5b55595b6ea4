"""Numbers of a neuron that are tensors, by channel or by place: they broadcast as in the source."""

import copy

import pytest
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from support import awake, only_v2
from torch import nn

import sj_tac
from sj_tac import host
from sj_tac.errors import StaleValueError

T, N = 4, 3


def _lif():
    return neuron.LIFNode(tau=2.0, detach_reset=True, surrogate_function=surrogate.ATan())


def _convs(conv, norm, channels):
    return nn.Sequential(conv(2, channels, 3, padding=1, bias=False), norm(channels), _lif())


def _linear():
    return nn.Sequential(
        *_convs(layer.Conv2d, layer.BatchNorm2d, 4), layer.Flatten(), layer.Linear(144, 10), _lif(), layer.Linear(10, 2)
    )


# A net, a frame of one sample, the shape of a number by channel or by place. Where sizes are alike, the wrong dimension
# broadcasts without a word.
NETS = {
    "Linear": (_linear, (2, 6, 6), (10,)),
    "Linear, by sample": (_linear, (2, 6, 6), (N, 10)),
    "lines, C == L": (lambda: _convs(layer.Conv1d, layer.BatchNorm1d, 6), (2, 6), (6, 1)),
    "lines": (lambda: _convs(layer.Conv1d, layer.BatchNorm1d, 6), (2, 5), (6, 1)),
    "lines, by place": (lambda: _convs(layer.Conv1d, layer.BatchNorm1d, 6), (2, 5), (5,)),
    "volumes, C == N": (lambda: _convs(layer.Conv3d, layer.BatchNorm3d, N), (2, 4, 5, 6), (N, 1, 1, 1)),
    "volumes": (lambda: _convs(layer.Conv3d, layer.BatchNorm3d, 4), (2, 4, 5, 6), (4, 1, 1, 1)),
    "maps": (lambda: _convs(layer.Conv2d, layer.BatchNorm2d, 6), (2, 5, 5), (6, 1, 1)),
}


def made(name):
    """A net, its frames, and numbers by place for its last neuron, of about 1."""
    build, frame, shape = NETS[name]
    torch.manual_seed(0)
    net, x = build(), torch.rand(T, N, *frame, dtype=torch.float64)
    functional.set_step_mode(net, "m")
    return awake(net.double().eval(), x), x, 0.5 + torch.rand(shape, dtype=torch.float64)


def last_neuron(net):
    return [m for m in net if isinstance(m, neuron.LIFNode)][-1]


def called(net, x, grad):
    """Outputs of two calls, the last voltage, and where wanted the gradients of x and of all parameters."""
    net.train(not host.IS_V2)  # SpikingJelly before 2.0 has neither gradients nor tensors of thresholds in evaluation
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    functional.reset_net(net)
    x = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        out = torch.stack([net(x)[:], net(x.flip(0))[:]])
    found = [out.detach(), last_neuron(net).v.detach()]
    if grad:
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found += torch.autograd.grad((out * weights).sum(), [x, *net.parameters()])
    return found


def same(fast, net, x, grad):
    for a, b in zip(called(fast, x, grad), called(net, x, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_a_threshold_by_place(name, fuse, grad):
    net, x, numbers = made(name)
    fast = sj_tac.convert(net, "preserve", k=1, fuse=fuse)
    last_neuron(net).v_threshold = last_neuron(fast).v_threshold = numbers * last_neuron(net).v_threshold
    same(fast, net, x, grad)
    assert called(net, x, False)[0].any()
    later = copy.deepcopy(net)
    same(sj_tac.convert(later, "preserve", k=1, fuse=fuse), net, x, grad)


@pytest.mark.parametrize("spikes", ["count", "binary"])
@pytest.mark.parametrize("name", NETS)
def test_a_threshold_by_place_behind_a_collapse(name, spikes):
    net, x, numbers = made(name)
    policy = {"version": 1, "default": {"mode": "collapse", "k": 2, "spikes": spikes}}
    fused, unfused = (sj_tac.convert(net, policy, fuse=fuse) for fuse in (True, False))
    last_neuron(fused).v_threshold = last_neuron(unfused).v_threshold = numbers * last_neuron(net).v_threshold
    same(fused, unfused, x, True)


def test_spikingjellys_margins_of_thresholds():
    net, x, _ = made("Linear")
    fast = sj_tac.convert(net, "preserve", k=1)
    labels = torch.nn.functional.one_hot(torch.tensor([1, 3, 7]), 10).double()
    for node in (last_neuron(net.train()), last_neuron(fast.train())):
        height = node.v_threshold
        functional.set_threshold_margin(node, labels, height, threshold0=0.7 * height, threshold1=1.1 * height)
        assert node.v_threshold.shape == (N, 10)
    same(fast, net, x, False)


def test_a_threshold_of_more_places_than_a_frame_has_is_refused():
    net, x, _ = made("Linear")
    fast = sj_tac.convert(net, "preserve", k=1)
    last_neuron(fast).v_threshold = torch.full((2, 1, 10), 0.3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"makes frames \[2, 3, 10\] of frames \[3, 10\].*v_threshold"):
        fast(x)


@only_v2
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_a_surrogates_alpha_by_place(name, fuse):
    net, x, numbers = made(name)
    fast = sj_tac.convert(net, "preserve", k=1, fuse=fuse)
    last_neuron(net).surrogate_function.alpha = last_neuron(fast).surrogate_function.alpha = 2 * numbers
    same(fast, net, x, True)


@only_v2
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_a_reset_by_place_takes_the_hosts_own_steps(name, grad):
    net, x, numbers = made(name)
    fast = sj_tac.convert(net, "preserve", k=1)
    last_neuron(net).v_reset = last_neuron(fast).v_reset = -0.2 * numbers
    same(fast, net, x, grad)
    assert "its v_reset is a tensor" in last_neuron(fast)._tac.ran


@only_v2
def test_an_alpha_that_is_written_before_frames_are_read_is_noticed():
    net, x, numbers = made("maps")
    net = nn.Sequential(*net, layer.Conv2d(6, 2, 1, step_mode="m").double(), neuron.LIFNode(step_mode="m"))
    net[2].surrogate_function.alpha = numbers
    fast = sj_tac.convert(net, "preserve", k=2)
    kept = []
    fast[2].register_forward_hook(lambda module, args, out: kept.append(out))
    fast(x)
    assert fast[2]._tac.gave == "sums"
    fast[2].surrogate_function.alpha.mul_(2)
    with pytest.raises(StaleValueError, match=r"layer '2': a tensor \[6, 1, 1\] that it read"):
        kept[0].sum()
