"""What Python takes on its way to the CUDA kernels, without a device: ``python -m benchmarks.overhead --stub``.

CPU tensors stand for CUDA ones, as in the tests (tests/kernels/stub_cuda.py), but a launch is a call that returns at once
and a convolution gives memory that is there already. What is left is Python's part and torch's small operations on the CPU.
The own part of CuPy and of the driver in a launch is not in it, and nothing here says how fast a device is.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import functional
from torch import Tensor, nn

import sj_tac
from sj_tac.kernels.gpu import launchers

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "kernels")]
PARTS = ("convolution", "norm", "neuron")


class _Nothing:
    """Stands for whatever a launcher holds: current inside, called, or asked for."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> None:
        pass


def _cupy() -> dict[str, types.ModuleType]:
    nothing: Any = _Nothing()
    nothing.kernel = types.SimpleNamespace(ptr=1)
    module: Any = types.ModuleType("cupy")
    module.__version__ = "14.2.0"
    module.RawModule = lambda *, code, options: types.SimpleNamespace(get_function=lambda name: nothing)
    stream = types.SimpleNamespace(from_external=lambda foreign: (foreign.__cuda_stream__(), nothing)[1])
    driver = types.SimpleNamespace(ctxGetCurrent=lambda: 1, launchKernel=lambda *_: None)
    module.cuda = types.SimpleNamespace(Device=lambda index: nothing, Stream=stream, driver=driver)
    return {"cupy": module}


def _bindings() -> dict[str, types.ModuleType]:
    top, package, nvrtc, driver = (
        types.ModuleType(f"cuda{name}") for name in ("", ".bindings", ".bindings.nvrtc", ".bindings.driver")
    )
    found: Any
    for module, one, none in (
        (
            nvrtc,
            ("nvrtcCreateProgram", "nvrtcGetCUBINSize"),
            ("nvrtcCompileProgram", "nvrtcGetCUBIN", "nvrtcDestroyProgram"),
        ),
        (
            driver,
            ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuCtxPopCurrent"),
            ("cuCtxPushCurrent", "cuLaunchKernel"),
        ),
    ):
        for name in one:
            setattr(module, name, lambda *_: (0, 0))
        for name in none:
            setattr(module, name, lambda *_: (0,))
    found = nvrtc
    found.nvrtcVersion = lambda: (0, 13, 2)
    found = package
    found.nvrtc, found.driver = nvrtc, driver
    found = top
    found.bindings = package
    return {m.__name__: m for m in (top, package, nvrtc, driver)}


@contextmanager
def device() -> Iterator[None]:
    """Inside, this machine has a device that launches nothing, with both launchers."""
    import pytest
    import stub_cuda

    ready: dict[tuple[int, ...], Tensor] = {}

    def convolution(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = (x.shape[0], weight.shape[0], *x.shape[2:])
        if shape not in ready:
            ready[shape] = torch.zeros(shape)
        return ready[shape]

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        stub_cuda.machine(patch, Path(folder))
        stub_cuda.stand_in(patch)
        for name, module in (_cupy() | _bindings()).items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(nn.Conv2d, "_conv_forward", convolution)
        try:
            yield
        finally:
            stub_cuda.forget()


def seconds(run: Callable[[], Any], calls: int, rounds: int) -> float:
    """Of this thread's own time, a call: the median of the rounds. Others on the machine count less than on a clock."""
    taken = []
    for _ in range(rounds):
        begun = time.thread_time()
        for _ in range(calls):
            run()
        taken.append((time.thread_time() - begun) / calls)
    return statistics.median(taken)


@torch.no_grad()
def rows(net: nn.Sequential, x: Tensor, ks: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a layer of ``net`` (conv, norm, neuron, over and over) in a call, and of its modules called alone."""
    found = []
    with device():
        for launcher in launchers.NAMES:
            for k in ks:
                fast = sj_tac.convert(net, "preserve", k, backend=launcher)
                modules = list(fast)
                functional.reset_net(fast)
                for _ in range(3):
                    fast(x)
                row: dict[str, Any] = {"launcher": launcher, "k": k}
                row["layer"] = round(seconds(lambda net=fast: net(x), 5, rounds) / (len(modules) // 3) * 1e6, 1)  # type: ignore
                value = x
                for module in modules[:6]:
                    value = module(value)
                for part, module in zip(PARTS, modules[6:9], strict=True):
                    row[part] = round(seconds(lambda m=module, v=value: m(v), 200, rounds) * 1e6, 1)  # type: ignore
                    value = module(value)
                functional.reset_net(fast)
                found.append(row)
    return found


def merged(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what an earlier run gave beside each number, as [before, now]."""
    earlier = {(row["launcher"], row["k"]): row for row in before}
    out = []
    for row in rows:
        old = earlier[row["launcher"], row["k"]]
        out.append(row | {part: [old[part], row[part]] for part in ("layer", *PARTS)})
    return out
