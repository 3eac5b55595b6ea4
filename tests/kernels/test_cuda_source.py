"""The CUDA programs on the CPU: the very source that a GPU compiles, by g++ behind shim.h, against the reference kernel.

They are launched as on a GPU, by torch's operators and the launcher for CuPy; only CuPy itself is a stand-in (stub_cuda.py).
"""

from itertools import product

import pairs
import pytest
import shim
import stub_cuda
import torch
from fire_cases import POOLS, assert_gradient_to_the_time_constant, assert_is_the_reference, build, space
from hypothesis import HealthCheck, given, settings
from spikingjelly.activation_based import layer
from support import node

from sj_tac.kernels.gpu import aggregate as cuda_aggregate, program as cuda_program
from sj_tac.kernels.gpu.cupy_launch import launch

pytestmark = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tmp_path):
    """functional.fire with backend="cupy" runs the CUDA programs on CPU tensors."""
    stub_cuda.machine(monkeypatch, tmp_path)
    stub_cuda.offer(monkeypatch, "cupy")
    stub_cuda.stand_in(monkeypatch)
    yield
    stub_cuda.forget()


# Every example compiles its programs anew, about a second each.
@settings(
    max_examples=settings().max_examples // 4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(space)
def test_cuda_is_the_reference(case):
    half = torch.float16 if case["dtype"] == torch.float64 else case["dtype"]
    launched = len(shim.LAUNCHED)
    assert_is_the_reference("cupy", *build(case | {"dtype": half}))
    assert {"fire_forward", "fire_backward"} <= set(shim.LAUNCHED[launched:])


DTYPES = [(torch.float32, (2, 8, 16, 16)), (torch.bfloat16, (1, 16, 24, 16))]
VECTORS = [
    (torch.contiguous_format, layer.MaxPool2d(3, 2, 1), *DTYPES[0], True),
    (torch.channels_last, layer.MaxPool2d(2), *DTYPES[1], False),
    (torch.channels_last, None, *DTYPES[0], True),
]
if pairs.EXHAUSTIVE:
    EVERY = product((torch.contiguous_format, torch.channels_last), POOLS[:3], DTYPES, (False, True))
    VECTORS = [(layout, pool, *dtype, residual) for layout, pool, dtype, residual in EVERY]


@pytest.mark.parametrize(("layout", "pool", "dtype", "shape", "residual"), VECTORS)
def test_vectors_blocks_and_long_calls(layout, pool, dtype, shape, residual, monkeypatch):
    """Several numbers a thread, several blocks a plane, more than 32 steps, and sums too many for shared memory."""
    widest = cuda_program.widest
    monkeypatch.setattr(
        cuda_program, "widest", lambda limit, run, total, *f, **o: widest(limit, run, total * 2**16, *f, **o)
    )
    monkeypatch.setattr(cuda_program, "SHARED", 4 * 1024)
    torch.manual_seed(0)
    y = torch.randn(12 * shape[0], *shape[1:]).to(dtype).contiguous(memory_format=layout).unflatten(0, (12, shape[0]))
    options = {"steps": 70, "v": torch.randn(shape).mul(0.2), "pool": pool, "weights": torch.rand(70), "group": 4}
    options |= {"scale": torch.rand(shape[1]).add(0.5), "shift": torch.randn(shape[1]).mul(0.3)}
    if residual:
        options["residual"] = torch.randn(70, *shape).to(dtype)
    got = assert_is_the_reference("cupy", y, node("plif", v_threshold=0.4), 6, options)
    assert got[0].flatten(0, 1).is_contiguous(memory_format=layout)


@pytest.mark.parametrize(
    ("v_reset", "decay_input"), list(product([None, -0.5], [True, False])) if pairs.EXHAUSTIVE else [(-0.5, True)]
)
def test_gradient_to_the_time_constant(decay_input, v_reset):
    assert_gradient_to_the_time_constant("cupy", v_reset, decay_input)


def test_at_rest_and_without_anything():
    torch.manual_seed(0)
    assert_is_the_reference("cupy", torch.randn(3, 1, 2, 5, 4), node("lif", -0.1, v_threshold=0.4), 1, {})
    for pool in POOLS[:3] if pairs.EXHAUSTIVE else POOLS[2:3]:
        scale = {"scale": torch.ones(2), "shift": torch.ones(2), "weights": torch.rand(3), "group": 2}
        assert_is_the_reference("cupy", torch.randn(3, 0, 2, 6, 4), node("plif"), 1, {"pool": pool, **scale})


SUMS = [(7, (2, 3, 4, 4), 3), (4, (5,), 4), (40, (1, 2, 33, 2), 1), (5, (3, 64), 2)]
HALVES = [torch.float16, torch.bfloat16]
AGGREGATED = list(product([torch.float32, *HALVES], SUMS)) if pairs.EXHAUSTIVE else [(torch.float32, SUMS[0])]
AGGREGATED += [] if pairs.EXHAUSTIVE else list(zip(HALVES, SUMS[2:], strict=True))


@pytest.mark.parametrize(("dtype", "sums"), AGGREGATED)
def test_aggregate(dtype, sums):
    steps, shape, group = sums
    torch.manual_seed(0)
    x, weights = torch.randn(steps, *shape).to(dtype).requires_grad_(), torch.rand(steps, requires_grad=True)
    parts = zip(x.float().split(group), weights.split(group), strict=True)
    expected = torch.stack([sum(w * f for w, f in zip(ws, fs, strict=True)) for fs, ws in parts])
    got = cuda_aggregate.forward(launch, x.detach(), weights, group)
    assert torch.equal(got, expected.to(dtype))
    go = torch.randn_like(got)
    expected.backward(go.float())
    gx, g_weights = cuda_aggregate.backward(launch, go, x.detach(), weights, group, True, True)
    torch.testing.assert_close(gx, x.grad)
    torch.testing.assert_close(g_weights, weights.grad, rtol=1e-4, atol=1e-4)
    assert cuda_aggregate.backward(launch, go, x.detach(), weights, group, False, True)[0] is None
    assert cuda_aggregate.backward(launch, go, x.detach(), weights, group, True, False)[1] is None


@pytest.mark.parametrize("dtype", HALVES)
def test_half_rounds_as_torch(dtype):
    """Sums of one frame are the number itself, rounded: ties, subnormals, infinities and NaN."""
    special = torch.tensor(
        [0.0, -0.0, 1e-8, 6e-8, 65504.0, 65520.0, 1e38, float("inf"), -float("inf"), 1.00390625, 1.01171875]
    )
    values = torch.cat([special, torch.randn(500) * torch.logspace(-8, 6, 500), torch.randn(11)])
    x = torch.stack([torch.ones_like(values)] * 2).to(dtype)
    for value, got in zip(values.tolist(), [cuda_aggregate.forward(launch, x[:, i : i + 1], torch.tensor([v, 0.0]), 2)
                                            for i, v in enumerate(values.tolist())], strict=True):  # fmt: skip
        assert torch.equal(got.flatten(), torch.tensor([value]).to(dtype)), value
    nan = cuda_aggregate.forward(launch, x[:, :1], torch.tensor([float("nan"), 0.0]), 2)
    assert nan.isnan().all()
