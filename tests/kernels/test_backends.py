"""Which kernel runs where: what ``auto`` takes and says, and what a named backend raises where it cannot run."""

import sys
import types
import warnings

import pytest
import stub_cuda
import torch
from spikingjelly.activation_based import layer
from support import conv, csnn, node, norm

import sj_tac
from sj_tac.errors import BackendError, BackendFallbackWarning
from sj_tac.functional import aggregate, fire
from sj_tac.kernels import backends
from sj_tac.kernels.gpu import cupy_launch, launchers, program as cuda

CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a CUDA device, as far as the choice of a kernel can tell; a test offers what launches there."""
    stub_cuda.machine(monkeypatch, tmp_path)
    yield monkeypatch
    stub_cuda.forget()


def cupy(version="14.2.0", error=None):
    """A CuPy that compiles anything, or fails with ``error``."""

    class RawModule:
        def __init__(self, code, options):
            self.code = code

        def get_function(self, name):
            if error:
                raise error
            assert f" {name}(" in self.code
            return name

    module = types.ModuleType("cupy")
    module.__version__, module.RawModule = version, RawModule
    return module


def test_the_cuda_kernels_are_chosen_on_cuda(machine):
    machine.setitem(sys.modules, "cupy", cupy())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert backends.fastest("auto", CUDA, dtype) == ("cupy", "")
        assert backends.fastest("cupy", CUDA, dtype) == ("cupy", "")
    assert backends.fastest("auto", torch.device("cpu"), torch.float32) == ("numba", "")


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, r"the cupy kernels need CuPy, whose import says: .*; pip install cupy-cuda1\dx"),
        (cupy("12.3.0"), r"need CuPy 13.4 or later, not 12.3.0; pip install cupy-cuda1\dx"),
        (
            cupy("13.10.0", RuntimeError("NVRTC_ERROR_COMPILATION (6)")),
            "could not compile a kernel: RuntimeError: NVRTC_ERROR",
        ),
        (cupy(error=OSError("libcuda.so.1: no driver")), "could not compile a kernel: OSError: libcuda.so.1: no driver"),
    ],
)
def test_a_cupy_that_does_not_work(machine, module, says):
    machine.setitem(sys.modules, "cupy", module)
    kernel, problem = backends.fastest("cupy", CUDA, torch.float32)
    assert kernel == "cupy"
    with pytest.raises(BackendError, match=says):
        sj_tac.convert(csnn(), backend="cupy")
    with pytest.warns(BackendFallbackWarning, match=f"{says}.*'reference'"):
        assert backends.fastest("auto", CUDA, torch.float32)[1].startswith(
            f"{problem}; the nvrtc kernels need cuda-bindings"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.fastest("auto", CUDA, torch.float32)  # said once


def test_no_device(machine):
    machine.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"need a CUDA device, and torch.cuda.is_available\(\) is False"):
        sj_tac.convert(csnn(), backend="cupy")


def test_what_the_cuda_kernels_do_not_know(machine):
    machine.setitem(sys.modules, "cupy", cupy())
    assert "compute in float32, not in float64" in backends.fastest("cupy", CUDA, torch.float64)[1]
    with pytest.raises(BackendError, match="cupy kernels compute in float32, not in float64"):
        sj_tac.convert(csnn().double(), backend="cupy")
    from spikingjelly.activation_based import surrogate

    odd = csnn()
    for module in odd.modules():
        if hasattr(module, "surrogate_function"):
            module.surrogate_function = surrogate.Rect()
    with pytest.raises(BackendError, match="no derivative of surrogate Rect, only of Sigmoid"):
        sj_tac.convert(odd, backend="cupy")


def test_a_trial_of_ours_says_nothing_and_keeps_nothing_from_being_said(machine):
    machine.setattr(backends, "_SAID", set())
    machine.setitem(sys.modules, "cupy", cupy())
    with backends.untold():
        assert backends.fastest("auto", CUDA, torch.float64)[1]
    with pytest.warns(BackendFallbackWarning, match="not in float64"):
        backends.fastest("auto", CUDA, torch.float64)


def test_a_cuda_backend_does_not_quietly_run_on_the_cpu(machine):
    machine.setitem(sys.modules, "cupy", cupy())
    with pytest.raises(BackendError, match="the cupy kernels run on CUDA devices, not on cpu"):
        fire(torch.randn(2, 1, 2, 4, 4), node("lif"), backend="cupy")
    with pytest.raises(BackendError, match="the cupy kernels run on CUDA devices, not on cpu"):
        aggregate(torch.randn(2, 1), [0.5, 0.5], 2, backend="cupy")
    # A net that is to be moved to the GPU may be converted before.
    net = sj_tac.convert(csnn(), backend="cupy")
    with pytest.raises(BackendError, match="the cupy kernels run on CUDA devices, not on cpu"):
        net(torch.rand(4, 1, 2, 8, 8))


@pytest.mark.parametrize("generation", [13, 14])
def test_a_launch_that_fails_says_what_and_where(machine, generation):
    """CuPy's errors reach the user with the kernel, the device and a way out; streams are those of either CuPy."""
    streams = []

    class Nothing:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return False

    module = cupy(error=RuntimeError("CUDA_ERROR_INVALID_VALUE"))

    def stream(handed, device_id=None):
        streams.append(handed if generation == 13 else handed.__cuda_stream__()[1])
        return Nothing()

    offered = types.SimpleNamespace(from_external=stream) if generation == 14 else types.SimpleNamespace()
    module.cuda = types.SimpleNamespace(Device=Nothing, Stream=offered, ExternalStream=stream)
    machine.setitem(sys.modules, "cupy", module)
    machine.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=7))
    where = torch.device("cuda", 1)
    says = r"aggregate_forward failed on cuda:1 with CuPy .*INVALID_VALUE; backend=\"reference\""
    with pytest.raises(BackendError, match=says):
        cupy_launch.launch(cuda.Launch(cuda.PROBE, 1, (), 0, where))
    assert streams == [7]


def test_a_compiled_kernel_and_no_fusion_contradict_each_other():
    from sj_tac import TACTP

    for build in (lambda: sj_tac.convert(csnn(), backend="numba", fuse=False),
                  lambda: TACTP(conv(), None, node("lif"), backend="numba", fuse=False)):  # fmt: skip
        with pytest.raises(BackendError, match="backend='numba' with fuse=False: the numba kernels run fused chains"):
            build()


def test_a_named_kernel_refuses_a_chain_that_cannot_be_fused():
    """The mean of a count is taken at a MaxPool that a Dropout keeps away from the neuron: such a chain runs unfused."""
    rest = [layer.Dropout(0.3, step_mode="m"), layer.MaxPool2d(2, step_mode="m")]
    net = torch.nn.Sequential(conv(), norm(), node("lif"), *rest).eval()
    with pytest.raises(BackendError, match="backend='numba': layer '0' cannot run as one operator: its MaxPool does not"):
        sj_tac.convert(net, "collapse", 2, backend="numba")
    assert sj_tac.report(sj_tac.convert(net, "collapse", 2))["0"].kernel == "reference"
    by_hand = (conv(), None, node("lif"), 2)
    with pytest.raises(BackendError, match="layer 'conv' cannot run as one operator: its MaxPool"):
        sj_tac.TAC(*by_hand, pool=layer.MaxPool2d(2, ceil_mode=True), spikes="count", backend="numba")


def test_torch_compile_does_not_look_into_the_choice():
    def kernel(x):
        return x + len(backends.fastest("auto", CUDA, torch.float32)[1])

    backends._SAID.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.compile(kernel, fullgraph=True, backend="eager")(torch.zeros(1))
    assert found.item() == len(launchers.first()[1])
    torch.compiler.reset()


def test_importing_starts_nothing():
    import subprocess

    script = "import sys, sj_tac, torch; assert not {'cupy', 'numba', 'sj_tac.kernels.gpu.nvrtc_launch'} & set(sys.modules)"
    script += "; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
