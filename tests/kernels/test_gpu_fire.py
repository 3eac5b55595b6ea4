"""The CUDA kernels on a device against the reference kernel on the same device; without one, through its stand-in."""

from itertools import product

import pairs
import pytest
import torch
from fire_cases import POOLS, assert_is_the_reference
from spikingjelly.activation_based import layer
from stub_cuda import DEVICE, REAL, needs_device, on_the_stub
from support import NEURONS, node

from sj_tac import host
from sj_tac.functional import aggregate, fire
from sj_tac.kernels.layout import RUNS

pytestmark = pytest.mark.gpu
device = pytest.fixture(autouse=True)(on_the_stub)
LAYOUTS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drives(groups, shape, dtype, layout):
    y = (torch.randn(groups * shape[0], *shape[1:], device=DEVICE) * 1.5).to(dtype)
    return y.contiguous(memory_format=layout).unflatten(0, (groups, shape[0]))


# Order of operations is the same; torch's own kernels may contract, so flips are counted instead of assumed away.
def assert_agrees(y, spiking, k, options):
    tolerance = 1e-4 if y.dtype == torch.float32 else 2e-2
    like, pool = None, options.get("pool")
    if REAL and isinstance(pool, torch.nn.AvgPool2d) and pool.padding:
        # torch's own backward on CUDA is wrong in channels_last (2.11): https://github.com/pytorch/pytorch/issues/188344
        like = y.contiguous()
    assert_is_the_reference("cupy", y, spiking, k, options, flips=1e-4, tolerance=tolerance, like=like)


SHAPES = [(2, 16, 32, 32), (3, 5, 7, 9), (1, 33, 6, 10)]
CALLS = [(1, 5, None), (2, 9, 4), (4, 16, 2)]  # k, steps, group


def cases():
    """Every pair of two options; off a device, where each case is compiled by g++, not every three of them."""
    for (i, layout), (j, dtype), pool in product(enumerate(LAYOUTS), enumerate(DTYPES), range(len(POOLS))):
        for turn in range(len(SHAPES)) if REAL else (0,):
            yield layout, dtype, pool, SHAPES[(pool + j + turn) % 3], CALLS[(pool + 2 * j + i) % 3]


def few(rows, step):
    """All of them on a device, or where every test runs; else every so many."""
    return list(rows) if REAL or pairs.EXHAUSTIVE else list(rows)[::step]


@pytest.mark.parametrize(("layout", "dtype", "pool", "shape", "call"), few(cases(), 14))
def test_shapes_layouts_dtypes_and_pools(layout, dtype, pool, shape, call):
    torch.manual_seed(0)
    k, steps, group = call
    y = drives(-(-steps // k), shape, dtype, layout)
    options = {"steps": steps, "v": torch.randn(shape, device=DEVICE) * 0.2, "pool": POOLS[pool]}
    options |= {"scale": torch.rand(shape[1], device=DEVICE) + 0.5, "shift": torch.randn(shape[1], device=DEVICE) * 0.3}
    if group:
        options |= {"weights": torch.rand(steps, device=DEVICE), "group": group}
    before = RUNS["fire", "cupy"]
    assert_agrees(y, node("plif", v_threshold=0.4).to(DEVICE), k, options)
    assert RUNS["fire", "cupy"] == before + 2


def neurons():
    """Each neuron with merged steps and with its own; off a device, where each is compiled by g++, in turns."""
    for number, neuron in enumerate(NEURONS):
        for merge in (False, True):
            if REAL or merge == number % 2:
                yield *neuron, merge


@pytest.mark.parametrize(("kind", "v_reset", "decay_input", "merge"), few(neurons(), 20))
def test_neurons_and_surrogates(kind, v_reset, decay_input, merge):
    torch.manual_seed(0)
    for number, (surrogate, detach) in enumerate(product(host.FUSED_SURROGATES, (False, True))):
        if not REAL and (number + number // 2 + NEURONS.index((kind, v_reset, decay_input)) // 2) % 2:  # in one of its forms
            continue
        options = {"surrogate_function": surrogate(), "detach_reset": detach, "v_threshold": 0.4}
        spiking = node(kind, v_reset, decay_input, 1.7, **options).to(DEVICE)
        y = drives(4, (2, 8, 6, 6), torch.float32, torch.contiguous_format)
        assert_agrees(y, spiking, 3, {"steps": 11, "merge": merge, "pool": layer.MaxPool2d(2)})


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
