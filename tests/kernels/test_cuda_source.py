"""The CUDA programs on the CPU: the very source that a GPU compiles, by g++ behind shim.h, against the reference kernel.

They are launched as on a GPU, by torch's operators and the launcher for CuPy; only CuPy itself is a stand-in (stub_cuda.py).
"""

import pytest
import shim
import stub_cuda
import torch
from fire_cases import POOLS, assert_gradient_to_the_time_constant, assert_is_the_reference, build, space
from hypothesis import HealthCheck, given, settings
from spikingjelly.activation_based import layer
from support import node

from sj_tac.kernels.gpu import aggregate as cuda_aggregate
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
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(space)
def test_cuda_is_the_reference(case):
    half = torch.float16 if case["dtype"] == torch.float64 else case["dtype"]
    launched = len(shim.LAUNCHED)
    assert_is_the_reference("cupy", *build(case | {"dtype": half}))
    assert {"fire_forward", "fire_backward"} <= set(shim.LAUNCHED[launched:])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pool", [None, layer.MaxPool2d(2), layer.MaxPool2d(3, 2, 1)])
@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (2, 8, 16, 16)), (torch.bfloat16, (1, 16, 24, 16))])
@pytest.mark.parametrize("residual", [False, True])
def test_vectors_blocks_and_long_calls(layout, pool, dtype, shape, residual, monkeypatch):
    """Several numbers a thread, several blocks a plane, more than 32 steps, and sums too many for shared memory."""

    from sj_tac.kernels.gpu import program as cuda_program

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


@pytest.mark.parametrize("decay_input", [True, False])
@pytest.mark.parametrize("v_reset", [None, -0.5])
def test_gradient_to_the_time_constant(decay_input, v_reset):
    assert_gradient_to_the_time_constant("cupy", v_reset, decay_input)


def test_at_rest_and_without_anything():
    torch.manual_seed(0)
    assert_is_the_reference("cupy", torch.randn(3, 1, 2, 5, 4), node("lif", -0.1, v_threshold=0.4), 1, {})
    for pool in POOLS[:3]:
        scale = {"scale": torch.ones(2), "shift": torch.ones(2), "weights": torch.rand(3), "group": 2}
        assert_is_the_reference("cupy", torch.randn(3, 0, 2, 6, 4), node("plif"), 1, {"pool": pool, **scale})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("steps", "shape", "group"), [(7, (2, 3, 4, 4), 3), (4, (5,), 4), (40, (1, 2, 33, 2), 1), (5, (3, 64), 2)]
)
def test_aggregate(dtype, steps, shape, group):
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
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
