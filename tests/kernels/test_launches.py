"""What is launched for a call on CUDA, from wherever tensors lie, and what is refused: drives of other lengths.

CPU tensors stand for CUDA ones (stub_cuda.py).
"""

from itertools import product

import pairs
import pytest
import shim
import stub_cuda
import torch
from spikingjelly.activation_based import layer
from support import node

from sj_tac.kernels import fire as kernels
from sj_tac.kernels.gpu import launches
from sj_tac.kernels.layout import RUNS
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.weights import _at_once, decay_weights

pytestmark = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)


without_launchers, device = stub_cuda.without_launchers, stub_cuda.device


def test_drives_of_different_lengths_are_refused_and_not_guessed(device):
    o = Operands(
        torch.randn(3, 1, 2, 4, 4), None, None, None, None, None, None, None, [1, 2, 1], 4, 1.0, 1.0, 1.0, 0.0, 1.0, True,
        False, 0, 1.0, 0, (), 1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"as many steps on each drive, fewer on the last; got \[1, 2, 1\]"):
        launches.forward("cupy", o)


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
    found = launches._lying(x, x.stride(), False)
    assert found.data_ptr() % launches.ALIGNED == 0
    assert torch.equal(found, x)
    assert (found is x) == (how == "dense")


POOLS = {"none": None, "2x2": layer.MaxPool2d(2), "3x3": layer.MaxPool2d(3, 2, 1)}
LIES = [("last", "2x2", torch.float32), ("gaps", "none", torch.bfloat16)]
if pairs.EXHAUSTIVE:
    LIES = list(product(["dense", "last", "odd", "gaps"], POOLS, [torch.float32, torch.bfloat16]))


@torch.no_grad()
@pytest.mark.parametrize(("made", "pool", "dtype"), LIES)
def test_a_launch_takes_tensors_wherever_they_lie(device, made, pool, dtype):
    torch.manual_seed(0)
    shape, spiking = (2, 4, 6, 8), node("plif", v_threshold=0.4)
    y, residual = torch.randn(3, *shape).to(dtype), torch.randn(5, *shape).to(dtype)
    v, scale, shift, weights = torch.randn(shape) * 0.2, torch.rand(4) + 0.5, torch.randn(4) * 0.3, torch.rand(5)
    call = kernels.Call(lying(y, made), spiking, [2, 2, 1], v, residual, scale, shift, POOLS[pool], weights, 2)
    expected = kernels.run_reference(call, None)
    launch, numbers = launches.Launch(kernels.operands(call, None), "nvrtc"), (None, spiking.w.sigmoid())
    # In drives of another format the launch would be another one; all else may lie anywhere.
    for how in ("dense", "last", "odd", "gaps"):
        affine = lying(scale, "odd"), shift
        found = launch(lying(y, made), lying(v, how), lying(residual, how), affine, weights, numbers)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            assert torch.equal(ours, theirs)
    before = RUNS["fire", "nvrtc"]
    for wrong in ((None, scale, shift, weights), (residual, None, None, weights), (residual, scale, shift, weights[:3])):
        with pytest.raises(AssertionError):
            launch(y, v, wrong[0], wrong[1:3], wrong[3], numbers)
    assert RUNS["fire", "nvrtc"] == before


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(1,) * 8, (2, 2, 2), (1,)])
@pytest.mark.parametrize("normalize", [True, False])
def test_decay_weights_of_a_tensor_at_once(lengths, normalize):
    for number in (0.3, 0.9, 1.0):
        beta = torch.tensor(number, dtype=torch.float64)
        expected = torch.tensor([float(w) for w in decay_weights(number, lengths, normalize)], dtype=torch.float64)
        torch.testing.assert_close(_at_once(beta, lengths, normalize), expected, rtol=1e-14, atol=0)
