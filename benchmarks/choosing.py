"""What search finds beside the same k in every layer, and what recalibrate does: python -m benchmarks.choosing

The quickstart's two nets, and with --gestures the gesture net (the checkpoint that dvs_gesture.py --synthetic --quick
leaves, .../baseline-k=1-scratch/last.pt). A policy is chosen on calibration samples; the table's accuracies are of others.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from argparse import Namespace
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import datasets
import gestures
import nets
import quickstart
from rich.console import Console

import sj_tac
from benchmarks import measure
from sj_tac.support import machine
from sj_tac.tuning.batches import collect
from sj_tac.tuning.bench import bench
from sj_tac.tuning.measure import accuracy, labels_of, scores

DROPS = (0.01, 0.02, 0.03)
Pair = tuple[Tensor, Tensor]


@dataclass
class Task:
    """A net with samples to choose by and samples to judge by, each as frames [T, N, ...] and labels [N]."""

    name: str
    net: nn.Module
    calibration: Pair
    test: Pair
    batch: int
    about: str

    def batches(self, pair: Pair) -> list[Pair]:
        return list(zip(pair[0].split(self.batch, 1), pair[1].split(self.batch), strict=True))


def digits() -> Task:
    images, labels = datasets.shipped_digits()
    first, second = (
        datasets.rate_code(part, nets.DIGITS_T, torch.Generator().manual_seed(seed))
        for part, seed in ((images[:500], 2), (images[500:], 3))
    )
    net = quickstart.load(nets.DigitNet(), "digits")
    about = "calibrated on 500 of the shipped digits, judged by the other 500"
    return Task("DigitNet", net, (first, labels[:500]), (second, labels[500:]), 100, about)


def events(archive: Path | None) -> Task:
    net = quickstart.load(nets.EventNet(), "events")
    frames, labels = datasets.shipped_events(nets.EVENTS_T)
    if archive is None:
        about = "calibrated on 50 of the shipped recordings, judged by the other 50"
        return Task("EventNet", net, (frames[:, :50], labels[:50]), (frames[:, 50:], labels[50:]), 50, about)
    found = datasets.read_recordings(archive)
    chosen = (~found["is_test"].astype(bool)).nonzero()[0][:300]
    keep = torch.zeros(len(found["label"]), dtype=torch.bool)
    keep[torch.from_numpy(chosen)] = True
    known = datasets.event_frames(datasets.pack_recordings(found, keep.numpy()), nets.EVENTS_T)
    about = "calibrated on 300 training recordings, judged by the 100 shipped test recordings"
    return Task("EventNet", net, known, (frames, labels), 50, about)


def gesture(checkpoint: Path) -> Task:
    weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["net"]
    net = nets.GestureNet(11, len(weights["features.0.weight"]), 4, 32).eval().to(memory_format=torch.channels_last)
    net.load_state_dict(weights)
    pairs = [gestures.generate(count, 16, 32, seed) for count, seed in ((1100, 3), (1100, 2))]
    calibration, test = ((frames.float(), labels) for frames, labels in pairs)
    about = "calibrated on 1,100 generated gestures, judged by 1,100 others, none of them seen in training"
    return Task("GestureNet", net, calibration, test, 20, about)


def searched(task: Task, out: Path, logs: Path, match: bool) -> dict[float, sj_tac.Policy]:
    """A policy for every budget; what was tried for one is not tried again for the next."""
    batches = task.batches(task.calibration)
    kind = "" if match else "-unmatched"
    shown, log = (out.with_name(f"{out.stem}-{task.name.lower()}{kind}.json"), logs / f"{task.name}{kind}.jsonl")
    # The picture and the list of what was tried are those of the middle budget.
    return {
        drop: sj_tac.search(task.net, batches, max_drop=drop, log=log, out=shown if drop == DROPS[1] else None, match=match)
        for drop in DROPS
    }


def beside_unmatched(task: Task, found: dict[str, dict[float, sj_tac.Policy]], rounds: int) -> list[dict[str, Any]]:
    """What was found among matched candidates and among others, timed in turns, on samples that chose nothing."""
    every = {f"{kind} {drop:g}": (policy, 2) for kind, policies in found.items() for drop, policy in policies.items()}
    test = task.batches(task.test)
    tables = {
        kind: bench(task.net, test, every, title=f"{task.name}, {kind}", rounds=rounds, match=batches)
        for kind, batches in (("matched", task.batches(task.calibration)), ("unmatched", None))
    }
    made = []
    for drop in DROPS:
        entry: dict[str, Any] = {"drop": drop, "source": tables["matched"].rows[0].accuracy}
        for kind, table in tables.items():
            name = f"{kind} {drop:g}"
            # Matching changes no time: those of one table are of one run.
            timed = tables["matched"][name]
            entry[kind] = {"accuracy": table[name].accuracy, "ms": timed.ms, "speedup": timed.speedup}
            entry[kind]["policy"] = found[kind][drop].evidence.chosen
        made.append(entry)
    return made


def compared(task: Task, found: dict[float, sj_tac.Policy], rounds: int) -> dict[str, Any]:
    """The searched policies and every uniform one, on samples that chose nothing; the best uniform one, too."""
    evidence = found[DROPS[-1]].evidence
    uniform = {t.name: t for t in evidence.trials if t.uniform and not t.refused}
    rows: dict[str, tuple[Any, int]] = {}
    for name, trial in uniform.items():
        mode, k = next(iter(trial.choices.values())).split()
        rows[name] = ({"default": {"mode": mode, "k": int(k)}}, 2)
    names = {drop: f"searched, max_drop {drop:g}" for drop in found}
    rows |= {names[drop]: (policy, 2) for drop, policy in found.items()}
    table = bench(
        task.net,
        task.batches(task.test),
        rows,
        title=f"{task.name}: {task.about}",
        rounds=rounds,
        match=task.batches(task.calibration),
    )
    shown = [asdict(row) | {"calibration": uniform[row.name].metric if row.name in uniform else None} for row in table.rows]
    best = []
    for drop, policy in found.items():
        trial = policy.evidence[policy.evidence.chosen]
        entry = next(row for row in shown if row["name"] == names[drop])
        entry |= {"calibration": trial.metric, "choices": trial.choices}
        best.append(_beside(drop, trial.metric, policy.evidence.source_metric, entry, shown))
    diagnosis = sj_tac.diagnose(task.batches(task.calibration), task.net)
    return {
        "about": task.about, "timed": table.timed, "samples": table.samples, "source": evidence.source_metric, "rows": shown,
        "best": best, "verdict": diagnosis.verdict, "p_value": diagnosis.p_value, "effect": diagnosis.effect,
        "seconds": {f"{drop:g}": policy.evidence.seconds for drop, policy in found.items()},
        "tried": {f"{drop:g}": len(policy.evidence.trials) for drop, policy in found.items()},
    }  # fmt: skip


def _beside(drop: float, metric: float, source: float, entry: dict[str, Any], shown: list[dict[str, Any]]) -> dict[str, Any]:
    """The searched policy against the fastest uniform one in the budget, and the fastest that is at least as accurate."""

    def fastest(floor: float) -> dict[str, Any]:
        uniform = [r for r in shown if not r["host"] and not r["name"].startswith("searched")]
        fitting = [r for r in uniform if r["calibration"] >= floor - 1e-9]
        return max(fitting, key=lambda r: r["speedup"])

    kept = ("name", "calibration", "accuracy", "speedup", "ms")
    pairs = {"budget": fastest(source - drop), "accuracy": fastest(metric)}
    return {"drop": drop, "searched": {k: entry[k] for k in kept}} | {
        by: {k: row[k] for k in kept} | {"ratio": row["ms"] / entry["ms"]} for by, row in pairs.items()
    }


def recalibrated(task: Task) -> list[dict[str, Any]]:
    """Accuracy on the test samples with the source's BatchNorm statistics, and with re-estimated ones."""
    test, first = (
        collect(task.batches(task.test), task.net),
        next(n for n, m in task.net.named_modules() if hasattr(m, "kernel_size")),
    )
    truth, rows = labels_of(test, "accuracy"), []
    for mode, spikes in (("collapse", "binary"), ("collapse", "count"), ("preserve", "count")):
        for k in (4, 8):
            # The binary collapse throws rates away, so it stands in the first layer alone, as in the paper.
            policy: dict[str, Any] = {"default": {"mode": mode, "k": k}}
            if spikes == "binary":
                rule = {"match": first, "mode": mode, "k": k, "spikes": spikes}
                policy = {"default": {"mode": "preserve", "k": 1}, "rules": [rule]}
            net = sj_tac.convert(task.net, policy)
            before = accuracy(scores(net, test).argmax(1), truth)
            sj_tac.recalibrate(net, task.batches(task.calibration))
            after = accuracy(scores(net, test).argmax(1), truth)
            where = "first layer" if spikes == "binary" else "every layer"
            name = f"{mode} {spikes}" if mode == "collapse" else mode
            rows.append({"name": f"{name} k={k}, {where}", "before": before, "after": after})
    return rows


def arguments() -> Namespace:
    made = measure.parser(__doc__ or "")
    made.add_argument("--logs", type=Path, help="folder of the searches' logs, to go on from after a kill")
    made.add_argument("--gestures", type=Path, help="checkpoint of the gesture net")
    made.add_argument("--nmnist", type=Path, help="an archive of N-MNIST recordings with training ones, to calibrate on")
    return measure.parsed(made)


def main() -> None:
    options = arguments()
    out = options.out or measure.RESULTS / f"choosing-cpu-{date.today().isoformat()}.json"
    tasks = [digits(), events(options.nmnist)] + ([gesture(options.gestures)] if options.gestures else [])
    console, results = Console(width=125), {}
    folder = tempfile.TemporaryDirectory() if options.logs is None else contextlib.nullcontext(options.logs)
    with folder as logs:
        every = {task.name: [searched(task, out, Path(logs), match) for match in (True, False)] for task in tasks}
    for task in tasks:
        found, plain = every[task.name]
        for policy in found.values():
            console.print(policy.evidence)
        results[task.name] = compared(task, found, options.rounds) | {"recalibrated": recalibrated(task)}
        results[task.name]["matching"] = beside_unmatched(task, {"matched": found, "unmatched": plain}, options.rounds)
        console.print(*(results[task.name][part] for part in ("best", "recalibrated", "matching")))
    content = {"kind": "choosing", "rounds": options.rounds, "machine": machine.describe(), "results": results}
    out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"Written: {out}")


if __name__ == "__main__":
    main()
