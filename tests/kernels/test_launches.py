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
from torch.utils._python_dispatch import TorchDispatchMode

import sj_tac
from sj_tac import host
from sj_tac.functional import fire
from sj_tac.kernels import fire as kernels, fire_op, norm_map
from sj_tac.kernels.gpu import launchers, launches, program as cuda
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.weights import _at_once, decay_weights

pytestmark = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)


device = stub_cuda.device


class Seen(TorchDispatchMode):
    """The operations of torch that run inside."""

    def __init__(self):
        super().__init__()
        self.names, self.sizes = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func.overloadpacket))
        self.sizes.append((out.numel() * out.element_size()) if isinstance(out, torch.Tensor) else 0)
        return out


def test_the_backward_with_a_residual_copies_nothing_from_the_host_and_makes_no_wide_frames(device):
    """Both wait for the device or for memory: indices made of lists, and all T frames in float32."""
    torch.manual_seed(0)
    shape = (3, 6, 4)
    o = Operands(
        torch.randn(3, 2, *shape).bfloat16(), torch.randn(5, 2, *shape).bfloat16(), torch.rand(3), torch.rand(3), None,
        torch.rand(3, 2), None, None, [2, 2, 1], 5, 1.0, 1.0, 1.0, 0.0, 0.4, True, False, 1, 2.0, 0, (1, 1, 1, 1, 0, 0), 1,
    )  # fmt: skip
    go = torch.randn(5, 2, *shape).bfloat16()
    with Seen() as seen:
        launches.backward("cupy", go, None, o, True, False)
    assert not {n for n in seen.names if any(w in n for w in ("lift", "repeat", "index", "local_scalar", "arange", "copy"))}
    frame_of_all_steps = 4 * o.residual.numel()
    assert max(seen.sizes) < frame_of_all_steps


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


@pytest.mark.parametrize(("shape", "blocks"), [((2, 40, 1, 1), 2), ((4, 8, 4, 4), 4), ((2, 3, 2, 2), 1)])
def test_small_maps_fill_the_threads_of_a_block(device, shape, blocks):
    """One plane a block left all but one of 32 threads idle behind a Linear, and half of them on maps of 4 x 4."""
    torch.manual_seed(0)
    launched = []
    machine = pytest.MonkeyPatch()
    original = cuda.Launch
    machine.setattr(cuda, "Launch", lambda *a: (launched.append(a), original(*a))[1])
    options = {"scale": torch.rand(shape[1]).add(0.5), "shift": torch.randn(shape[1])}
    assert_is_the_reference("cupy", drives(4, *shape), node("lif", v_threshold=0.4), 1, options)
    machine.undo()
    (backward,) = [a for a in launched if a[0].kernel == "fire_backward"]
    assert backward[1] == blocks


@pytest.mark.parametrize("last", [False, True])
def test_an_average_pool_of_2x2_is_one_kernel(device, last):
    torch.manual_seed(0)
    options = {"steps": 5, "pool": layer.AvgPool2d(2), "weights": torch.rand(5), "group": 2}
    assert_is_the_reference("cupy", drives(3, 2, 3, 4, 6, last=last), node("plif", v_threshold=0.4), 2, options)
    assert [kernel for _, kernel, _ in device.calls] == ["fire_forward", "fire_backward"]


def test_bits_are_the_same_program_whatever_is_summed_later(device):
    programs = set()
    machine = pytest.MonkeyPatch()
    original = cuda.Launch
    machine.setattr(cuda, "Launch", lambda program, *a: (programs.add(program), original(program, *a))[1])
    with torch.no_grad():
        for group in (1, 2):
            fire(torch.randn(4, 1, 2, 6, 6), node("lif"), pool=layer.MaxPool2d(3, 2, 1), weights=torch.rand(4), group=group,
                 backend="cupy")  # fmt: skip
    machine.undo()
    assert len([p for p in programs if p.kernel == "fire_forward"]) == 1


def test_drives_that_begin_anywhere_in_memory(device):
    """A pair of numbers is read at once, which a device does at even places only."""
    torch.manual_seed(0)
    y = torch.randn(1 + 2 * 3 * 4 * 4)[1:].view(2, 1, 3, 4, 4)
    assert y.data_ptr() % 16
    assert cuda.dense(y, False, y.dtype).data_ptr() % 16 == 0
    assert_is_the_reference("cupy", y, node("lif", v_threshold=0.4), 2, {"pool": layer.MaxPool2d(2)})


def test_drives_of_different_lengths_are_refused_and_not_guessed(device):
    o = Operands(
        torch.randn(3, 1, 2, 4, 4), None, None, None, None, None, None, None, [1, 2, 1], 4, 1.0, 1.0, 1.0, 0.0, 1.0, True,
        False, 0, 1.0, 0, (), 1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"as many steps on each drive, fewer on the last; got \[1, 2, 1\]"):
        launches.forward("cupy", o)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pool", [None, layer.MaxPool2d(2), layer.MaxPool2d(3, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residuals_by_the_kernels_themselves(device, last, pool, dtype):
    torch.manual_seed(0)
    options = {
        "steps": 20,
        "v": torch.randn(2, 4, 4, 4).mul(0.2),
        "pool": pool,
        "residual": drives(20, 2, 4, 4, 4).to(dtype),
    }
    options |= {"scale": torch.rand(4).add(0.5), "shift": torch.randn(4).mul(0.3)}
    y = drives(7, 2, 4, 4, 4, last=last).to(dtype)
    assert_is_the_reference("cupy", y, node("plif", v_threshold=0.4), 3, options)


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


@torch.no_grad()
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("launcher", launchers.NAMES)
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


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("launcher", launchers.NAMES)
def test_the_affine_map_with_gradients_is_one_launch_too(device, launcher, weight):
    made = large_norm(weight)
    slopes, found = (torch.randn(300), torch.randn(300)), []
    for backend in (launcher, "reference"):
        by = norm_map.affine(made, host.Affine(), backend)
        gradients = torch.autograd.grad(by, list(made.parameters()), slopes) if weight else ()
        found.append((*by, *gradients))
    assert device.calls == [(launcher, "norm_affine", None)]
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)
    assert all(x.requires_grad is weight for x in found[0][:2])


@torch.no_grad()
def test_inference_of_plif_builds_no_decays_for_gradients(device):
    spiking, y = node("plif", v_threshold=0.4), torch.randn(3, 1, 2, 4, 4)
    expected = fire(y, spiking, 2, backend="reference")
    assert operands_of(spiking, y).linear is None
    with torch.enable_grad():
        assert operands_of(spiking, y).linear is not None
    assert all(torch.equal(a, b) for a, b in zip(fire(y, spiking, 2, backend="cupy"), expected, strict=True))


def operands_of(spiking, y):
    return kernels.operands(kernels.Call(y, spiking, [2, 2, 2]), None)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(1,) * 8, (2, 2, 2), (1,)])
@pytest.mark.parametrize("normalize", [True, False])
def test_decay_weights_of_a_tensor_at_once(lengths, normalize):
    for number in (0.3, 0.9, 1.0):
        beta = torch.tensor(number, dtype=torch.float64)
        expected = torch.tensor([float(w) for w in decay_weights(number, lengths, normalize)], dtype=torch.float64)
        torch.testing.assert_close(_at_once(beta, lengths, normalize), expected, rtol=1e-14, atol=0)
    # "meta" is no CPU, and stands for a device.
    calls, original = [], torch.Tensor.__pow__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__pow__", lambda *a: (calls.append(a), original(*a))[1])
        found = decay_weights(torch.empty((), device="meta"), lengths, normalize)
        assert len(found) == len(lengths)
        assert len(calls) == 1
        with torch.enable_grad():
            decay_weights(torch.empty((), device="meta", requires_grad=True), lengths, normalize)
        assert len(calls) > 2


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


@pytest.mark.parametrize("pool", [None, layer.MaxPool2d(2), layer.MaxPool2d(3, 2, 1)])
def test_what_is_kept_serves_calls_whose_tensors_lie_otherwise(device, pool):
    """Only the drives' own strides are part of what a launch is kept by."""
    torch.manual_seed(0)

    def strided(*shape):
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]

    def shifted(*shape):
        return torch.randn(1 + torch.Size(shape).numel())[1:].view(shape)

    y, neuron = drives(2, 2, 4, 4, 4), node("plif", v_threshold=0.4)
    for made in (torch.randn, strided, shifted):
        options = {
            "steps": 4, "v": made(2, 4, 4, 4) * 0.2, "residual": made(4, 2, 4, 4, 4) * 0.3, "pool": pool, "group": 2,
            "scale": made(4).abs() + 0.5, "shift": made(4) * 0.3, "weights": made(4).abs(),
        }  # fmt: skip
        assert_is_the_reference("cupy", y, neuron, 2, options)
    assert len(launches._FORWARD) == len(launches._BACKWARD) == 1
