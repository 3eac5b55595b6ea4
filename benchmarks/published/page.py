"""docs/published.md from the rows of ``examining``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.published.cases import REPOSITORIES
from benchmarks.published.examining import CHECKED, CLOSE, INPUTS, KS, Row

COUNTED = (
    *("model", "input", "convs", "converted", "refused", "drive a neuron", "of these converted"),
    *("affinely", "of these converted", "k=1", "definition"),
)
TIMED = (
    *("model", "eager ms", *(f"k={k}" for k in KS)),
    *(f"{what}, k={k}" for what in ("same class", "spikes in common") for k in KS if k > 1),
)


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *lines)]


def within(value: float | None) -> str:
    if value is None:
        return "failed"
    return "equal" if value <= CLOSE else f"DIFFERENT ({value:.1e})"


def checks(row: Row) -> tuple[str, str]:
    """What the two columns say of a model that converts: k=1 unfused and fused, and every k of the definition."""
    if not row.converted:
        return "-", "-"
    found = {row.unfused or "failed", within(row.fused)}
    defined = {within(row.definition.get(str(k))) for k in CHECKED}
    return " / ".join(sorted(found)), " / ".join(sorted(defined))


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def counted(row: Row) -> list[str]:
    refused = ", ".join(f"{reason} x {n}" for reason, n in row.refused.items()) or "-"
    counts = [str(row.convs), str(row.converted), refused, str(row.driving), share(row.shared, row.driving)]
    counts += [str(row.affine), share(row.affine_shared, row.affine)]
    return [f"`{row.name}`", "x".join(map(str, row.shape)), *counts, *checks(row)]


def measured(row: Row) -> list[str]:
    eager = row.ms.get("source", 0.0)
    speed = [f"{eager / row.ms[str(k)]:.2f}x" if str(k) in row.ms else "-" for k in KS]
    alike = [
        f"{100 * found[str(k)]:.0f} %" if str(k) in found else "-" for found in (row.argmax, row.spikes) for k in KS if k > 1
    ]
    return [f"`{row.name}`", f"{eager:.0f}" if eager else "-", *speed, *alike]


def page(rows: Sequence[Row], result: dict[str, Any]) -> str:
    """The whole page. ``result``: machine, seconds, and the commit of every repository where git knows it."""
    where, commits = result["machine"], result["commits"]
    ran = [r for r in rows if not r.broken]
    converted = [r for r in ran if r.converted]
    # Models that are there a second time, with the author's neuron registered, are not counted twice.
    plain = [r for r in ran if not r.registered]
    driving, shared = sum(r.driving for r in plain), sum(r.shared for r in plain)
    affine, affine_shared = sum(r.affine for r in plain), sum(r.affine_shared for r in plain)
    equal = sum(r.unfused == "equal" and r.fused is not None and r.fused <= CLOSE for r in converted)
    defined = sum(all(r.definition.get(str(k), 1.0) <= CLOSE for k in CHECKED) for r in converted)
    refused = sum((Counter(r.refused) for r in plain), Counter[str]())
    lines = [
        "# Published models",
        "",
        f"Written by `python -m benchmarks.published --repos FOLDER` on {where['date']}: {where['cpu']}, {where['threads']} "
        f"thread{'s' if where['threads'] > 1 else ''}, torch {where['torch']}, SpikingJelly {where['spikingjelly']}, Python "
        f"{where['python']}. The models are read and run from checkouts of their repositories; nothing of them is here. "
        "Weights are random: BatchNorm has the statistics of a few batches, and thresholds are moved until neurons fire at "
        "5 to 50 %. Packages that a model only imports are stood in for (`benchmarks/published/stubs.py`).",
        "",
        f"- **{sum(not r.registered for r in rows)} models of {len({r.repository for r in rows})} repositories; "
        f"{len(plain)} run, {sum(r.converted > 0 for r in plain)} of these convert: {sum(r.converted for r in plain)} of "
        f"{sum(r.convs for r in plain)} convolutions. Of the {driving} that drive a neuron {shared} convert "
        f"({share(shared, driving)}).**",
        f"- Of the {affine} that drive SpikingJelly's LIF, IF or PLIF by an affine map that is the same for every frame "
        f"{affine_shared} convert ({share(affine_shared, affine)}). No other drive can be shared as the definition has it.",
        "- Where the author's neuron is registered (`sj_tac.register_neuron`), "
        f"{sum(r.converted for r in ran if r.registered)} more.",
        f"- {sum(r.approximate for r in plain)} more with `approximate: true`, where a MaxPool stands before the neuron. "
        f"With `layers: [conv, linear]`, {sum(r.linear_shared for r in plain)} of {sum(r.linear for r in plain)} Linear "
        "layers that drive a neuron.",
        f"- k=1: the source's output in {equal} of {len(converted)} nets that convert, bit for bit unfused, and fused to "
        f"within {CLOSE:.0e} in float64, where the order of sums moves no spike.",
        f"- k={' and '.join(map(str, CHECKED))}: what the definition gives, in {defined} of {len(converted)}, to the same. "
        "The definition is the source with hooks: a converted convolution reads the weighted mean of its group, repeated.",
        "- Refused, in all: " + (", ".join(f"{reason} x {n}" for reason, n in refused.most_common()) or "nothing") + ".",
        "",
        "## What converts",
        "",
        "`preserve`. *drive a neuron*: the convolution's output reaches a neuron's input without crossing another neuron, "
        "found by autograd on the source; heads and analog parts do not. *affinely*: of these, the ones whose neurons are "
        "all SpikingJelly's own LIF, IF or PLIF (or registered), where the way there is affine and the same for every "
        "frame. A MaxPool, a SiLU, attention, a neuron of the author's class on the way is not. Found by changing the "
        "convolution's output while all spikes are held.",
        "",
    ]
    for repository in dict.fromkeys(r.repository for r in rows):
        commit = commits.get(repository)
        link = f"[{REPOSITORIES[repository]}](https://github.com/{REPOSITORIES[repository]})"
        own = [r for r in rows if r.repository == repository]
        lines += [f"### {repository}", "", f"{link}{f' at {commit[:10]}' if commit else ''}", ""]
        lines += table(COUNTED, [counted(r) for r in own if not r.broken]) if any(not r.broken for r in own) else []
        lines += ["", *(f"- `{r.name}`: {r.size}." for r in own if r.size)]
        lines += [*(f"- `{r.name}` does not run: {r.broken}" for r in own if r.broken), ""]
    speed = f"Medians of interleaved rounds in one process, {result['seconds']:g} s a model, against the eager source"
    if not result["seconds"]:
        speed = "Speed was not measured"
    timed = [r for r in converted if r.ms or r.spikes]
    lines += [
        "## How fast, and how alike",
        "",
        f"{speed}, a batch of two. *same class*: predictions alike on {INPUTS} random inputs, of classifiers. *spikes in "
        "common*, on one: those that both nets fire, over the mean of what each fires. The weights are random, where a "
        "small change of a drive moves a decision: of what a trained model loses this says nothing.",
        "",
        *table(TIMED, [measured(r) for r in timed]),
        "",
        "## Why",
        "",
        "The first layer of each model that was refused with a code, and what was found there.",
        "",
        *(f"- `{r.name}`, {reason}: {text}" for r in ran for reason, text in r.why.items()),
        "",
        "## What failed",
        "",
        *([f"- `{r.name}`: {text}" for r in rows for text in r.failures] or ["Nothing."]),
        "",
        "## Firing rates",
        "",
        *table(
            ("model", "neurons", "lowest", "highest", "outside 5 to 50 %"),
            [
                [f"`{r.name}`", str(r.neurons), *(f"{100 * rate:.1f} %" for rate in r.rates), str(r.outside)]
                for r in ran
                if r.rates
            ],
        ),
        "",
    ]
    return "\n".join(line for i, line in enumerate(lines) if line or i == 0 or lines[i - 1])
