"""The paper's comparison as a table of rows: one net, trained or converted in several ways, on one data set.

Each row of each seed has a folder of its own: killed at any point, the same command goes on from there.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from spikingjelly.activation_based import functional
from torch import nn
from training import LOSSES, Data, Loss, Recipe, RunError, Workers, fit, predict

import sj_tac
from sj_tac import Policy, experimental
from sj_tac.support import machine
from sj_tac.support.files import write_whole
from sj_tac.tuning.bench import SOURCE, host_configurations
from sj_tac.tuning.measure import in_turns
from sj_tac.verdicts import total_macs

# Policies of the user's, each with the k where it does not say one.
Own = Mapping[str, tuple[Policy, int]]
BASELINE = "baseline"
PAPER = ("TAC (paper)", "TAC-TP (paper)")
OURS = ("preserve", "collapse")
OTHERS = ("FTC", "IMC", "TCC")


@dataclass(frozen=True)
class Row:
    """One net of the comparison. ``how``: trained from "scratch", "converted", or converted and "fine-tuned"."""

    name: str
    policy: dict[str, Any] | Policy | None
    k: int
    how: str

    @property
    def folder(self) -> str:
        return f"{self.name} k={self.k} {self.how}".replace(" ", "-").replace("(", "").replace(")", "")


@dataclass(frozen=True)
class Task:
    """A data set and the net for it. ``first`` is the qualified name of the first convolution."""

    title: str
    make: Callable[[], nn.Module]
    train: Data
    test: Data
    first: str = "features.0"


@dataclass(frozen=True)
class Protocol:
    """How long everything is trained; ``name`` says so wherever a result is shown."""

    name: str
    recipe: Recipe
    tune_epochs: int  # 0: nothing is fine-tuned
    tune_rate: float
    ks_scratch: tuple[int, ...]
    ks_converted: tuple[int, ...]
    scratch: tuple[str, ...] = (*PAPER, *OURS)  # names of the rows that are trained from scratch
    only: tuple[str, ...] = ()  # names of rows; empty for all
    operators: tuple[str, ...] = ()  # of the paper's other operators, those that are trained from scratch, too


@dataclass
class Options:
    """What does not change a result.

    ``fused_baseline``: baselines train as ``sj_tac.convert`` runs them at k = 1. Their seconds are others; results say so.
    """

    out: Path
    workers: Workers = field(default_factory=Workers)
    save_every: float = 60.0
    tensorboard: bool = False
    console: Console = field(default_factory=Console)
    fused_baseline: bool = False


def policies(k: int, first: str) -> dict[str, dict[str, Any]]:
    """The ways of aggregation, at k. The paper's collapse makes T/k frames once, at ``first``; all layers run on those.

    Its spike count is over T/k frames, too: repeated k times, counts are logits so large that they teach little.
    """
    once = {"match": first, "mode": "collapse", "k": k, "spikes": "binary", "normalize": False, "emit": "groups"}
    return {
        "TAC (paper)": {"default": {"mode": "preserve", "k": 1}, "rules": [once]},
        "TAC-TP (paper)": {"default": {"mode": "preserve", "k": k, "normalize": False}},
        "preserve": {"default": {"mode": "preserve", "k": k}},
        "collapse": {"default": {"mode": "collapse", "k": k}},
    }


def all_rows(protocol: Protocol, first: str, own: Own | None = None) -> list[Row]:
    """The baseline; every way from scratch; every way converted; ours fine-tuned, and the baseline trained on as long.

    ``own`` are policies of the user's, which are converted and fine-tuned.
    """
    rows = [Row(BASELINE, None, 1, "scratch")]
    rows += [Row(name, None, 1, "scratch") for name in protocol.operators]
    for k in protocol.ks_scratch:
        rows += [Row(n, p, k, "scratch") for n, p in policies(k, first).items() if n in protocol.scratch]
    for k in protocol.ks_converted:
        rows += [Row(name, policy, k, "converted") for name, policy in policies(k, first).items()]
    rows += [Row(name, policy, k, "converted") for name, (policy, k) in (own or {}).items()]
    if protocol.tune_epochs:
        rows.append(Row(BASELINE, None, 1, "fine-tuned"))
        for k in protocol.ks_converted:
            rows += [Row(n, p, k, "fine-tuned") for n, p in policies(k, first).items() if n in OURS]
        rows += [Row(name, policy, k, "fine-tuned") for name, (policy, k) in (own or {}).items()]
    wanted = {BASELINE, *protocol.only, *protocol.operators, *(own or {})}
    return [row for row in rows if not protocol.only or row.name in wanted]


def _fresh(task: Task, workers: Workers) -> nn.Module:
    net = task.make()
    # On a CPU convolutions are faster this way round, SpikingJelly's as well as ours.
    return net.to(memory_format=torch.channels_last) if workers.device.type == "cpu" else net


def _net_of(row: Row, task: Task, source: nn.Module | None, seed: int, workers: Workers) -> nn.Module:
    """The row's net before it is trained: from the source's weights, or, from scratch, from the seed's."""
    if row.how == "scratch":
        torch.manual_seed(seed)
        net = _fresh(task, workers)
    else:
        net = copy.deepcopy(source)
    frames = next(task.test.load([torch.arange(1)], [0]))[0].to(next(net.parameters()).device)
    if row.name in OTHERS:
        return experimental.replace(net.eval(), row.name, frames)
    if row.policy is None:
        return net
    k = {"k": row.k} if isinstance(row.policy, Policy) else {}  # the others say it themselves
    return sj_tac.convert(net.eval(), row.policy, example_input=frames, **k)


def run_row(
    row: Row, task: Task, protocol: Protocol, seed: int, options: Options, source: nn.Module | None
) -> tuple[dict[str, Any], nn.Module]:
    """Train what the row trains, test it, and keep ``result.json``; or read what is there of the same protocol."""
    folder = options.out / f"seed{seed}" / row.folder
    recipe = replace(protocol.recipe, seed=seed)
    if row.how == "fine-tuned":
        tuned = {"epochs": protocol.tune_epochs, "rate": protocol.tune_rate, "seed": seed + 1000, "freeze_norms": True}
        recipe = replace(recipe, **tuned)
    policy = row.policy.model_dump(mode="json") if isinstance(row.policy, Policy) else row.policy
    sizes = {"train": len(task.train), "test": len(task.test)}
    asked = {"data": task.title, **sizes, "recipe": asdict(recipe), "policy": policy}
    net = _net_of(row, task, source, seed, options.workers)
    fused = options.fused_baseline and row.name == BASELINE
    asked |= {"fused": True} if fused else {}
    path = folder / "result.json"
    if path.exists():
        result = _read_result(path, asked)
        if row.policy is None:
            fit(net, task.train, recipe, folder, workers=options.workers)  # done before: loads the weights
        return result, net
    seconds = 0.0
    if row.how != "converted":
        more: dict[str, Any] = {"save_every": options.save_every, "tensorboard": options.tensorboard}
        if row.name == "IMC":
            more["loss"] = _informed(LOSSES[recipe.loss], net)
        net = sj_tac.convert(net, "preserve", 1) if fused else net
        seconds = fit(net, task.train, recipe, folder, workers=options.workers, **more).seconds
        net = sj_tac.restore(net) if fused else net
    predictions, labels = predict(net, task.test, recipe.batch, seed=seed, workers=options.workers)
    result = {"name": row.name, "k": row.k, "how": row.how, "seed": seed, "asked": asked}
    result |= {"right": int((predictions == labels).sum()), "predictions": predictions.tolist(), "seconds": seconds}
    if row.policy is not None:
        before, after = total_macs(sj_tac.report(net).verdicts)
        result |= {"macs_before": before, "macs": after}
    if options.workers.rank == 0:
        write_whole(path, lambda temporary: temporary.write_text(json.dumps(result)))
    options.workers.wait()
    return result, net


def _informed(loss: Loss, net: nn.Module) -> Loss:
    return lambda out, labels, frames: loss(out, labels, frames) + experimental.information_loss(net)


def _read_result(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
        found = result["asked"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it and run again") from None
    if found != asked:
        raise RunError(f"{path} is of another run ({found}, now {asked}); give another --out, or delete it")
    return dict(result)


def run(
    tasks: Callable[[int], Task],
    protocol: Protocol,
    seeds: list[int],
    options: Options,
    own: Own | None = None,
) -> list[dict[str, Any]]:
    """All rows of all seeds; the results, each with its agreement with the baseline's predictions."""
    results = []
    for seed in seeds:
        task = tasks(seed)
        source, truth = None, []
        for row in all_rows(protocol, task.first, own):
            result, net = run_row(row, task, protocol, seed, options, source)
            if source is None:
                source, truth = net.eval(), result["predictions"]
            same = sum(a == b for a, b in zip(result["predictions"], truth, strict=True))
            result["accuracy"] = 100 * result["right"] / len(truth)
            result["agreement"] = 100 * same / len(truth)
            results.append(result)
            if options.workers.rank == 0:
                options.console.print(
                    f"{task.title}, seed {seed}: {row.name} k={row.k}, {row.how}: {result['accuracy']:.2f} % "
                    f"({result['seconds']:.0f} s of training)"
                )
    return results


@torch.no_grad()
def times(
    task: Task, protocol: Protocol, source: nn.Module, rounds: int, device: torch.device, own: Own | None = None
) -> dict[str, float]:
    """Median milliseconds of one test batch: SpikingJelly's configurations and every policy, taken in turns."""
    count = min(len(task.test), protocol.recipe.batch)
    frames = next(task.test.load([torch.arange(count)], [0]))[0].to(device)
    nets = dict(host_configurations(source.to(device).eval()))
    for name in protocol.operators:
        nets[f"{name} k=1"] = experimental.replace(source, name, frames[:, :1])
    for k in protocol.ks_converted:
        for name, policy in policies(k, task.first).items():
            nets[f"{name} k={k}"] = sj_tac.convert(source, policy, example_input=frames[:, :1])
    for name, (mine, k) in (own or {}).items():
        nets[f"{name} k={k}"] = sj_tac.convert(source, mine, k, example_input=frames[:, :1])

    def once(net: nn.Module) -> None:
        functional.reset_net(net)
        net(frames)
        if device.type == "cuda":
            torch.cuda.synchronize()

    runs = {name: lambda net=net: once(net) for name, net in nets.items()}
    in_turns(runs, 1)
    return {name: 1e3 * statistics.median(taken) for name, taken in in_turns(runs, rounds).items()}


def summary(results: list[dict[str, Any]], milliseconds: dict[str, float]) -> list[dict[str, Any]]:
    """One entry per row: mean and spread of accuracy over seeds, difference to the baseline of the same seed, speed."""
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault((result["name"], result["k"], result["how"]), []).append(result)
    base = {r["seed"]: r["accuracy"] for r in found[BASELINE, 1, "scratch"]}
    host = [value for name, value in milliseconds.items() if name.startswith(SOURCE)]
    entries = []
    for (name, k, how), group in found.items():
        accuracies = [r["accuracy"] for r in group]
        ms = min(host, default=None) if name == BASELINE else milliseconds.get(f"{name} k={k}")
        entries.append(
            {
                "name": name, "k": k, "how": how, "seeds": len(group),
                "accuracy": statistics.mean(accuracies),
                "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "to_baseline": statistics.mean(r["accuracy"] - base[r["seed"]] for r in group),
                "agreement": statistics.mean(r["agreement"] for r in group),
                "macs": group[0].get("macs"), "macs_before": group[0].get("macs_before"),
                "train_seconds": statistics.mean(r["seconds"] for r in group),
                "ms": ms, "speed_up": min(host) / ms if host and ms else None,
            }
        )  # fmt: skip
    return entries


def table(title: str, entries: list[dict[str, Any]]) -> Table:
    """The entries for people."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("net")
    for column in ("k", "accuracy %", "to baseline", "agreement %", "conv MACs", "training s", "ms/batch", "speed-up"):
        shown.add_column(column, justify="right")
    for e in entries:
        macs = f"/ {e['macs_before'] / e['macs']:.1f}" if e["macs"] else "1"
        spread = f" ± {e['spread']:.2f}" if e["spread"] is not None else ""
        shown.add_row(
            f"{e['name']}, {e['how']}", str(e["k"]), f"{e['accuracy']:.2f}{spread}", f"{e['to_baseline']:+.2f}",
            f"{e['agreement']:.1f}", macs, f"{e['train_seconds']:.0f}", f"{e['ms']:.0f}" if e["ms"] else "",
            f"{e['speed_up']:.1f}x" if e["speed_up"] else "",
        )  # fmt: skip
    return shown


def finish(
    key: str,
    task: Task,
    protocol: Protocol,
    results: list[dict[str, Any]],
    options: Options,
    rounds: int,
    own: Own | None = None,
) -> dict[str, Any]:
    """Measure times with the first seed's baseline, print the table, write ``results.json`` and ``results.png``."""
    recipe = replace(protocol.recipe, seed=results[0]["seed"])
    source = _fresh(task, options.workers)
    fit(source, task.train, recipe, options.out / f"seed{results[0]['seed']}" / Row(BASELINE, None, 1, "scratch").folder)
    milliseconds = times(task, protocol, source, rounds, options.workers.device, own)
    content = {
        "key": key, "title": task.title, "protocol": asdict(protocol), "machine": machine.describe(),
        "fused_baseline": options.fused_baseline,
        "train": len(task.train), "test": len(task.test), "seeds": sorted({r["seed"] for r in results}),
        "milliseconds": milliseconds, "rounds": rounds, "rows": summary(results, milliseconds),
    }  # fmt: skip
    write_whole(options.out / "results.json", lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
    options.console.print(table(f"{task.title} ({protocol.name})", content["rows"]))
    import plots

    if plots.draw(content, options.out / "results.png"):
        options.console.print(f"Written: {options.out / 'results.json'}, results.png")
    else:
        options.console.print(f"Written: {options.out / 'results.json'}; no plot without matplotlib")
    return content
