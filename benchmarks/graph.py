"""Captured nets beside the same nets as they are defined and SpikingJelly, in one run: speed, captures, the gate.

    python -m benchmarks.graph --threads 1 --nets paper-dvs sew_resnet18 spikformer_ti tiny

Each row is a net, a memory format, a mode and k. Columns are milliseconds a call of the source, of the converted net as it
is defined (``fuse=False``) and of the captured one, medians of calls that take turns, and the captured one's speed over
theirs. ``capture``: CPU seconds of the first call.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
import warnings
from collections.abc import Callable

import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import Tensor, nn

import sj_tac
from benchmarks import nets, zoo_nets
from sj_tac.rewrites.gate import Gate, gate_of


def tiny() -> nn.Module:
    """Ten layers of eight channels: what a call costs beside its arithmetic."""
    modules: list[nn.Module] = []
    for i in range(10):
        conv = layer.Conv2d(2 if i == 0 else 8, 8, 3, padding=1, bias=False)
        modules += [conv, layer.BatchNorm2d(8), neuron.LIFNode(surrogate_function=surrogate.ATan(), detach_reset=True)]
    return nn.Sequential(*modules)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "paper-dvs": (nets.CASES["paper-dvs"].build, nets.CASES["paper-dvs"].shape),
    "sew_resnet18": (nets.CASES["sew_resnet18"].build, nets.CASES["sew_resnet18"].shape),
    "spikformer_ti": (zoo_nets.CASES["spikformer_ti"].build, zoo_nets.CASES["spikformer_ti"].shape),
    "tiny": (tiny, (8, 4, 2, 8, 8)),
}


def make(name: str, last: bool) -> tuple[nn.Module, Tensor]:
    """Return an awake net and its input, with maps in channels_last if ``last``."""
    torch.manual_seed(0)
    build, shape = NETS[name]
    net = build().eval()
    functional.set_step_mode(net, "m")
    x = (torch.rand(shape) < 0.1).float()
    nets.wake(net, x)
    if last:
        net = net.to(memory_format=torch.channels_last)
        x = x.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, shape[:2])
    return net, x


def call(net: nn.Module, x: Tensor, training: bool) -> None:
    functional.reset_net(net)
    with torch.set_grad_enabled(training):
        out = net(x)
    if training:
        out.float().square().sum().backward()


def medians(of: dict[str, nn.Module], x: Tensor, training: bool, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of a call of each net; the nets take turns."""
    times: dict[str, list[float]] = {name: [] for name in of}
    for net in of.values():
        for _ in range(2):
            call(net, x, training)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, net in of.items():
            start = time.perf_counter()
            call(net, x, training)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def row(name: str, last: bool, training: bool, k: int, seconds: float) -> str:
    source, x = make(name, last)
    made = {
        "source": source,
        "defined": sj_tac.convert(source, "preserve", k, example_input=x, fuse=False),
        "captured": sj_tac.convert(source, "preserve", k, example_input=x),
    }
    for net in made.values():
        net.train(training)
    start = time.process_time()
    call(made["captured"], x, training)
    capture = time.process_time() - start
    found = medians(made, x, training, seconds)
    layout, mode = "last" if last else "contiguous", "training" if training else "inference"
    ratios = found["defined"] / found["captured"], found["source"] / found["captured"]
    numbers = " | ".join(f"{found[which]:.2f}" for which in made)
    return f"| {name} | {layout} | {mode} | {k} | {numbers} | {ratios[0]:.2f} | {ratios[1]:.2f} | {capture:.1f} |"


def gate_in_front(net: nn.Module) -> Gate:
    """Return the gate of a converted net."""
    found = gate_of(net)
    assert found is not None
    return found


def gate(name: str) -> str:
    """Return microseconds of the gate's checks."""
    net, x = make(name, False)
    fast = sj_tac.convert(net, "preserve", 2, example_input=x)
    with torch.no_grad():
        fast(x)
        found, number = gate_in_front(fast), 500

        def look() -> None:
            found._blocked((x,), {})
            found._no_kernels((x,), {})
            found._is_as_captured()
            found.capture.look()

        checks = timeit.timeit(look, number=number)
    return f"{name}: {1e6 * checks / number:.0f} us for {len(list(net.modules()))} modules"


def loop(name: str) -> str:
    """Return how many captures two epochs of training need, and the CPU seconds of each call that captured."""
    net, x = make(name, False)
    fast = sj_tac.convert(net, "preserve", 2, example_input=x)
    graphs = gate_in_front(fast).capture.graphs
    batch = torch.cat([x] * (4 // min(4, x.shape[1])), 1)[:, :4]
    seconds: list[float] = []

    def step(given: Tensor, training: bool, carried: bool = False) -> None:
        fast.train(training)
        if not carried:
            functional.reset_net(fast)
        number, start = len(graphs), time.process_time()
        with torch.set_grad_enabled(training):
            out = fast(given)
        if len(graphs) > number:
            seconds.append(time.process_time() - start)
        if training:
            out.float().square().sum().backward()
        functional.detach_net(fast)

    for _ in range(2):
        for given in (batch, batch, batch[:, :3]):
            step(given, True)
        for given in (batch, batch[:, :3], batch[:, :2]):
            step(given, False)
        step(batch[:, :2], False, carried=True)
    for k in (4, 2):
        sj_tac.set_k(fast, k)
        start = time.process_time()
        step(batch, False)
        seconds.append(-(time.process_time() - start))
    captures = ", ".join(f"{s:.1f}" for s in seconds[:-2])
    return f"{name}: {len(graphs)} captures of {captures} CPU s; set_k(4) and a call {-seconds[-2]:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of measurement for each row")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 4])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {given.threads} threads; milliseconds, medians; ratios above 1: captured is faster")
    print("| net | memory format | mode | k | source | defined | captured | over defined | over source | capture, CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in given.nets:
        for last in (False, True):
            for training, k in [*((False, k) for k in given.k), (True, 2)]:
                print(row(name, last, training, k, given.seconds), flush=True)
    print("\nThe gate:", "; ".join(gate(name) for name in given.nets))
    print("Two epochs:", "; ".join(loop(name) for name in given.nets))


if __name__ == "__main__":
    main()
