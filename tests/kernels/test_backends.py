"""Which kernel runs where: what ``auto`` takes and says, and what a named backend raises where it cannot run."""

import sys
import types
import warnings

import pytest
import stub_cuda
import torch
from spikingjelly.activation_based import surrogate
from support import conv, csnn, node, norm

import sj_tac
from sj_tac import TACTP
from sj_tac.errors import BackendError, BackendFallbackWarning
from sj_tac.functional import aggregate, fire
from sj_tac.kernels import backends
from sj_tac.kernels.gpu import cupy_launch, program as cuda

CUDA = torch.device("cuda", 0)


without_launchers = stub_cuda.without_launchers


def cupy(version="14.2.0", error=None):
    """A CuPy that compiles anything, or fails with ``error``."""

    def get_function(module, name):
        if error:
            raise error
        return name

    module = stub_cuda.cupy(stub_cuda.Device(), version)
    module.RawModule.get_function = get_function
    return module


def test_the_cuda_kernels_are_chosen_on_cuda(without_launchers):
    without_launchers.setitem(sys.modules, "cupy", cupy())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert backends.fastest("auto", CUDA, dtype) == ("cupy", "")
        assert backends.fastest("cupy", CUDA, dtype) == ("cupy", "")
    assert backends.fastest("auto", torch.device("cpu"), torch.float32) == ("cpp", "")


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, r"the cupy kernels need CuPy, whose import says: .*; pip install cupy-cuda1\dx"),
        (cupy("12.3.0"), r"need CuPy 13.4 or later, not 12.3.0; pip install cupy-cuda1\dx"),
        (cupy(error=OSError("libcuda.so.1: no driver")), "could not compile a kernel: OSError: libcuda.so.1: no driver"),
    ],
)
def test_a_cupy_that_does_not_work(without_launchers, module, says):
    without_launchers.setitem(sys.modules, "cupy", module)
    with pytest.raises(BackendError, match=says):
        sj_tac.convert(csnn(), backend="cupy")
    with pytest.warns(BackendFallbackWarning, match=f"{says}.*'reference'"):
        problem = backends.fastest("auto", CUDA, torch.float32)[1]
    assert "; the nvrtc kernels need cuda-bindings" in problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.fastest("auto", CUDA, torch.float32)  # said once


def test_no_device(without_launchers):
    without_launchers.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"need a CUDA device, and torch.cuda.is_available\(\) is False"):
        sj_tac.convert(csnn(), backend="cupy")


def test_what_the_cuda_kernels_do_not_know(without_launchers):
    without_launchers.setitem(sys.modules, "cupy", cupy())
    with pytest.raises(BackendError, match="cupy kernels compute in float32, not in float64"):
        sj_tac.convert(csnn().double(), backend="cupy")
    odd = csnn()
    for module in odd.modules():
        if hasattr(module, "surrogate_function"):
            module.surrogate_function = surrogate.Rect()
    with pytest.raises(BackendError, match="no derivative of surrogate Rect, only of"):
        sj_tac.convert(odd, backend="cupy")


@pytest.mark.captured
def test_a_cuda_backend_does_not_quietly_run_on_the_cpu(without_launchers):
    without_launchers.setitem(sys.modules, "cupy", cupy())
    with pytest.raises(BackendError, match="the cupy kernels run on CUDA devices, not on cpu"):
        fire(torch.randn(2, 1, 2, 4, 4), node("lif"), backend="cupy")
    with pytest.raises(BackendError, match="the cupy kernels run on CUDA devices, not on cpu"):
        aggregate(torch.randn(2, 1), [0.5, 0.5], 2, backend="cupy")
    # A net that is to be moved to the GPU may be converted before.
    net = sj_tac.convert(csnn(), backend="cupy")
    with pytest.raises(BackendError, match="the cupy kernels run on CUDA devices, not on cpu"):
        net(torch.rand(4, 1, 2, 8, 8))


@pytest.mark.parametrize("generation", [13, 14])
def test_a_launch_that_fails_says_what_and_where(without_launchers, generation):
    """CuPy's errors reach the user with the kernel, the device and a way out; streams are those of either CuPy."""
    streams = []

    class Nothing:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return False

    def stream(handed, device_id=None):
        streams.append(handed if generation == 13 else handed.__cuda_stream__()[1])
        return Nothing()

    module = cupy(error=RuntimeError("CUDA_ERROR_INVALID_VALUE"))
    offered = types.SimpleNamespace(from_external=stream) if generation == 14 else types.SimpleNamespace()
    module.cuda = types.SimpleNamespace(Device=Nothing, Stream=offered, ExternalStream=stream)
    without_launchers.setitem(sys.modules, "cupy", module)
    without_launchers.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=7))
    says = r"aggregate_forward failed on cuda:1 with CuPy .*INVALID_VALUE; backend=\"reference\""
    with pytest.raises(BackendError, match=says):
        cupy_launch.launch(cuda.Launch(cuda.PROBE, 1, (), 0, torch.device("cuda", 1)))
    assert streams == [7]


def test_a_compiled_kernel_and_no_fusion_contradict_each_other():
    for build in (lambda: sj_tac.convert(csnn(), backend="cpp", fuse=False),
                  lambda: TACTP(conv(), None, node("lif"), backend="cpp", fuse=False)):  # fmt: skip
        with pytest.raises(BackendError, match="backend='cpp' with fuse=False: the cpp kernels run fused chains"):
            build()


def test_a_named_kernel_refuses_a_neuron_that_it_does_not_know():
    """Its surrogate has no derivative there; without a name such a neuron runs in plain PyTorch."""
    net = torch.nn.Sequential(conv(), norm(), node("lif")).eval()
    net[2].surrogate_function = surrogate.Rect()
    with pytest.raises(
        BackendError, match="backend='cpp' cannot run: '2': the compiled kernels have no derivative of surrogate Rect"
    ):
        sj_tac.convert(net, "collapse", 2, backend="cpp")
    assert sj_tac.report(sj_tac.convert(net, "collapse", 2))["0"].kernel == "reference"
    with pytest.raises(BackendError, match="'neuron': the compiled kernels have no derivative of surrogate Rect"):
        sj_tac.TAC(conv(), None, net[2], 2, backend="cpp")
