"""A converted net as it runs, under torch.compile, and as an ONNX graph in onnxruntime.

    python -m benchmarks.compiled
    python -m benchmarks.compiled --free
    python -m benchmarks.compiled --k 1 2 4 --out compiled.json

The DVS net of arXiv 2603.13810 with fewer channels, so that compiling takes a minute. One thread for all of them. Then one
net compiled for any T and N, beside itself uncompiled, at several of both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from argparse import Namespace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn
from torch._dynamo.utils import counters

import sj_tac
from benchmarks.measure import RESULTS, interleaved, parsed, parser
from examples.nets import GestureNet
from sj_tac.support import machine

STEPS, BATCH, CHANNELS, BLOCKS, SIZE = 8, 16, 16, 2, 32
# T and N of the calls of the net that is compiled for any; the first one compiles.
FREE = ((8, 16), (5, 16), (12, 16), (16, 8), (9, 24), (7, 18))


def called(net: nn.Module, of: nn.Module, x: Tensor) -> Any:
    def run() -> Tensor:
        functional.reset_net(of)
        out: Tensor = net(x)
        return out

    return run


def in_onnxruntime(path: Path, x: Tensor) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: x.numpy()}
    return lambda: torch.from_numpy(session.run(None, given)[0])


def firing_rates(net: nn.Module, x: Tensor) -> list[float]:
    """Spikes per neuron and step of every neuron. Raises ValueError where one of them is not between 2 % and 50 %."""
    rates: list[float] = []
    handles = [
        m.register_forward_hook(lambda module, args, spikes: rates.append(round(float(spikes.mean()), 3)))
        for m in net.modules()
        if isinstance(m, neuron.BaseNode)
    ]
    with torch.no_grad():
        functional.reset_net(net)
        net(x)
    for handle in handles:
        handle.remove()
    if not all(0.02 <= rate <= 0.5 for rate in rates):
        raise ValueError(f"firing rates are {rates}; a net that hardly fires proves nothing")
    return rates


def firing_net(x: Tensor) -> nn.Module:
    """The net with the statistics of ``x`` in its norms, and biases with which every layer fires."""
    net = GestureNet(channels=CHANNELS, blocks=BLOCKS, size=SIZE)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 1.0, 2.0)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            module.momentum = 1.0
        elif isinstance(module, nn.Linear):
            nn.init.uniform_(module.weight, -0.1, 0.1)
    with torch.no_grad():
        net.train()(x)
    functional.reset_net(net)
    return net.eval()


def free_rows(ks: list[int], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds at several T and N of one net that was compiled for any; of the Linear layer's neurons, too."""
    torch.manual_seed(0)
    source = firing_net((torch.rand(STEPS, BATCH, 2, SIZE, SIZE) < 0.3).float())
    found = []
    for k in ks:
        # With its Linear layer: a neuron of SpikingJelly's own loops over T.
        policy = {"version": 1, "layers": ["conv", "linear"], "default": {"mode": "preserve", "k": k}}
        fast = sj_tac.convert(source, policy)
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(fast, fullgraph=True, dynamic=True)
        for steps, batch in FREE:
            x = (torch.rand(steps, batch, 2, SIZE, SIZE) < 0.3).float()
            firing_rates(source, x)
            runs = {"uncompiled": called(fast, fast, x), "compiled": called(compiled, fast, x)}
            with torch.no_grad():
                begin = time.perf_counter()
                out = runs["compiled"]()
                first = time.perf_counter() - begin
                differs = float((out != runs["uncompiled"]()).float().mean())
                taken = interleaved(runs, rounds, "compiled for any T")
            ms = {name: round(1000 * statistics.median(seconds), 3) for name, seconds in taken.items()}
            graphs = counters["stats"]["unique_graphs"]
            found.append(
                {"k": k, "T": steps, "N": batch, **ms, "first_s": round(first, 1), "graphs": graphs, "differs": differs}
            )
    return found


def rows(ks: list[int], rounds: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Milliseconds of every way, with the seconds that it takes to get ready and what it differs by; the firing rates."""
    torch.manual_seed(0)
    x = (torch.rand(STEPS, BATCH, 2, SIZE, SIZE) < 0.3).float()
    source = firing_net(x)
    rates = firing_rates(source, x)
    runs, ready = {"SpikingJelly": called(source, source, x)}, {"SpikingJelly": 0.0}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for k in ks:
            fast = sj_tac.convert(source, "preserve", k)
            runs[f"sj_tac k={k}"], ready[f"sj_tac k={k}"] = called(fast, fast, x), 0.0
            begin = time.perf_counter()
            compiled = torch.compile(fast)
            called(compiled, fast, x)()
            name = f"sj_tac k={k}, torch.compile"
            runs[name], ready[name] = called(compiled, fast, x), time.perf_counter() - begin
            begin = time.perf_counter()
            written = sj_tac.convert(source, "preserve", k)
            sj_tac.export_onnx(written, x, Path(folder) / f"{k}.onnx")
            name = f"sj_tac k={k}, onnxruntime"
            runs[name], ready[name] = in_onnxruntime(Path(folder) / f"{k}.onnx", x), time.perf_counter() - begin
        outputs = {name: run() for name, run in runs.items()}
        seconds = interleaved(runs, rounds, "compiled")
    milliseconds = {name: 1000 * statistics.median(taken) for name, taken in seconds.items()}
    return [
        {
            "name": name,
            "ms": round(ms, 3),
            "to_eager": round(milliseconds[name.split(",")[0]] / ms, 2),
            "ready_s": round(ready[name], 1),
            "differs": float((outputs[name] != outputs[name.split(",")[0]]).float().mean()),
        }
        for name, ms in milliseconds.items()
    ], rates


def _free(options: Namespace) -> None:
    rows = free_rows(options.k, options.rounds)
    out = options.out or RESULTS / f"compiled-free-cpu-{date.today().isoformat()}.json"
    content = {
        "machine": machine.describe(),
        "rounds": options.rounds,
        "net": f"GestureNet, {BLOCKS} blocks of {CHANNELS} channels, its Linear layer converted as well",
        "free": rows,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    table = Table(title="compiled for any T and N")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=100).print(table)
    print(f"Written: {out}")


def main() -> None:
    """Measure, show and save."""
    made = parser(__doc__ or "")
    made.add_argument("--k", type=int, nargs="+", default=[1, 4], help="frames per convolution (default 1 4)")
    made.add_argument("--free", action="store_true", help="instead: the net compiled once for any T and N")
    options = parsed(made)
    torch.set_num_threads(1)
    if options.free:
        _free(options)
        return
    found, rates = rows(options.k, options.rounds)
    table = Table(title=f"input {[STEPS, BATCH, 2, SIZE, SIZE]}, firing rates {rates}")
    for column in ("", "ms", "to eager", "ready after, s", "outputs that differ"):
        table.add_column(column, justify="right" if column else "left")
    for row in found:
        table.add_row(
            row["name"], f"{row['ms']:.2f}", f"{row['to_eager']:.2f}x", f"{row['ready_s']:.0f}", f"{row['differs']:g}"
        )
    Console(width=100).print(table)
    out = options.out or RESULTS / f"compiled-cpu-{date.today().isoformat()}.json"
    content = {
        "machine": machine.describe() | {"onnxruntime": version("onnxruntime")},
        "rounds": options.rounds,
        "net": f"GestureNet, {BLOCKS} blocks of {CHANNELS} channels",
        "input": [STEPS, BATCH, 2, SIZE, SIZE],
        "rates": rates,
        "rows": found,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Written: {out}")


if __name__ == "__main__":
    main()
