"""The first calls on a device, each of which says at once whether it is right: python -m benchmarks.first_device

``fire`` forward and backward against the reference kernel for each dtype, memory format and pool; a side stream; a captured
call; SpikingJelly's own neuron. A row is written before the next call begins, so that what stops
the process is the last line. ``--device cpu`` tries the script itself where there is no device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

import sj_tac
from sj_tac.functional import fire
from sj_tac.support import machine

POOLS: dict[str, Callable[[], nn.Module] | None] = {
    "no pool": None,
    "2x2": lambda: nn.MaxPool2d(2),
    "3x3": lambda: nn.MaxPool2d(3, 2, 1),
}


def node(kind: str = "LIF") -> Any:
    kinds = {"LIF": neuron.LIFNode, "IF": neuron.IFNode, "PLIF": neuron.ParametricLIFNode}
    return kinds[kind](surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m")


def ran(y: Tensor, pool: nn.Module | None, backend: str) -> tuple[Tensor, Tensor]:
    """Spikes and the gradient to the drives."""
    leaf = y.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out, _ = fire(leaf, node().to(y.device), 2, pool=pool, backend=backend)
    slope = torch.linspace(-1, 1, out.numel(), device=y.device).reshape(out.shape).to(out.dtype)
    (gradient,) = torch.autograd.grad(out, leaf, slope)
    return out.detach(), gradient


def fires(device: str, backend: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Each dtype, memory format and pool, against the reference kernel."""
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    for dtype, last, pool in itertools.product(dtypes, (False, True), POOLS):

        def check(dtype: torch.dtype = dtype, last: bool = last, pool: str = pool) -> str:
            torch.manual_seed(0)
            y = (2 * torch.randn(3, 2, 8, 16, 16, device=device)).to(dtype)
            y = y.movedim(2, -1).contiguous().movedim(-1, 2) if last else y
            make = POOLS[pool]
            module = make() if make is not None else None
            (ours, gradient), (expected, slope) = ran(y, module, backend), ran(y, module, "reference")
            flips = int((ours != expected).sum())
            error = float((gradient.float() - slope.float()).abs().max() / slope.float().abs().max())
            rate = float(expected.float().mean())
            wrong = flips or error > (1e-4 if dtype == torch.float32 else 2e-2) or not 0.02 < rate < 0.98
            return f"{'WRONG: ' if wrong else ''}{flips} flips, gradient off by {error:.1e}, rate {rate:.2f}"

        yield f"fire, {str(dtype)[6:]}, {'channels_last' if last else 'contiguous'}, {pool}", check


def net(device: str) -> nn.Module:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for c in (2, 8):
        norm = layer.BatchNorm2d(8)
        norm.running_var.fill_(0.05)
        modules += [layer.Conv2d(c, 8, 3, padding=1, bias=False), norm, node(), layer.MaxPool2d(2)]
    made = nn.Sequential(*modules)
    functional.set_step_mode(made, "m")
    return made.to(device).eval()


def calls(device: str, backend: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """A net against SpikingJelly and against itself: streams, a graph, the host's neuron."""
    x = (torch.rand(8, 2, 2, 16, 16, generator=torch.Generator().manual_seed(1)) < 0.4).float().to(device)
    source = net(device)
    fast = sj_tac.convert(source, "preserve", 2, backend=backend)

    @torch.no_grad()
    def called(module: nn.Module) -> Tensor:
        functional.reset_net(module)
        found: Tensor = module(x)
        return found

    def against_itself() -> str:
        apart = sj_tac.convert(source, "preserve", 2, fuse=False)
        off = float((called(fast) != called(apart)).float().mean())
        return f"{'WRONG: ' if off > 0.01 else ''}{100 * off:.3f} % of outputs differ from the unfused net's"

    def side_stream() -> str:
        expected, stream = called(fast), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = called(fast)
        torch.cuda.current_stream().wait_stream(stream)
        return "the same" if torch.equal(found, expected) else "WRONG: other outputs"

    def captured() -> str:
        replayed = sj_tac.capture(fast, x)
        same = all(torch.equal(replayed(x), called(fast)) for _ in range(3))
        return "the same" if same else "WRONG: other outputs"

    def the_hosts_neuron() -> str:
        y = 2 * torch.randn(8, 2, 8, 16, 16, device=device)
        with torch.no_grad():
            flips = int((fire(y, node().to(device), 1, backend=backend)[0] != node().to(device)(y)).sum())
        return f"{'WRONG: ' if flips else ''}{flips} flips of {y.numel()} spikes"

    yield "SpikingJelly's LIF", the_hosts_neuron
    yield "a net, fused and not", against_itself
    if device != "cpu":
        yield "a side stream", side_stream
        yield "a captured call", captured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto", help="auto, cupy, nvrtc (default: auto)")
    parser.add_argument("--out", type=Path, default=Path("first-device.jsonl"), help="one JSON line a call")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    wrong = 0
    with options.out.open("w") as file:

        def note(name: str, found: Any, seconds: float = 0.0) -> None:
            print(f"{name}: {found} ({seconds:.1f} s)", flush=True)
            file.write(json.dumps({"call": name, "found": found, "seconds": round(seconds, 2)}) + "\n")
            file.flush()

        note("machine", machine.describe())
        stages = [stage(options.device, options.backend) for stage in (fires, calls)]
        for name, check in itertools.chain(*stages):
            begun = time.perf_counter()
            try:
                found = check()
            except Exception as error:
                found = f"WRONG: {type(error).__name__}: {error}"
            wrong += "WRONG" in found
            note(name, found, time.perf_counter() - begun)
    raise SystemExit(f"{wrong} calls are wrong" if wrong else 0)


if __name__ == "__main__":
    main()
