"""The generated tables of docs/*.md, made from benchmarks/results: python -m benchmarks.results_page

Between ``<!-- table NAME: FILE -->`` and ``<!-- end -->`` everything is generated; the words around it are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import gpu_tables, paper_tables, speed_tables
from benchmarks.tables import read, rows as _rows, where as _where

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = tuple(DOCS / name for name in ("tables.md", "speed.md", "paper.md", "accuracy.md", "export.md", "gpu.md"))
BLOCK = re.compile(r"<!-- table (\w+): ([\w.-]+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
SEPARATE = "T separate calls (the paper's baseline)"


def study(content: dict[str, Any]) -> str:
    """Accuracy of every row, as the study's scripts leave it in results.json."""
    protocol, recipe = content["protocol"], content["protocol"]["recipe"]
    rows = []
    for e in content["rows"]:
        spread = f" ± {e['spread']:.2f}" if e["spread"] is not None else ""
        saved = f"{e['macs_before'] / e['macs']:.1f}x fewer" if e["macs"] else ""
        seconds = f"{e['train_seconds']:.0f}" if e["train_seconds"] else ""
        name = f"{e['name']} k={e['k']}" if e["macs"] else e["name"]
        rows.append(
            [name, e["how"], f"{e['accuracy']:.2f}{spread}", f"{e['to_baseline']:+.2f}", f"{e['agreement']:.1f}", saved,
             seconds]
        )  # fmt: skip
    head = ["net", "", "accuracy %", "to baseline", "agreement %", "convolutions", "training s"]
    fused = " Baselines trained fused, at k=1." if content.get("fused_baseline") else ""
    tuned = f"; fine-tuning: {protocol['tune_epochs']} more at {protocol['tune_rate']:g}" if protocol["tune_epochs"] else ""
    seeds = ", ".join(map(str, content["seeds"]))
    runs = f"Mean ± standard deviation over seeds {seeds}." if len(content["seeds"]) > 1 else f"One run, of seed {seeds}."
    about = (
        f"{content['title']}, {protocol['name']}: {content['train']} training and {content['test']} test samples, "
        f"{recipe['epochs']} epochs in batches of {recipe['batch']}, Adam {recipe['rate']:g}{tuned}. "
        f"{runs}{fused} {_where(content['machine'])}.\n\n"
    )
    return about + _rows(head, rows)


def speed(content: dict[str, Any]) -> str:
    """The paper's nets in the inference benchmark: against T separate calls, and the best SpikingJelly configuration."""
    text = f"{_where(content['machine'])}; medians of {content['rounds']} interleaved rounds.\n"
    for net, rows in content["results"].items():
        if not net.startswith("paper"):
            continue
        base = next(r["ms"] for r in rows if r["name"] == SEPARATE)
        kept = [r for r in rows if not r["name"].startswith("bare")]
        cells = [[r["name"], f"{r['ms']:.1f}", f"{base / r['ms']:.1f}x", f"{r['to_best']:.2f}x"] for r in kept]
        head = [net, "ms", "to T separate calls", "to the best SpikingJelly"]
        text += "\n" + _rows(head, cells)
    return text


def sparsity(content: dict[str, Any]) -> str:
    """Milliseconds of every way at every firing rate, with the ratio to the dense convolution."""
    results = content["milliseconds"]
    rows = []
    for name in next(iter(results.values())):
        cells = [f"{r[name]:.1f} ({r['dense convolution'] / r[name]:.2f}x)" for r in results.values()]
        rows.append([name, *cells])
    head = ["ms (against dense)", *(f"rate {rate}" for rate in results)]
    about = f"Input {content['input']}, 64 output channels, 3 x 3; medians of {content['rounds']} interleaved rounds. "
    return about + _where(content["machine"]) + ".\n\n" + _rows(head, rows)


def operators(content: dict[str, Any]) -> str:
    """Milliseconds of the paper's operators, against the best SpikingJelly configuration of the run."""
    text = f"{_where(content['machine'])}; medians of {content['rounds']} interleaved rounds.\n"
    for net, rows in content["results"].items():
        text += "\n" + _rows(
            [net, "ms", "to the best SpikingJelly"], [[r["name"], f"{r['ms']:.1f}", f"{r['to_best']:.2f}x"] for r in rows]
        )
    return text


def choosing(content: dict[str, Any]) -> str:
    """What was searched, beside the same k in every layer: the fastest in the budget, the fastest at the same accuracy."""
    text = f"{_where(content['machine'])}; medians of at least {content['rounds']} rounds in turns.\n"
    for net, found in content["results"].items():
        text += (
            f"\n**{net}**, {found['about']}. The source has {100 * found['source']:.2f} % on the calibration samples; "
            f"diagnosed: {found['verdict']} (p = {found['p_value']:.3g}, effect {found['effect']:+.3f}). "
            f"Input {found['timed']}.\n\n"
        )
        rows = []
        for best in found["best"]:
            entry = next(r for r in found["rows"] if r["name"] == best["searched"]["name"])
            head = [f"{best['drop']:g}", "searched: " + ", ".join(entry["choices"].values())]
            rows.append([*head, *_choice(entry, "")])
            for by, words in (
                ("budget", "the fastest uniform policy in the budget"),
                ("accuracy", "the fastest at least as accurate"),
            ):
                other = best[by]
                same = set(entry["choices"].values()) == {other["name"]}
                ratio = "the same policy" if same else f"{other['ratio']:.2f}x"
                rows.append(["", f"{words}: {other['name']}", *_choice(other, ratio)])
        head = ["max_drop", "policy", "calibration %", "others %", "ms", "speed-up", "searched is faster by"]
        text += _rows(head, rows)
    return text


def _choice(row: dict[str, Any], ratio: str) -> list[str]:
    return [
        f"{100 * row['calibration']:.2f}",
        f"{100 * row['accuracy']:.2f}",
        f"{row['ms']:.1f}",
        f"{row['speedup']:.2f}x",
        ratio,
    ]


def recalibrating(content: dict[str, Any]) -> str:
    """Accuracy with the source's BatchNorm statistics and with re-estimated ones."""
    names = list(content["results"])
    tables = {net: {r["name"]: r for r in content["results"][net]["recalibrated"]} for net in names}
    rows = []
    for name in tables[names[0]]:
        cells = [f"{100 * tables[net][name]['before']:.2f} -> {100 * tables[net][name]['after']:.2f}" for net in names]
        rows.append([name, *cells])
    return _rows(["accuracy %, source's statistics -> re-estimated", *names], rows)


CORRECTIONS = ("plain", "recalibrate", "match", "match, 60 steps")


def _mean(pair: list[float]) -> str:
    return f"{pair[0]:.1f} ± {pair[1]:.1f}"


def _matched(content: dict[str, Any], head: list[str], cell: Callable[[dict[str, Any]], str]) -> str:
    """A table of net and policy by correction, for every shift."""
    entries = {(e["task"], e["shift"], e["policy"], e["method"]): e for e in content["summary"]}
    tasks, shifts, policies = (list(dict.fromkeys(key[i] for key in entries)) for i in range(3))
    rows = []
    for task in tasks:
        for policy in policies:
            for shift in shifts:
                found = [entries.get((task, shift, policy, method)) for method in CORRECTIONS]
                if found[0] is not None:
                    rows.append([task, policy, shift, *(cell(e) if e else "" for e in found)])
    return _rows(["net", "policy", "frames", *head], rows)


def agreement(content: dict[str, Any]) -> str:
    """How many of the source's predictions every correction keeps."""
    floors = [
        f"{e['task']} {e['shift']} {e['agreement'][0]:.1f}" for e in content["summary"] if e["method"].startswith("source")
    ]
    about = (
        f"Agreement with the source in %, mean ± standard deviation over seeds and draws. {_where(content['machine'])}. "
        f"For comparison the source itself on frames that lack 1 % of their events: {'; '.join(floors)}.\n\n"
    )
    return about + _matched(content, list(CORRECTIONS), lambda e: _mean(e["agreement"]))


def losses(content: dict[str, Any]) -> str:
    """Points of accuracy that are lost; negative: gained."""
    about = (
        "Points of accuracy lost against the source on the same frames, mean over seeds and draws; negative is a gain.\n\n"
    )
    return about + _matched(content, list(CORRECTIONS), lambda e: f"{e['source'][0] - e['accuracy'][0]:.1f}")


def tuned(content: dict[str, Any]) -> str:
    """An epoch of fine-tuning beside matching alone."""
    entries = {(e["task"], e["policy"], e["method"]): e for e in content["summary"] if e["shift"] == "clean"}
    methods = ("plain", "match", "fine-tuned, from plain", "fine-tuned, from matched")
    rows = []
    for task, policy, method in entries:
        if method == methods[2]:
            found = [entries[task, policy, m] for m in methods]
            rows.append([task, policy, f"{found[0]['source'][0]:.1f}", *(_mean(e["accuracy"]) for e in found)])
    return _rows(["net", "policy", "source", *methods], rows)


def schedule(content: dict[str, Any]) -> str:
    """Training at k = 1 throughout beside training with k as a schedule."""
    rows = []
    for e in content["summary"]:
        ks = ", ".join(f"{epoch}: {k}" for epoch, k in e["ks"].items())
        whole, other = (f"{mean:.2f} ± {spread:.2f}" for mean, spread in (e["k=1"], e["scheduled"]))
        cells = [f"{e['epochs']}", f"{{{ks}}}", whole, other, f"{e['difference']:+.2f}", f"{e['seconds']:.0f}"]
        rows.append([e["task"], *cells, f"{e['time']:.2f}x"])
    head = ["task", "epochs", "{epoch: k}", "k=1 throughout, %", "scheduled, %", "difference", "k=1, s", "scheduled takes"]
    return f"Mean ± standard deviation over seeds. {_where(content['machine'])}.\n\n" + _rows(head, rows)


def searching(content: dict[str, Any]) -> str:
    """Searching among matched candidates beside searching among plain ones."""
    rows = []
    for net, found in content["results"].items():
        for entry in found.get("matching", []):
            cells = []
            for kind in ("matched", "unmatched"):
                best = entry[kind]
                cells += [
                    best["policy"].replace(" | ", ", "),
                    f"{100 * (entry['source'] - best['accuracy']):.2f}",
                    f"{best['speedup']:.2f}x",
                ]
            rows.append([net, f"{entry['drop']:g}", *cells])
    head = ["net", "max_drop", "matched: policy", "points lost", "speed-up", "unmatched: policy", "points lost", "speed-up"]
    return f"{_where(content['machine'])}.\n\n" + _rows(head, rows)


def overhead(content: dict[str, Any]) -> str:
    """What a fused layer costs beside its convolution."""
    keys = ("layer_us", "convolution_us", "overhead_us", "spikingjelly_us")
    rows = [[f"{row['size']} x {row['size']}", str(row["k"]), *(f"{row[key]:g}" for key in keys)] for row in content["rows"]]
    head = ["map", "k", "layer, us", "convolution, us", "the rest, us", "SpikingJelly's layer, us"]
    where = (
        f"{content['threads']} thread, medians of {content['rounds']} interleaved rounds. {_where(content['machine'])}.\n\n"
    )
    return where + _rows(head, rows)


def compiled(content: dict[str, Any]) -> str:
    """A converted net as it runs, under torch.compile and in onnxruntime."""
    keys = ("ms", "to_eager", "ready_s", "differs")
    rows = [[row["name"], *(f"{row[key]:g}{'x' * (key == 'to_eager')}" for key in keys)] for row in content["rows"]]
    rates = ", ".join(f"{100 * rate:.0f} %" for rate in content["rates"])
    about = (
        f"{content['net']}, input {content['input']}, firing rates {rates}, "
        f"1 thread, medians of {content['rounds']} interleaved rounds. "
        f"{_where(content['machine'])}, onnxruntime {content['machine']['onnxruntime']}.\n\n"
    )
    return about + _rows(["", "ms", "to the same net uncompiled", "ready after, s", "share of outputs that differ"], rows)


def compiled_free(content: dict[str, Any]) -> str:
    """A converted net that was compiled once for any T and N."""
    keys = ("k", "T", "N", "uncompiled", "compiled", "first_s", "graphs", "differs")
    rows = [[f"{row[key]:g}" for key in keys] for row in content["free"]]
    about = (
        f"{content['net']}, 1 thread, medians of {content['rounds']} interleaved rounds. {_where(content['machine'])}.\n\n"
    )
    head = [
        "k",
        "T",
        "N",
        "uncompiled, ms",
        "compiled, ms",
        "first call, s",
        "graphs so far",
        "share of outputs that differ",
    ]
    return about + _rows(head, rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    **speed_tables.TABLES,
    **paper_tables.TABLES,
    **gpu_tables.TABLES,
    "study": study,
    "speed": speed,
    "sparsity": sparsity,
    "operators": operators,
    "choosing": choosing,
    "recalibrating": recalibrating,
    "agreement": agreement,
    "losses": losses,
    "tuned": tuned,
    "schedule": schedule,
    "searching": searching,
    "overhead": overhead,
    "compiled": compiled,
    "compiled_free": compiled_free,
}


def generated(page: str) -> str:
    """The page with every table made anew."""

    def block(found: re.Match[str]) -> str:
        kind, file = found[1], found[2]
        return f"<!-- table {kind}: {file} -->\n{TABLES[kind](read(file))}<!-- end -->\n"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(generated(page.read_text()))
        print(f"Written: {page}")
