"""The whole way to the CUDA kernels, but for the device: choice, operators, both launchers, kernels, gradients, report.

CPU tensors stand for CUDA ones, and stand-ins for CuPy and cuda-bindings check every launch against the kernel's signature.
"""

import copy
import sys
from itertools import product

import pairs
import pytest
import shim
import stub_cuda
import torch
from fire_cases import assert_is_the_reference
from spikingjelly.activation_based import layer
from support import csnn, frames, node

import sj_tac
from sj_tac.errors import BackendError
from sj_tac.functional import aggregate, fire
from sj_tac.kernels import backends
from sj_tac.kernels.gpu import launchers, nvrtc_launch, program as cuda
from sj_tac.kernels.layout import RUNS

pytestmark = pytest.mark.skipif(bool(shim.MISSING), reason=shim.MISSING)
CUDA = torch.device("cuda", 0)


without_launchers, device = stub_cuda.without_launchers, stub_cuda.device
# What the kernels of each call are, forward and backward.
CALLS = {
    "frames": (None, False, ["fire_forward", "fire_backward"]),
    "2x2": (layer.MaxPool2d(2), True, ["fire_forward", "fire_backward"]),
    "3x3": (
        layer.MaxPool2d(3, 2, 1),
        True,
        ["fire_forward", "fire_pool", "fire_forward", "fire_pool_weights", "fire_backward"],
    ),
}


ROUTES = [("cupy", "frames", torch.float32), ("nvrtc", "2x2", torch.float32), ("nvrtc", "3x3", torch.bfloat16)]
if pairs.EXHAUSTIVE:
    ROUTES = list(product(launchers.NAMES, CALLS, [torch.float32, torch.bfloat16]))


@pytest.mark.parametrize(("launcher", "call", "dtype"), ROUTES)
def test_fire_and_its_gradients_through_the_launcher(device, launcher, call, dtype):
    """A launcher that looked for the device among the arguments found none in the backward, which passes a struct."""
    torch.manual_seed(0)
    pool, sums, kernels = CALLS[call]
    options = {"steps": 5, "v": torch.randn(2, 3, 6, 4).mul(0.2), "pool": pool}
    options |= {"scale": torch.rand(3).add(0.5), "shift": torch.randn(3).mul(0.3)}
    if sums:
        options |= {"weights": torch.rand(5), "group": 2}
    before = RUNS["fire", launcher]
    assert_is_the_reference(launcher, torch.randn(3, 2, 3, 6, 4).to(dtype), node("plif", v_threshold=0.4), 2, options)
    assert RUNS["fire", launcher] == before + 2
    assert device.calls == [(launcher, kernel, None) for kernel in kernels]


@pytest.mark.parametrize("launcher", launchers.NAMES)
def test_aggregate_and_both_its_gradients_through_the_launcher(device, launcher):
    torch.manual_seed(0)
    x, weights, found = torch.randn(7, 2, 3, 4), torch.rand(3), []
    for backend, dtype in (("reference", torch.float64), (launcher, torch.float32)):
        of = x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
        out = aggregate(*of, 3, backend=backend)
        first = torch.autograd.grad(out.square().sum(), of, create_graph=True)
        found.append([out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), of)])
    for expected, got in zip(*found, strict=True):
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    kernels = [kernel for by, kernel, _ in device.calls if by == launcher]
    assert len(kernels) == len(device.calls)
    assert {"aggregate_forward", "aggregate_backward"} == set(kernels)


NETS = list(product(launchers.NAMES, ["preserve", "collapse"]))


@pytest.mark.captured
@pytest.mark.parametrize(("launcher", "policy"), NETS if pairs.EXHAUSTIVE else NETS[1:3])
def test_a_converted_net_and_its_gradients(device, launcher, policy):
    torch.manual_seed(0)
    net, x, found = csnn(), frames(4, 2, 2, 8, 8), []
    for backend in ("reference", launcher):
        fast = sj_tac.convert(copy.deepcopy(net), policy, 2, backend=backend)
        y = fast(x)
        y.square().sum().backward()
        found.append((y.detach(), {name: p.grad for name, p in fast.named_parameters()}))
    assert found[0][0].std() > 0
    assert torch.equal(found[1][0], found[0][0])
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-4, atol=1e-5)
    assert {v.kernel for v in sj_tac.report(fast).converted} == {f"{launcher}, fused"}
    kernels = {kernel for by, kernel, _ in device.calls if by == launcher}
    assert {"fire_forward", "fire_backward"} <= kernels


@pytest.mark.captured
@pytest.mark.parametrize(("offered", "taken"), [(("cupy", "nvrtc"), "cupy"), (("nvrtc",), "nvrtc"), ((), "reference")])
@pytest.mark.filterwarnings("ignore::sj_tac.errors.BackendFallbackWarning")
def test_auto_takes_the_first_launcher_that_works_and_the_report_says_which(without_launchers, offered, taken):
    device = stub_cuda.offer(without_launchers, *offered)
    stub_cuda.stand_in(without_launchers)
    fast = sj_tac.convert(csnn(), "preserve", 2)
    with torch.no_grad():
        fast(frames(4, 2, 2, 8, 8))
    assert {v.kernel.split(",")[0] for v in sj_tac.report(fast).converted} == {taken}
    assert {by for by, *_ in device.calls} == {taken} - {"reference"}


@pytest.mark.parametrize("launcher", launchers.NAMES)
def test_a_named_launcher_is_a_contract(without_launchers, launcher):
    (other,) = set(launchers.NAMES) - {launcher}
    stub_cuda.offer(without_launchers, other)
    stub_cuda.stand_in(without_launchers)
    y, needs = torch.randn(2, 1, 2, 4, 4), {"cupy": "need CuPy, whose import says", "nvrtc": "need cuda-bindings, whose"}
    for call in (lambda: fire(y, node("lif"), backend=launcher), lambda: sj_tac.convert(csnn(), backend=launcher)):
        with pytest.raises(
            BackendError, match=rf"backend='{launcher}'.*: the {launcher} kernels {needs[launcher]}.*pip install"
        ):
            call()
    with pytest.raises(BackendError, match=rf"backend='{launcher}': the {launcher} kernels {needs[launcher]}"):
        aggregate(torch.randn(2, 1), [0.5, 0.5], 2, backend=launcher)


def test_an_operator_of_nobody_takes_what_works_and_refuses_what_is_not_there(without_launchers):
    stub_cuda.offer(without_launchers, "nvrtc")
    stub_cuda.stand_in(without_launchers)
    x, weights = torch.randn(4, 3), torch.rand(4)
    before = RUNS["aggregate", "nvrtc"]
    torch.ops.sj_tac.aggregate(x, weights, 2)
    assert RUNS["aggregate", "nvrtc"] == before + 1
    with pytest.raises(BackendError, match=r"no launcher 'opencl' .*, only \['cupy', 'nvrtc'\]"):
        torch.ops.sj_tac.aggregate(x, weights, 2, "opencl")
    for name in ("cuda", "cuda.bindings", "cuda.bindings.nvrtc", "cuda.bindings.driver"):
        without_launchers.setitem(sys.modules, name, None)
    stub_cuda.forget()
    with pytest.raises(BackendError, match=r"need CuPy.*; the nvrtc kernels need cuda-bindings.*; backend=\"reference\""):
        torch.ops.sj_tac.aggregate(x, weights, 2)


@pytest.mark.parametrize("launcher", launchers.NAMES)
def test_a_launch_runs_on_its_own_device(without_launchers, launcher):
    """Device 1 and its stream, whatever is current, and though no argument is a tensor."""
    asked = []
    found = stub_cuda.offer(without_launchers, launcher)
    without_launchers.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: (asked.append(index), stub_cuda.STREAM)[1]
    )
    x, weights, out = torch.ones(2, 32), torch.ones(2), torch.zeros(1, 32)
    arguments = [cuda.np.uint64(t.data_ptr()) for t in (x, weights, out)] + [cuda.np.int32(2), cuda.np.int64(32)]
    _, launch = launchers.named(launcher)
    launch(cuda.Launch(cuda.PROBE, 1, tuple(arguments), 0, torch.device("cuda", 1)))
    assert found.calls == [(launcher, "aggregate_forward", 1)]
    assert asked == [1]
    assert out.eq(2).all()
    launch(cuda.Launch(cuda.PROBE, 0, tuple(arguments), 0, torch.device("cuda", 1)))
    assert len(found.calls) == 1  # an empty batch launches nothing


def test_what_nvrtc_compiled_is_kept_and_a_folder_that_cannot_be_written_to_is_no_error(without_launchers, tmp_path):
    stub_cuda.offer(without_launchers, "nvrtc")
    assert nvrtc_launch.problem() == ""
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.read_bytes().decode() == cuda.PROBE.source()
    without_launchers.setattr(nvrtc_launch, "compiled", lambda *_: pytest.fail("compiled again"))
    stub_cuda.forget()
    assert nvrtc_launch.problem() == ""
    without_launchers.undo()
    without_launchers.setenv("SJ_TAC_CACHE", str(kept))  # a file
    without_launchers.setattr(nvrtc_launch, "compiled", lambda *_: b"code")
    assert nvrtc_launch._code(cuda.PROBE, "sm_90") == b"code"


def test_nvrtc_itself_compiles_and_says_why_not():
    pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings to compile with")
    assert nvrtc_launch.compiled(cuda.PROBE.source(), "sm_90")[:4] == b"\x7fELF"
    with pytest.raises(BackendError, match=r"(?s)NVRTC_ERROR_COMPILATION for sm_90: sj_tac.cu\(1\): error: .*expected"):
        nvrtc_launch.compiled("int x = ;", "sm_90")


def test_a_driver_that_refuses_is_reported_with_the_kernel_and_the_device(without_launchers):
    stub_cuda.offer(without_launchers, "nvrtc")
    sys.modules["cuda.bindings.driver"].cuLaunchKernel = lambda *_: (stub_cuda.FAILED,)
    says = r"kernel aggregate_forward failed on cuda:1 with cuda-bindings .*CUDA_ERROR_INVALID_VALUE; backend=\"reference\""
    with pytest.raises(BackendError, match=says):
        nvrtc_launch.launch(cuda.Launch(cuda.PROBE, 1, (None,) * 3, 0, torch.device("cuda", 1)))
    sys.modules["cuda.bindings.driver"].cuModuleLoadData = lambda *_: (stub_cuda.FAILED, None)
    stub_cuda.forget()
    assert (
        "could not compile a kernel: BackendError: CUDA_ERROR_INVALID_VALUE"
        in backends.fastest("nvrtc", CUDA, torch.half)[1]
    )


@pytest.mark.parametrize("launcher", launchers.NAMES)
def test_what_was_prepared_runs_in_the_context_of_its_device_and_leaves_that_of_the_thread(without_launchers, launcher):
    device = stub_cuda.offer(without_launchers, launcher)
    x, weights, out = torch.ones(2, 32), torch.ones(2), torch.zeros(1, 32)
    numbers = cuda.np.int32(2), cuda.np.int64(32)
    ready = launchers.prepared(launcher, cuda.Launch(cuda.PROBE, 1, numbers, 0, torch.device("cuda", 1)))
    for context in (0, stub_cuda.context_of(0), stub_cuda.context_of(1)):  # a new thread's, another device's, its own
        device.of_thread = context
        ready(*(t.data_ptr() for t in (x, weights, out)))
        assert device.of_thread == context
        assert device.calls.pop() == (launcher, "aggregate_forward", 1)
        assert out.eq(2).all()
        out.zero_()
