"""What single kernels and layers take on a CUDA device: bytes a second, and what a call costs.

For ``benchmarks.gpu``, which runs these before whole nets. Times of kernels are those of replays of a CUDA graph, between
events of the device, so that no Python is in them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from spikingjelly.activation_based import functional
from torch import Tensor, nn

import sj_tac
from benchmarks import measure, nets, overhead
from sj_tac import capturing
from sj_tac.functional import fire
from sj_tac.kernels import backends
from sj_tac.kernels.gpu import launchers
from sj_tac.support import machine
from sj_tac.support.files import write_text

LAST = measure.LAST
KS = (1, 2, 4)
DTYPES = (torch.float32, torch.bfloat16)
# Frames of SpikingJelly's DVSGestureNet at batch 16, T = 16, in its first two layers.
BATCH, STEPS, CHANNELS = 16, 16, 128
LAYERS = ((128, 1), (128, 2), (128, 4), (64, 2))


class Results:
    """What was measured so far: in a file after every row, so that nothing that comes later can lose it."""

    def __init__(self, folder: Path, minutes: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.end = folder / "all.json", time.monotonic() + 60 * minutes
        self.content: dict[str, Any] = {"machine": machine.describe()}
        self._write()

    def _write(self) -> None:
        write_text(self.file, json.dumps(self.content, indent=1) + "\n")

    def add(self, stage: str, name: str, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of one configuration, or one that says why there is none."""
        row: dict[str, Any] = {"name": name}
        if time.monotonic() > self.end:
            row["failed"] = "not measured: out of time"
        else:
            try:
                row |= measured()
            except Exception as error:  # one configuration's failure must not cost the others
                row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        self.content.setdefault(stage, []).append(row)
        self._write()
        return row


def seconds_of(call: Callable[[], Any], repeats: int = 30) -> float:
    """Of one call on the device alone: replays of a CUDA graph, between events, so that no Python is in it."""
    _, replay = capturing.record(call, torch.device("cuda"))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _fired(dtype: torch.dtype, last: bool, size: int, k: int) -> tuple[Callable[[], tuple[Tensor, Tensor]], Tensor, str]:
    """``fire`` as in a layer of DVSGestureNet, the drives that it reads, and the kernel that runs it."""
    net, _ = nets.make("DVSGestureNet", 1)
    node = next(m for m in net.modules() if hasattr(m, "v_threshold"))
    layout = torch.channels_last if last else torch.contiguous_format
    y = torch.randn(STEPS // k * BATCH, CHANNELS, size, size, dtype=dtype, device="cuda").contiguous(memory_format=layout)
    y, weights = y.unflatten(0, (STEPS // k, BATCH)), torch.rand(STEPS, device="cuda") if k > 1 else None
    scale, shift = torch.rand(CHANNELS, device="cuda"), torch.rand(CHANNELS, device="cuda")
    kernel, _ = backends.fastest("auto", y.device, dtype)
    pool = nn.MaxPool2d(2, 2)

    def run() -> tuple[Tensor, Tensor]:
        return fire(y, node, k, scale=scale, shift=shift, pool=pool, weights=weights, group=k, backend=kernel)

    return run, y, kernel


def _beside_a_copy(seconds: float, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """Bytes a second of what read and wrote these tensors, and of a copy that moves as many."""
    moved = sum(t.numel() * t.element_size() for t in tensors)
    # Of two sizes: where source and target lie some distances apart, a copy takes half as long again.
    copying = min(seconds_of(_copy(moved // 2 + more)) * moved / (moved + 2 * more) for more in (0, 1 << 24))
    rates = {"GB/s": round(moved / seconds / 1e9), "copy GB/s": round(moved / copying / 1e9)}
    return {"ms": 1e3 * seconds, **rates, "of copy": round(copying / seconds, 3)}


def _copy(size: int) -> Callable[[], Any]:
    """A copy of so many bytes, in whole vectors."""
    source = torch.empty(size // 4096, 1024, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


@torch.no_grad()
def fire_bandwidth(dtype: torch.dtype, last: bool, size: int, k: int) -> dict[str, Any]:
    """Bytes a second of ``fire`` alone, against a copy of as many bytes."""
    run, y, kernel = _fired(dtype, last, size, k)
    return {"kernel": kernel} | _beside_a_copy(seconds_of(run), (y, *run()))


def backward_bandwidth(dtype: torch.dtype, last: bool, size: int, k: int) -> dict[str, Any]:
    """The same of its backward: the output's gradient and the drives are read, the drives' gradient is written."""
    run, y, kernel = _fired(dtype, last, size, k)
    # Without a graph of its own, which would stay on this stream: a recording on another may not wait for it.
    slope = torch.randn_like(run()[0])
    y.requires_grad_()

    def both() -> Any:
        return torch.autograd.grad(run()[0], y, slope)

    # A backward runs on its forward's stream, so that a graph has both of them or none.
    return {"kernel": kernel} | _beside_a_copy(seconds_of(both) - seconds_of(run), (y.detach(), slope, *both()))


def bandwidth(results: Results, console: Console) -> None:
    """Forward and backward of the first two layers in every dtype and layout."""
    for stage, measured in (("bandwidth", fire_bandwidth), ("bandwidth, backward", backward_bandwidth)):
        for dtype in DTYPES:
            for last in (False, True):
                for size, k in LAYERS:
                    name = f"{str(dtype)[6:]}, {size} x {size}, k={k}{LAST if last else ''}"
                    case = (dtype, last, size, k)
                    console.print(results.add(stage, name, lambda case=case, how=measured: how(*case)))


@torch.no_grad()
def call_overhead(maker: Callable[[nn.Module], nn.Module], device: str = "cuda", seconds: float = 1.0) -> dict[str, Any]:
    """Microseconds of a Conv-BN-LIF layer in a call of ten on maps so small that the device waits for Python."""
    net = maker(overhead.net().to(device))
    x = (torch.rand(overhead.STEPS, 1, overhead.CHANNELS, 4, 4) < 0.4).float().to(device)

    def called() -> float:
        begun = time.perf_counter()
        for _ in range(5):
            functional.reset_net(net)
            net(x)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / 5

    for _ in range(3):
        called()
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 3:
        found.append(called())
    return {"us a layer": round(1e6 * statistics.median(found) / overhead.LAYERS, 1)}


def overheads(results: Results, console: Console) -> None:
    """``call_overhead`` of SpikingJelly and of ours by either launcher."""
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {"SpikingJelly eager": lambda net: net}
    for launcher in launchers.NAMES:
        for k in KS:
            makers[f"sj_tac, {launcher}, k={k}"] = lambda net, k=k, launcher=launcher: sj_tac.convert(  # type: ignore[misc]
                net, "preserve", k, backend=launcher
            )
    for name, maker in makers.items():
        console.print(results.add("overhead", name, lambda maker=maker: call_overhead(maker)))
