"""What is launched for a call on CUDA, and what is refused: drives of other lengths; the map of a norm is one launch.

CPU tensors stand for CUDA ones (stub_cuda.py).
"""

import pytest
import shim
import stub_cuda
import torch
from torch import nn

from sj_tac import host
from sj_tac.kernels import norm_map
from sj_tac.kernels.gpu import launches
from sj_tac.kernels.operands import Operands
from sj_tac.kernels.weights import _at_once, decay_weights

pytestmark = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)


device = stub_cuda.device


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
