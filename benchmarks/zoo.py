"""Every net of SpikingJelly's model zoo: what converts, what is refused and why, whether it is right, and how fast it is.

    python -m benchmarks.zoo [--net NAME ...] [--out docs/zoo.md]

Random weights, small inputs, thresholds moved until every neuron fires; failures are named in the page, not hidden.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.functional import conv_bn_fusion
from torch import Tensor, nn

import sj_tac
from benchmarks import zoo_nets
from benchmarks.measure import RESULTS
from benchmarks.nets import wake
from sj_tac.definition.neurons import OperatorNeuron
from sj_tac.support import machine

PAGE = Path(__file__).resolve().parents[1] / "docs" / "zoo.md"
# Of the verdicts; and what is timed.
K = 2
TIMED = ("preserve", 1), ("preserve", 2), ("preserve", 4), ("collapse", 2)


@dataclass
class Row:
    """What was found about one net.

    Speed-ups are over the faster of SpikingJelly eager and with BN folded, by policy and k; ``of_eager``: the least of them
    over SpikingJelly eager, the source itself.
    """

    name: str
    family: str
    shape: list[int]
    convs: int = 0
    converted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    collapse: int = 0
    collapse_refused: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    k1_unfused: str = ""
    flips: int = 0
    spikes: int = 0
    host_ms: float = 0.0
    faster: dict[str, float] = field(default_factory=dict)
    of_eager: float = 0.0
    failures: list[str] = field(default_factory=list)


def attempt(row: Row, what: str, action: Callable[[], Any]) -> Any:
    """The result, or None with the failure written down."""
    try:
        return action()
    except Exception as error:
        row.failures.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None


def count_flips(source: nn.Module, fast: nn.Module, x: Tensor) -> tuple[int, int]:
    """Spikes of a captured net at k=1 that differ from the host's own on the very same drives, and spikes in all."""
    seen: list[tuple[str, Tensor, Tensor]] = []
    for name, module in fast.named_modules():
        if isinstance(module, OperatorNeuron):
            module.register_forward_hook(lambda _, args, out, name=name: seen.append((name, args[0], out)))  # type: ignore[misc]
    functional.reset_net(fast)
    fast(x)
    flips = total = 0
    nodes = {name: copy.deepcopy(source.get_submodule(name)) for name, *_ in seen}
    for node in nodes.values():
        functional.reset_net(node)
    for name, drives, spikes in seen:
        flips, total = flips + int((spikes != nodes[name](drives + 0)).sum()), total + spikes.numel()
    return flips, total


def flat(output: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]


def check_k1(row: Row, net: nn.Module, x: Tensor) -> None:
    """k=1: unfused the source's bits, fused the host's spikes on the same drives."""
    unfused = attempt(row, "k=1", lambda: sj_tac.convert(net, "preserve", 1, example_input=x, fuse=False))
    if unfused is None:
        return
    functional.reset_net(net)
    pairs = zip(flat(net(x)), flat(unfused(x)), strict=True)
    row.k1_unfused = "equal" if all(torch.equal(a, b) for a, b in pairs) else "DIFFERENT"
    fused = attempt(row, "k=1 fused", lambda: sj_tac.convert(net, "preserve", 1, example_input=x))
    if fused is not None:
        row.flips, row.spikes = count_flips(net, fused, x)


def timed(runs: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, float]:
    """Median milliseconds, interleaved, one round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, net in runs.items():
            functional.reset_net(net)
            start = time.perf_counter()
            net(x)
            if i:
                seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


@torch.no_grad()
def examine(name: str, rounds: int) -> Row:
    """Everything about one net."""
    case = zoo_nets.CASES[name]
    row = Row(name, case.family, list(case.shape))
    torch.manual_seed(0)
    net = case.build().eval()
    if case.multi_step:
        functional.set_step_mode(net, "m")
    x = torch.rand(case.shape)
    if case.multi_step:
        attempt(row, "waking its neurons", lambda: wake(net, x))
    plan = attempt(row, "plan", lambda: sj_tac.plan(net, "preserve", K, example_input=x))
    if plan is None:
        return row
    row.convs, row.converted = len(plan.verdicts), len(plan.converted)
    row.refused = dict(Counter(str(v.reason) for v in plan.refused))
    row.reasons = {str(v.reason): f"{v.layer}: {v.detail}" for v in reversed(plan.refused)}
    if not plan.converted:
        return row
    check_k1(row, net, x)
    nets = {"SpikingJelly": net}
    folded = attempt(row, "SpikingJelly's own BN folding", lambda: conv_bn_fusion.fuse_conv_bn_eval_modules(net))
    nets |= {"folded": folded} if folded is not None else {}
    for policy, k in TIMED:
        fast = attempt(row, f"{policy} k={k}", lambda p=policy, k=k: sj_tac.convert(net, p, k, example_input=x))
        if fast is None:
            continue
        nets[f"{policy} k={k}"] = fast
        if k != K:
            continue
        report = sj_tac.report(fast)
        if policy == "preserve":
            row.converted = len(report.converted)
        else:
            row.collapse = len(report.converted)
            row.collapse_refused = dict(Counter(str(v.reason) for v in report.refused))
            row.reasons |= {str(v.reason): f"{v.layer}: {v.detail}" for v in report.refused if v.reason not in row.reasons}
    ms = timed(nets, x, rounds)
    row.host_ms = min(ms["SpikingJelly"], ms.get("folded", ms["SpikingJelly"]))
    row.faster = {f"{p} k={k}": row.host_ms / ms[f"{p} k={k}"] for p, k in TIMED if f"{p} k={k}" in ms}
    row.of_eager = min((ms["SpikingJelly"] / ms[label] for label in row.faster), default=0.0)
    return row


def codes(counts: dict[str, int]) -> str:
    return ", ".join(f"{code} x {n}" for code, n in counts.items())


COLUMNS = (
    *("net", "input", "convs", "converted", "refused", "collapse", "refused there", "unfused", "host ms"),
    *(f"{policy} k={k}" for policy, k in TIMED),
    "least, of eager",
)


def cells(r: Row) -> list[str]:
    """One line of a family's table."""
    values = [*(r.faster.get(f"{policy} k={k}", 0.0) for policy, k in TIMED), r.of_eager]
    faster = [f"{value:.2f}x" if value else "-" for value in values]
    counts = [str(r.convs), str(r.converted), codes(r.refused) or "-"]
    collapse = [str(r.collapse), codes(r.collapse_refused) or "-"]
    ms = f"{r.host_ms:.1f}" if r.host_ms else "-"
    return [f"`{r.name}`", "x".join(map(str, r.shape)), *counts, *collapse, r.k1_unfused or "-", ms, *faster]


def _least(rows: list[Row]) -> str:
    """How much faster than its source the net is that gains least, at the k where it does."""
    kinds = ", ".join(f"{policy} k={k}" for policy, k in TIMED)
    timed = [r for r in rows if r.of_eager]
    if not timed:
        return "Nothing was timed."
    last = min(timed, key=lambda r: r.of_eager)
    slower = [r.name for r in timed if r.of_eager < 1]
    found = f"Slower than SpikingJelly eager: {', '.join(slower)}" if slower else "No net is slower than SpikingJelly eager"
    return f"{kinds}: {found}. `{last.name}` gains least, {last.of_eager:.2f}x."


def page(rows: list[Row], where: dict[str, Any]) -> str:
    """docs/zoo.md."""
    checked = [r for r in rows if r.k1_unfused]
    equal = sum(r.k1_unfused == "equal" for r in checked)
    flips, spikes = sum(r.flips for r in rows), sum(r.spikes for r in rows)
    lines = [
        "# SpikingJelly's model zoo",
        "",
        f"Written by `python -m benchmarks.zoo` on {where['date']}: {where['cpu']}, {where['threads']} threads, torch "
        f"{where['torch']}, SpikingJelly {where['spikingjelly']}, Python {where['python']}. Random weights, thresholds "
        "moved until every neuron fires at 5 to 50 %.",
        "",
        f"- **{len(rows)} nets, {sum(r.convs for r in rows)} convolutions, each with one verdict; {len(checked)} nets "
        "convert.**",
        f"- k=1, unfused: the source's output bit for bit in {equal} of {len(checked)}. Fused: {flips} of {spikes:,} spikes "
        f"differ from SpikingJelly's own on the same drives ({flips / max(1, spikes):.1e}; folding BatchNorm changes last "
        "bits).",
        f"- {_least(rows)}",
        f"- k={K}, both policies: `convert` ran each net on its input and found the source's output shape, and finite "
        "numbers.",
        "- *unfused*: whether its output is the source's at k=1. Speed-ups are over the faster of SpikingJelly eager and "
        "SpikingJelly with BatchNorm folded, interleaved medians; *least, of eager*: the smallest one over SpikingJelly "
        "eager, the source as it is. "
        "torch.compile of all of these "
        "would take hours, see benchmarks/results for the nets that were measured against it. The inputs are small, where "
        "reading the weights costs as much as computing with them.",
        "",
    ]
    for family in dict.fromkeys(r.family for r in rows):
        lines += [f"## {family}", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines += [f"| {' | '.join(cells(r))} |" for r in rows if r.family == family]
        lines.append("")
    lines += ["## Why", "", "The first layer of each net that was refused with a code, and what was found there.", ""]
    for r in rows:
        lines += [f"- `{r.name}`, {code}: {text}" for code, text in r.reasons.items()]
    failed = [f"- `{r.name}`: {text}" for r in rows for text in r.failures]
    lines += ["", "## What failed", "", *(failed or ["Nothing."]), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=list(zoo_nets.CASES), action="append", help="only these (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--out", type=Path, help="the page (default: docs/zoo.md when all nets are examined, else nowhere)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="spikingjelly")
    rows = []
    for name in track(options.net or list(zoo_nets.CASES), description="zoo", transient=True):
        rows.append(examine(name, options.rounds))
        gc.collect()
    where = machine.describe()
    text = page(rows, where)
    print(text)
    if options.out or not options.net:
        (options.out or PAGE).write_text(text)
        result = {"machine": where, "rounds": options.rounds, "rows": [asdict(r) for r in rows]}
        (RESULTS / f"zoo-{where['date']}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
