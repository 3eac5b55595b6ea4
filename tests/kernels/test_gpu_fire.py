"""The CUDA kernels on a device against the reference kernel on the same device; without one, through its stand-in."""

import pairs
import pytest
import torch
from fire_cases import assert_is_the_reference, build, space
from hypothesis import HealthCheck, given, settings, strategies as st
from spikingjelly.activation_based import layer
from stub_cuda import DEVICE, REAL, needs_device, on_the_stub
from support import NEURONS, node

from sj_tac.functional import aggregate, fire
from sj_tac.kernels.layout import RUNS

pytestmark = pytest.mark.gpu
device = pytest.fixture(autouse=True)(on_the_stub)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def few(rows, step):
    """All of them on a device, or where every test runs; else every so many."""
    return list(rows) if REAL or pairs.EXHAUSTIVE else list(rows)[::step]


# Off a device every example is compiled by g++, as in test_cuda_source.py.
@settings(max_examples=500 if REAL else 2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(space, st.sampled_from([None, (2, 16, 32, 32), (1, 33, 6, 10)] if REAL else [None]))
def test_fire_and_its_gradients_are_the_references(case, shape):
    """Order of operations is the same; torch's own kernels may contract, so flips are counted instead of assumed away."""
    half = torch.float16 if case["dtype"] == torch.float64 else case["dtype"]
    y, spiking, k, options = build(case | {"dtype": half, "shape": shape or case["shape"]})
    y, options = y.to(DEVICE), {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    tolerance, like, pool = 1e-4 if y.dtype == torch.float32 else 2e-2, None, options["pool"]
    if REAL and isinstance(pool, torch.nn.AvgPool2d) and pool.padding:
        # torch's own backward on CUDA is wrong in channels_last (2.11): https://github.com/pytorch/pytorch/issues/188344
        like = y.contiguous()
    before = RUNS["fire", "cupy"]
    assert_is_the_reference("cupy", y, spiking.to(DEVICE), k, options, flips=1e-4, tolerance=tolerance, like=like)
    assert RUNS["fire", "cupy"] == before + 2


@pytest.mark.parametrize(("kind", "v_reset", "decay_input"), few(NEURONS, 6))
def test_one_step_a_drive_is_spikingjelly(kind, v_reset, decay_input):
    """To the last spike: its Triton kernels round after every operation (enable_fp_fusion=False), as ours do."""
    torch.manual_seed(0)
    for tau in (2.0, 1.7):
        spiking = node(kind, v_reset, decay_input, tau, v_threshold=0.3).to(DEVICE)
        x = torch.randn(12, 4, 16, *[64 if REAL else 8] * 2, device=DEVICE)
        with torch.no_grad():
            expected = spiking(x)
            out, _ = fire(x, spiking, backend="cupy")
        assert 0 < expected.mean() < 1
        assert (out != expected).sum() == 0


@needs_device("its memory")
@torch.no_grad()
def test_more_than_two_to_the_31_numbers():
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free device memory")
    shape = (1, 64, 4096, 2100)
    y = torch.zeros(4, *shape, dtype=torch.bfloat16, device=DEVICE)
    assert y.numel() > 2**31
    y[-1, -1, -1, -2:, -2:] = 3.0
    y[2, 0, 5, 0, 1] = 3.0
    out, v = fire(y, node("lif", tau=2.0), pool=layer.MaxPool2d(2), backend="cupy")
    assert out.sum() == 2
    assert out[-1, 0, -1, -1, -1] == 1
    assert out[2, 0, 5, 0, 0] == 1
    assert v[0, 5, 0, 1] == 0


@pytest.mark.parametrize("dtype", few(DTYPES, 2))
def test_aggregate(dtype):
    torch.manual_seed(0)
    for shape in ((2, 3, 5, 7), (4, 16, 32, 32)):
        x = torch.randn(7, *shape, device=DEVICE).to(dtype).requires_grad_()
        weights = torch.rand(3, device=DEVICE, requires_grad=True)
        found = []
        for backend in ("reference", "cupy"):
            x.grad = weights.grad = None
            out = aggregate(x, weights, 3, backend=backend)
            out.float().square().sum().backward()
            found.append((out.detach(), x.grad, weights.grad))
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for a, b in zip(*found, strict=True):
            assert (a - b).abs().max() / a.abs().max() < tolerance
