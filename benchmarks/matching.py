"""What match, recalibrate and fine-tuning bring back: python -m benchmarks.matching --cache FOLDER [--nmnist FILE]

Every net is trained here, with three seeds, and kept in FOLDER. Of each conversion: agreement with the source and accuracy
on samples that were neither trained on nor fitted, as it is ("plain"), recalibrated, and matched, with three draws of 32
unlabeled calibration samples; on clean data, with half the events, and with noise, where both corrections see such data.
One draw is distilled, too; and fine-tuned for an epoch with labels and BatchNorm frozen, from the plain net and from the
matched one. "source, 1 % fewer events" is the source on other frames: how far its own answers are from certain.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import training
from datasets import Frames

import sj_tac
from benchmarks import measure
from benchmarks.matching_nets import SHIFTS, TASKS, Task, split
from sj_tac.support import machine
from sj_tac.support.files import write_text
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.measure import accuracy, scores

# By the weights of the frames of a group.
POLICIES = {
    "decay": {f"{mode} {k}": (mode, k) for mode, k in (("preserve", 2), ("preserve", 4), ("preserve", 8), ("collapse", 4))},
    "mixed": {f"preserve {k}, mixed": ("preserve", k) for k in (2, 4, 8)},
}
SAMPLES, DRAWS, BATCH, STEPS = 32, 3, 100, 60
# What is fine-tuned, which needs labels: at these policies, on clean data.
TUNED, TUNING_RATE = ("preserve 4", "preserve 8"), 3e-4


@dataclass(frozen=True)
class Trained:
    """A trained net, and what it is judged by."""

    net: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def trained(name: str, task: Task, seed: int, options: Namespace) -> Trained:
    """The net of a seed, from the cache where it is there. Fused, at k = 1, it trains faster and to the same end."""
    train, test = split(task.data, options.nmnist, options.cache, options.quick)
    torch.manual_seed(seed)
    net = task.build()
    recipe = training.Recipe(1 if options.quick else task.epochs, 32, task.rate, "rate", seed)
    fast = sj_tac.convert(net, "preserve", 1)
    training.fit(fast, Frames(*train, 2), recipe, options.cache / f"{name}-{seed}")
    return Trained(sj_tac.restore(fast).eval(), train, test)


def fewer(frames: Tensor, seed: int) -> Tensor:
    """Without one event in a hundred."""
    return torch.binomial(frames, torch.full_like(frames, 0.99), generator=torch.Generator().manual_seed(300 + seed))


def batches(frames: Tensor) -> list[Batch]:
    return [Batch(part) for part in frames.split(BATCH, 1)]


@dataclass(frozen=True)
class Judge:
    """Measures nets on one kind of samples, beside their source."""

    source: nn.Module
    frames: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "expected", scores(self.source, batches(self.frames)).argmax(1))

    def __call__(self, net: nn.Module) -> dict[str, float]:
        return self._figures(scores(net, batches(self.frames)).argmax(1))

    def of(self, frames: Tensor) -> dict[str, float]:
        """The source itself, on other frames of the same samples."""
        return self._figures(scores(self.source, batches(frames)).argmax(1))

    def _figures(self, got: Tensor) -> dict[str, float]:
        expected = self.expected  # type: ignore[attr-defined]
        named = {"agreement": (got, expected), "accuracy": (got, self.labels), "source": (expected, self.labels)}
        return {name: accuracy(*pair) for name, pair in named.items()}


def rows(name: str, seed: int, weights: str, options: Namespace) -> Iterator[dict[str, Any]]:
    """Figures of every policy of these weights, shift, draw and method."""
    task, policies = TASKS[name], POLICIES[weights]
    found = trained(name, task, seed, options)
    for shift, change in SHIFTS.items():
        judge = Judge(found.net, change(found.test[0], 100 + seed), found.test[1])
        for policy, (mode, k) in policies.items():
            where = {"task": name, "seed": seed, "shift": shift, "policy": policy}
            if policy == "preserve 2":
                yield where | {"policy": "k=1", "method": "source, 1 % fewer events"} | judge.of(fewer(judge.frames, seed))
            plain = sj_tac.convert(found.net, {"default": {"mode": mode, "k": k, "weights": weights}})
            yield where | {"method": "plain"} | judge(plain)
            matched = plain
            for draw in range(DRAWS):
                generator = torch.Generator().manual_seed(1000 * seed + draw)
                chosen = torch.randperm(found.train[0].shape[1], generator=generator)[:SAMPLES]
                calibration = change(found.train[0][:, chosen], 200 + draw)
                for made, net in corrected(plain, calibration, options.methods, steps=0 if draw else STEPS):
                    yield where | {"draw": draw} | made | judge(net)
                    matched = net if made["method"] == "match" and not draw else matched
            if shift == "clean" and policy in TUNED:
                recipe = training.Recipe(1, 32, TUNING_RATE, "rate", seed, freeze_norms=True)
                for start, net in (("plain", plain), ("matched", matched)):
                    tuned = copy.deepcopy(net)
                    history = training.fit(tuned, Frames(*found.train, 2), recipe)
                    yield where | {"method": f"fine-tuned, from {start}", "seconds": history.seconds} | judge(tuned)


def corrected(
    plain: nn.Module, calibration: Tensor, methods: list[str], steps: int
) -> Iterator[tuple[dict[str, Any], nn.Module]]:
    """A converted net under every correction, and what was done; ``steps``: of distilling, 0 for none."""
    net = copy.deepcopy(plain)
    sj_tac.recalibrate(net, calibration)
    yield {"method": "recalibrate"}, net
    asked = [(method, 0) for method in methods] + ([("auto", steps)] if steps else [])
    for method, count in asked:
        net = copy.deepcopy(plain)
        matched = sj_tac.match(net, calibration, method=method, steps=count, progress=False)
        assert matched is not None
        name = f"match, {count} steps" if count else "match" if method == "auto" else method
        yield {"method": name, "kept": matched.method, "seconds": matched.seconds}, net


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds and draws."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["task"], row["shift"], row["policy"], row["method"]), []).append(row)
    made = []
    for (task, shift, policy, method), same in groups.items():
        entry: dict[str, Any] = {"task": task, "shift": shift, "policy": policy, "method": method, "runs": len(same)}
        for figure in ("agreement", "accuracy", "source"):
            values = [100 * row[figure] for row in same]
            entry[figure] = [statistics.mean(values), statistics.pstdev(values)]
        kept = [row["kept"] for row in same if "kept" in row]
        entry["kept"] = {method: kept.count(method) for method in sorted(set(kept))}
        made.append(entry)
    return made


def main() -> None:
    made = measure.parser(__doc__ or "")
    made.add_argument("--cache", type=Path, required=True, help="folder of trained nets and generated data")
    made.add_argument("--nmnist", type=Path, help="an archive of N-MNIST recordings (default: the shipped 100)")
    made.add_argument("--task", action="append", choices=list(TASKS), help="only these (default: all)")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--methods", nargs="+", default=["auto"], help="of match (default: auto)")
    made.add_argument("--weights", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="default: all")
    made.add_argument("--quick", action="store_true", help="few samples, one epoch: a trial of the script")
    options = measure.parsed(made)
    options.cache.mkdir(parents=True, exist_ok=True)
    out = options.out or measure.RESULTS / f"matching-cpu-{date.today().isoformat()}.json"
    console, found = Console(width=125), []
    for name in options.task or TASKS:
        for seed in options.seeds:
            for weights in options.weights:
                words = ["matching", name, str(seed), *options.methods]
                words += ([weights] if weights != "decay" else []) + (["quick"] if options.quick else [])
                kept = options.cache / f"{'-'.join(words)}.json"
                if not kept.exists():
                    write_text(kept, json.dumps(list(rows(name, seed, weights, options))))
                found += json.loads(kept.read_text())
        for entry in summary(found):
            if entry["task"] == name:
                agreement, accurate, source = (entry[key] for key in ("agreement", "accuracy", "source"))
                console.print(
                    f"{name} {entry['shift']:6} {entry['policy']:11} {entry['method']:12} agreement {agreement[0]:5.1f} "
                    f"+-{agreement[1]:4.1f} accuracy {accurate[0]:5.1f} of {source[0]:5.1f} {entry['kept']}"
                )
    content = {"kind": "matching", "machine": machine.describe(), "summary": summary(found), "rows": found}
    write_text(out, json.dumps(content) + "\n")
    console.print(f"Written: {out}")


if __name__ == "__main__":
    main()
