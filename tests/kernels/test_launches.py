"""What is launched for a call on CUDA, and what is not: small operations, waits for the device, sums that nobody wants.

CPU tensors stand for CUDA ones (stub_cuda.py).
"""

import copy

import pytest
import shim
import stub_cuda
import torch
from fire_cases import assert_is_the_reference
from spikingjelly.activation_based import layer
from support import awake, conv, frames, node, norm
from torch import nn

import sj_tac
from sj_tac import host
from sj_tac.functional import fire
from sj_tac.kernels import fire_op, norm_map
from sj_tac.kernels.gpu import launches, program as cuda
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.weights import _at_once, decay_weights

pytestmark = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)


device = stub_cuda.device


def test_a_backward_without_gradients_to_voltages_and_weights_does_not_compute_them(device):
    torch.manual_seed(0)
    y, v, weights = torch.randn(2, 1, 2, 4, 4, requires_grad=True), torch.zeros(1, 2, 4, 4), torch.rand(4)
    made = []
    program = cuda.program
    original = fire_op.BACKWARD["cpu"]  # the stand-in's, as nobody watches
    device_calls = []
    machine = pytest.MonkeyPatch()
    machine.setattr(cuda, "program", lambda name, **macros: (made.append((name, macros)), program(name, **macros))[1])
    machine.setitem(fire_op.BACKWARD, "cpu", lambda *a: (device_calls.append(a), original(*a))[1])
    with machine.context():
        out, _ = fire(y, node("lif"), 2, v=v, weights=weights, group=2, pool=layer.MaxPool2d(3, 2, 1), backend="cupy")
        out.sum().backward()
    machine.undo()
    assert device_calls[0][1] is None, "no gradient arrived at the voltages"
    assert sorted(name for name, _ in made) == ["fire_backward_pooled", "fire_forward", "fire_forward", "fire_pool"]
    assert [m["WEIGHT_SUMS"] for name, m in made if "backward" in name] == [0]


def drives(*shape, last=False):
    y = torch.randn(shape)
    return y.movedim(-3, -1).contiguous().movedim(-1, -3) if last else y


def test_an_average_pool_of_2x2_is_one_kernel(device):
    torch.manual_seed(0)
    options = {"steps": 5, "pool": layer.AvgPool2d(2), "weights": torch.rand(5), "group": 2}
    assert_is_the_reference("cupy", drives(3, 2, 3, 4, 6, last=True), node("plif", v_threshold=0.4), 2, options)
    assert [kernel for _, kernel, _ in device.calls] == ["fire_forward", "fire_backward"]


def test_drives_of_different_lengths_are_refused_and_not_guessed(device):
    o = Operands(
        torch.randn(3, 1, 2, 4, 4), None, None, None, None, None, None, None, [1, 2, 1], 4, 1.0, 1.0, 1.0, 0.0, 1.0, True,
        False, 0, 1.0, 0, (), 1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"as many steps on each drive, fewer on the last; got \[1, 2, 1\]"):
        launches.forward("cupy", o)


def large_norm(weight):
    """A BatchNorm of more channels than a block has threads."""
    torch.manual_seed(0)
    made = nn.BatchNorm2d(300, affine=weight).eval()
    with torch.no_grad():
        made.running_mean.normal_()
        made.running_var.uniform_(0.01, 4)
        for parameter in made.parameters():
            parameter.normal_()
    return made


NORMS = [("cupy", True), ("nvrtc", False)]


@torch.no_grad()
@pytest.mark.parametrize(("launcher", "weight"), NORMS)
def test_the_affine_map_of_a_norm_is_one_launch_and_the_same_to_the_last_bit(device, launcher, weight):
    made = large_norm(weight)
    expected, known = host.affine(made, host.Affine()), host.Affine()
    for found in (norm_map.affine(made, known, launcher), norm_map.affine(made, known, "auto")):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    assert device.calls == [(launcher, "norm_affine", None), ("cupy", "norm_affine", None)]
    made.running_var.data.mul_(2)  # leaves no trace in a version
    assert not torch.equal(norm_map.affine(made, known, launcher)[0], expected[0])
    del device.calls[:]
    norm_map.affine(made, known, "reference")
    norm_map.affine(made.double(), known, launcher)
    assert not device.calls


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(1,) * 8, (2, 2, 2), (1,)])
@pytest.mark.parametrize("normalize", [True, False])
def test_decay_weights_of_a_tensor_at_once(lengths, normalize):
    for number in (0.3, 0.9, 1.0):
        beta = torch.tensor(number, dtype=torch.float64)
        expected = torch.tensor([float(w) for w in decay_weights(number, lengths, normalize)], dtype=torch.float64)
        torch.testing.assert_close(_at_once(beta, lengths, normalize), expected, rtol=1e-14, atol=0)


@torch.no_grad()
def test_a_call_of_a_converted_net_launches_each_kernel_once_a_layer(device):
    torch.manual_seed(0)
    net = awake(
        nn.Sequential(conv(2, 4), norm(4), node("lif"), conv(4, 4), norm(4), node("lif")).eval(), frames(6, 2, 2, 8, 8)
    )
    fast = sj_tac.convert(copy.deepcopy(net), "preserve", 2, backend="nvrtc")
    del device.calls[:]
    fast(frames(4, 2, 2, 8, 8))
    launched = [kernel for _, kernel, _ in device.calls]
    assert launched == ["aggregate_forward", "norm_affine", "conv_fire_forward", "norm_affine", "conv_fire_forward"]
