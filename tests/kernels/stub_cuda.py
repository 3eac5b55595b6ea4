"""A CUDA device that is none: what torch says of one, and modules in the places of CuPy and cuda-bindings.

Both stand-ins look at all that they are handed as the originals would, compare it with the kernel's own signature, and then
run the kernel's g++ build (shim.py) on host memory. CPU tensors stand for CUDA ones, so that the very Python that launches
on a GPU runs here: dispatch, operators, launcher, kernels, autograd.
"""

import ctypes
import sys
import types

import numpy as np
import pytest
import shim
import torch

from sj_tac.kernels import aggregate_op, backends, fire_op
from sj_tac.kernels.gpu import cupy_launch, launchers, launches, nvrtc_launch, program as cuda

# Whether there is a device, and where the tests of one keep their tensors.
REAL = torch.cuda.is_available()
DEVICE = "cuda" if REAL else "cpu"
STREAM = 7
MAX_GRID = 2**31 - 1


class Stream:
    """torch's current stream, as far as a launcher asks."""

    cuda_stream = STREAM


class Device:
    """The state of the stand-in: which device, stream and context are current, and what was launched.

    ``of_thread``: the context that the thread has, as CuPy's driver knows contexts: numbers, 0 for none.
    """

    def __init__(self):
        self.current, self.stream, self.context, self.calls, self.of_thread = [], [], [], [], 0


def context_of(index):
    """The number of a device's context; the tensors that stand for a device's have no index."""
    return 0x1000 + (0 if index is None else index)


def check(source, kernel, arguments, blocks, threads, shared):
    """AssertionError where a launch does not fit the kernel's signature and limits; arguments: (kind, bytes) each."""
    wanted = shim.parameters(source, kernel)
    assert len(arguments) == len(wanted), f"{kernel} takes {len(wanted)} arguments, not {len(arguments)}"
    for number, (given, fits) in enumerate(zip(arguments, wanted, strict=True)):
        assert given == fits, f"{kernel}: argument {number} is {given[0]} of {given[1]} bytes; it takes {fits}"
    assert type(blocks) is int
    assert 1 <= blocks <= MAX_GRID, f"{kernel}: a grid of {blocks} blocks"
    assert threads == shim.block_of(source), f"{kernel}: blocks of {threads} threads"
    assert type(shared) is int
    assert 0 <= shared <= 48 * 1024, f"{kernel}: {shared} bytes of shared memory"


# What each type of NumPy's may be passed for. An address is an unsigned number, so that no size is taken for one.
KINDS = {np.uint64: ("pointer", 8), np.int32: ("integer", 4), np.int64: ("integer", 8), np.float32: ("float", 4)}


def kind_of(value):
    """(kind, bytes) of an argument as CuPy takes it: scalars of NumPy's, and arrays of size one for structs."""
    if type(value) in KINDS:
        return KINDS[type(value)]
    assert type(value) is np.ndarray, f"{value!r} is a {type(value)}, which no kernel is called with"
    assert value.size == 1
    assert value.dtype.names, f"an array of {value.dtype} is no struct"
    return "struct", value.dtype.itemsize


class CupyDriver:
    """The driver's own calls, as CuPy has them."""

    def __init__(self, device, loaded):
        self.device, self.loaded = device, loaded

    def ctxGetCurrent(self):
        return self.device.of_thread

    def ctxSetCurrent(self, context):
        self.device.of_thread = context

    def launchKernel(self, *call):
        function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra = call
        source, kernel, index = self.loaded[function]
        assert self.device.of_thread == context_of(index), "the context is not the kernel's"
        launch_by_driver((source, kernel), (gx, gy, gz), (bx, by, bz), shared, stream, pointers, extra)
        self.device.calls.append(("cupy", kernel, index))


class Context:
    """A device or a stream that is current inside."""

    def __init__(self, stack, value):
        self.stack, self.value = stack, value

    def __enter__(self):
        self.stack.append(self.value())

    def __exit__(self, *_):
        assert self.stack.pop() == self.value()


def cupy(device, version="14.2.0"):
    """A module in CuPy's place."""
    loaded = {}

    class Function:
        def __init__(self, source, kernel):
            self.source, self.kernel_name = source, kernel

        @property
        def kernel(self):
            """It, loaded on the device that is current."""
            assert device.current, "no device is current"
            loaded[len(loaded) + 1] = self.source, self.kernel_name, device.current[-1]
            return types.SimpleNamespace(ptr=len(loaded))

        def __call__(self, grid, block, arguments, *, shared_mem=0):
            assert device.current, "no device is current"
            assert device.stream[-1:] == [(STREAM, device.current[-1])], "the stream is not torch's of this device"
            assert type(arguments) is tuple
            (blocks,), (threads,) = grid, block
            check(self.source, self.kernel_name, [kind_of(a) for a in arguments], blocks, threads, shared_mem)
            held = [np.asarray(a) for a in arguments]
            device.calls.append(("cupy", self.kernel_name, device.current[-1]))
            shim.run(self.source, self.kernel_name, blocks, shared_mem, [a.ctypes.data for a in held])

    class RawModule:
        def __init__(self, *, code, options):
            assert options == cuda.OPTIONS
            self.code = code

        def get_function(self, name):
            assert f" {name}(" in self.code
            return Function(self.code, name)

    class Streams:
        @staticmethod
        def from_external(foreign):
            protocol, handle = foreign.__cuda_stream__()
            assert protocol == 0
            # Kept by whoever made it: the device is the one that is current when it is entered.
            return Context(device.stream, lambda: (handle, device.current[-1]))

    def free(address):
        """Of nothing: what makes a thread's context."""
        assert address == 0
        assert device.current, "no device is current"
        device.of_thread = context_of(device.current[-1])

    module = types.ModuleType("cupy")
    module.__version__, module.RawModule = version, RawModule
    module.cuda = types.SimpleNamespace(
        Device=lambda index: Context(device.current, lambda: index), Stream=Streams, driver=CupyDriver(device, loaded),
        runtime=types.SimpleNamespace(free=free),
    )  # fmt: skip
    return module


def launch_by_driver(of, grid, block, shared, stream, pointers, extra):
    """The driver's launch, which is told nothing of types: it reads as many bytes as the kernel takes from where each
    pointer leads.
    """
    source, kernel = of
    assert (grid[1:], block[1:], extra) == ((1, 1), (1, 1), 0)
    assert stream == STREAM
    count = len(shim.parameters(source, kernel))
    addresses = list((ctypes.c_uint64 * count).from_address(pointers))
    check(source, kernel, shim.parameters(source, kernel), grid[0], block[0], shared)
    shim.run(source, kernel, grid[0], shared, addresses)


class Status(int):
    """A status of the bindings: a number with a name."""

    name = "CUDA_ERROR_INVALID_VALUE"


OK, FAILED = Status(0), Status(1)


def bindings(device):
    """Modules in the places of ``cuda``, ``cuda.bindings``, ``cuda.bindings.nvrtc`` and ``cuda.bindings.driver``."""
    nvrtc, driver = types.ModuleType("cuda.bindings.nvrtc"), types.ModuleType("cuda.bindings.driver")
    programs, modules = {}, {}

    def fill(buffer, content):
        assert type(buffer) is bytearray
        assert len(buffer) == len(content)
        buffer[:] = content
        return (OK,)

    def compile_program(handle, count, flags):
        assert flags == [*(flag.encode() for flag in cuda.OPTIONS), b"--gpu-architecture=sm_90"]
        assert count == len(flags)
        return (OK,)

    def create(source, name, count, headers, names):
        assert type(source) is type(name) is bytes
        assert (count, headers, names) == (0, [], [])
        programs[len(programs)] = source
        return OK, len(programs) - 1

    nvrtc.nvrtcVersion = lambda: (OK, 13, 2)
    nvrtc.nvrtcCreateProgram, nvrtc.nvrtcCompileProgram = create, compile_program
    nvrtc.nvrtcDestroyProgram = lambda handle: (OK,)
    nvrtc.nvrtcGetCUBINSize = lambda handle: (OK, len(programs[handle]))
    nvrtc.nvrtcGetCUBIN = lambda handle, buffer: fill(buffer, programs[handle])

    def load(code):
        assert device.context, "no context is current"
        modules[len(modules)] = bytes(code).decode()
        return OK, len(modules) - 1

    def launch(*call):
        (source, kernel, index), gx, gy, gz, bx, by, bz, shared, stream, pointers, extra = call
        assert device.context[-1:] == [("context", index)], "the context is not the kernel's"
        device.calls.append(("nvrtc", kernel, index))
        launch_by_driver((source, kernel), (gx, gy, gz), (bx, by, bz), shared, stream, pointers, extra)
        return (OK,)

    driver.cuDeviceGet = lambda index: (OK, ("device", index))
    driver.cuDevicePrimaryCtxRetain = lambda found: (OK, ("context", found[1]))
    driver.cuCtxPushCurrent = lambda context: (device.context.append(context), (OK,))[1]
    driver.cuCtxPopCurrent = lambda: (OK, device.context.pop())
    driver.cuModuleLoadData = load
    driver.cuModuleGetFunction = lambda module, name: (OK, (modules[module], name.decode(), device.context[-1][1]))
    driver.cuLaunchKernel = launch
    package, top = types.ModuleType("cuda.bindings"), types.ModuleType("cuda")
    package.nvrtc, package.driver, top.bindings = nvrtc, driver, package
    return {"cuda": top, "cuda.bindings": package, "cuda.bindings.nvrtc": nvrtc, "cuda.bindings.driver": driver}


def forget():
    """What the launchers keep of a machine."""
    for kept in (cupy_launch.problem, cupy_launch._module, cupy_launch._kernel, cupy_launch._external, nvrtc_launch.problem,
                 nvrtc_launch._kernel, nvrtc_launch._context):  # fmt: skip
        kept.cache_clear()
    launches.forget()
    backends._SAID.clear()


def machine(monkeypatch, tmp_path):
    """torch's answers on a machine with a CUDA device and neither CuPy nor cuda-bindings."""
    forget()
    # But for torch itself, which would ask the driver.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not sys._getframe(1).f_globals["__name__"].startswith("torch."))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no device")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setenv("SJ_TAC_CACHE", str(tmp_path / "kernels"))
    for name in ("cupy", "cuda", "cuda.bindings", "cuda.bindings.nvrtc", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)


def offer(monkeypatch, *launchers):
    """Modules for these launchers; gives back the device on which they run."""
    device = Device()
    if "cupy" in launchers:
        monkeypatch.setitem(sys.modules, "cupy", cupy(device))
    if "nvrtc" in launchers:
        for name, module in bindings(device).items():
            monkeypatch.setitem(sys.modules, name, module)
    return device


def stand_in(monkeypatch):
    """CPU tensors stand for CUDA ones: the operators' CUDA kernels run in the CPU's place, and the choice takes them."""
    for operator, kernel in (
        (fire_op.fire, fire_op._on_cuda),
        (fire_op.fire_backward, fire_op._backward_on_cuda),
        (aggregate_op.aggregate, aggregate_op.on_cuda),
        (aggregate_op.aggregate_backward, aggregate_op._backward_on_cuda),
    ):
        monkeypatch.setitem(operator._backend_fns, "cpu", kernel)
    monkeypatch.setattr(aggregate_op, "aggregate_now", aggregate_op.on_cuda)
    monkeypatch.setattr(aggregate_op, "ON_CPU", aggregate_op.ON_CUDA)
    monkeypatch.setitem(fire_op.FORWARD, "cpu", fire_op._on_cuda)
    monkeypatch.setitem(fire_op.BACKWARD, "cpu", fire_op._back_on_cuda)
    fastest = backends.fastest

    def on_a_device(backend, device, dtype):
        return fastest(backend, torch.device("cuda", 0) if device is not None and device.type == "cpu" else device, dtype)

    monkeypatch.setattr(backends, "fastest", on_a_device)


def needs_device(why):
    """A mark of a test that nothing can stand in for."""
    return pytest.mark.skipif(not REAL, reason=f"no CUDA device: {why}")


def exact():
    """What a fixture yields: float32 convolutions and products without TF32, by algorithms that stay the same.

    By hand: monkeypatch takes properties of torch.backends for attributes that it may delete again.
    """
    switches = (
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "deterministic"),
    )
    before = [getattr(module, name) for module, name in switches]
    for module, name in switches:
        setattr(module, name, name == "deterministic")
    yield
    for (module, name), value in zip(switches, before, strict=True):
        setattr(module, name, value)


def on_the_stub(monkeypatch, tmp_path):
    """What a fixture yields: the stand-in with both launchers, or None on a machine with a device."""
    if REAL:
        yield None
        return
    if shim.MISSING:
        pytest.skip(shim.MISSING)
    machine(monkeypatch, tmp_path)
    stand_in(monkeypatch)
    yield offer(monkeypatch, *launchers.NAMES)
    forget()


@pytest.fixture
def without_launchers(monkeypatch, tmp_path):
    """A machine with a CUDA device, as far as the choice of a kernel can tell; a test offers what launches there."""
    machine(monkeypatch, tmp_path)
    yield monkeypatch
    forget()


@pytest.fixture
def device(without_launchers):
    """A machine with both launchers, where CPU tensors stand for CUDA ones."""
    found = offer(without_launchers, *launchers.NAMES)
    stand_in(without_launchers)
    return found
