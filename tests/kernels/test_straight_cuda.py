"""The short way to the CUDA kernels: taken where all is as before, with nothing of before, and without waits for the device.

CPU tensors stand for CUDA ones (stub_cuda.py); every launch is compared with the kernel's signature and then run.
"""

from itertools import product

import pairs
import pytest
import shim
import stub_cuda
import torch
from spikingjelly.activation_based import functional
from straight_cases import NEURONS, POOLS, awake, compare, launches
from support import node

import sj_tac
from sj_tac.kernels import fire as kernels, fire_op
from sj_tac.kernels.gpu import launchers, launches as prepared
from sj_tac.kernels.layout import RUNS

pytestmark = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)


device = stub_cuda.device


def clip(*shape):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4).float()


WAYS = [("cupy", "3x3", "LIF"), ("nvrtc", "2x2", "PLIF"), ("nvrtc", "average", "IF soft"), ("cupy", "none", "LIF no decay")]


@pytest.mark.parametrize(
    ("launcher", "pool", "kind"), list(product(launchers.NAMES, POOLS, NEURONS)) if pairs.EXHAUSTIVE else WAYS
)
def test_it_gives_what_the_definition_gives_and_asks_no_operator(device, launcher, pool, kind, monkeypatch):
    torch.manual_seed(0)
    net = sj_tac.convert(awake(NEURONS[kind], POOLS[pool], 2), "preserve", 2, backend=launcher)
    monkeypatch.setattr(fire_op, "fire", lambda *a: pytest.fail("the long way"))
    before = RUNS["fire", launcher]
    for shape in ((5, 2, 2, 8, 8), (4, 1, 2, 8, 12)):
        assert 0.02 < compare(net, clip(*shape)) < 0.9
    assert launches(net) == 4  # two shapes, two layers
    assert RUNS["fire", launcher] == before + 8
    found = {kernel for by, kernel, _ in device.calls if by == launcher}
    assert {"norm_affine", "fire_forward"} | ({"fire_pool"} if pool == "3x3" else set()) <= found
    assert {by for by, *_ in device.calls} == {launcher}


# Whatever would wait for a device, where its numbers are; a copy of numbers to it waits, too.
WAITING = ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu", "nonzero")


@pytest.mark.parametrize("weights", ["decay", "learned"])
def test_nothing_waits_for_the_device_and_what_is_written_there_is_seen(device, weights, monkeypatch):
    """A PLIF's w, and the weights that hang on it, are read by the kernels, in every call."""
    torch.manual_seed(0)
    policy = {"default": {"mode": "preserve", "k": 2, "weights": weights}}
    net = sj_tac.convert(awake(NEURONS["PLIF"], POOLS["2x2"]), policy, backend="nvrtc")
    x = clip(5, 2, 2, 16, 16)  # the last group is one frame, whose weight is a number
    with torch.no_grad():
        first, kept = net(x).clone(), launches(net)
        functional.reset_net(net)
        with monkeypatch.context() as patch:
            for name in WAITING:
                patch.setattr(torch.Tensor, name, lambda self, *a, name=name: pytest.fail(f"{name} waits"))
            for name in ("tensor", "as_tensor"):
                patch.setattr(torch, name, lambda *a, name=name, **k: pytest.fail(f"torch.{name} waits"))
            again = net(x)
        assert torch.equal(again, first)
        for name, p in net.named_parameters():
            if name.endswith((".w", "tac_logits")):
                p.data[...] = torch.linspace(1.5, 0.2, p.numel()).reshape(p.shape)
        functional.reset_net(net)
        assert not torch.equal(net(x), first)
    assert launches(net) == kept > 0, "other numbers are no other launch"
    assert compare(net, x) > 0.02


def lying(x, how):
    """The same numbers elsewhere in memory."""
    if how == "last":
        return x.movedim(-3, -1).contiguous().movedim(-1, -3)
    if how == "odd":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if how == "gaps":
        return torch.stack([x, x], -1)[..., 0]
    return x


@pytest.mark.parametrize("how", ["dense", "odd"])
def test_frames_are_copied_where_no_vector_may_begin_and_nowhere_else(how):
    """A GPU that reads a vector from elsewhere stops with a misaligned address; a copy costs a launch."""
    x = lying(torch.randn(3, 2, 4, 6, 8), how)
    found = prepared._lying(x, x.stride(), False)
    assert found.data_ptr() % prepared.ALIGNED == 0
    assert torch.equal(found, x)
    assert (found is x) == (how == "dense")


LIES = [("last", "2x2", torch.float32), ("gaps", "none", torch.bfloat16)]
if pairs.EXHAUSTIVE:
    LIES = list(product(["dense", "last", "odd", "gaps"], ["none", "2x2", "3x3"], [torch.float32, torch.bfloat16]))


@torch.no_grad()
@pytest.mark.parametrize(("made", "pool", "dtype"), LIES)
def test_a_launch_takes_tensors_wherever_they_lie(device, made, pool, dtype):
    torch.manual_seed(0)
    shape, spiking = (2, 4, 6, 8), node("plif", v_threshold=0.4)
    module = POOLS[pool]() if POOLS[pool] is not None else None
    y, residual = torch.randn(3, *shape).to(dtype), torch.randn(5, *shape).to(dtype)
    v, scale, shift, weights = torch.randn(shape) * 0.2, torch.rand(4) + 0.5, torch.randn(4) * 0.3, torch.rand(5)
    call = kernels.Call(lying(y, made), spiking, [2, 2, 1], v, residual, scale, shift, module, weights, 2)
    expected = kernels.run_reference(call, None)
    launch = prepared.Launch(kernels.operands(call, None), "nvrtc")
    # In drives of another format the launch would be another one; all else may lie anywhere.
    for how in ("dense", "last", "odd", "gaps"):
        found = launch(lying(y, made), lying(v, how), lying(residual, how), (lying(scale, "odd"), shift), weights, spiking.w)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            assert torch.equal(ours, theirs)
    before = RUNS["fire", "nvrtc"]
    for wrong in ((None, scale, shift, weights), (residual, None, None, weights), (residual, scale, shift, weights[:3])):
        with pytest.raises(AssertionError):
            launch(y, v, wrong[0], wrong[1:3], wrong[3], spiking.w)
    assert RUNS["fire", "nvrtc"] == before
