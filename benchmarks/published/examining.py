"""Everything about one published model: what converts, whether it is right, how far k > 1 moves it, how fast it is."""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sj_tac
from benchmarks.published import building, oracle
from benchmarks.published.cases import SAMPLES, Case
from sj_tac.tuning.measure import in_turns

KS = (1, 2, 4)
CHECKED = (2, 3)
INPUTS = 4
# In float64, where folding BatchNorm and the order of sums move no spike.
CLOSE = 1e-6


@dataclass
class Row:
    """What was found about one model.

    Attributes:
        registered: the author's neuron was registered, with its decay.
        broken: why it could not be built or run.
        rates: lowest and highest firing rate; outside: how many of ``neurons`` fire at less than 5 or more than 50 %.
        refused: convolutions by reason; why: the first of each reason, and what was found there.
        driving, shared: convolutions whose output reaches a neuron without crossing another, and how many of them converted.
        affine, affine_shared: those of them whose way to neurons with known dynamics is one affine map, the same for every
            frame, and how many of these converted.
        approximate: convolutions that convert beside these where the policy says ``approximate: true``.
        linear, linear_shared: Linear layers that drive neurons, and how many convert with ``layers: [conv, linear]``.
        unfused: k=1 with fuse=False against the source: "equal" or "DIFFERENT", bit for bit.
        fused: k=1, and definition: k > 1 against hooks on the source, in float64: largest relative difference.
        ms: medians of the eager source and of k=1, 2, 4.
        argmax, spikes: at k, the share of predictions alike, and of spikes in common with the source (twice those of both,
            over those of either).
        failures: what went wrong behind that.
    """

    name: str
    repository: str
    file: str
    shape: list[int]
    size: str = ""
    registered: bool = False
    broken: str = ""
    neurons: int = 0
    rates: list[float] = field(default_factory=list)
    outside: int = 0
    convs: int = 0
    converted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    driving: int = 0
    shared: int = 0
    affine: int = 0
    affine_shared: int = 0
    approximate: int = 0
    linear: int = 0
    linear_shared: int = 0
    unfused: str = ""
    fused: float | None = None
    definition: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    argmax: dict[str, float] = field(default_factory=dict)
    spikes: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def said(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, SystemExit):
        return f"its code calls exit({error.code})"
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}"


def attempt(row: Row, what: str, action: Callable[[], Any]) -> Any:
    """The result, or None with the failure written down."""
    try:
        return action()
    except (Exception, SystemExit) as error:
        row.failures.append(f"{what}: {said(error)}")
        return None


def examine(name: str, case: Case, folder: Path, seconds: float) -> Row:
    """All that is found about one case; ``seconds`` is the time for its speed, none where it is 0."""
    row = Row(name, case.repository, case.file, list(case.shape), case.size, bool(case.registered))
    x = building.sample(case, 0)
    try:
        net = building.make(case, folder)
        rates = building.rates(net, case, x)
    except (Exception, SystemExit) as error:
        row.broken = said(error)
        return row
    row.neurons = len(rates)
    row.rates = [min(rates.values(), default=0.0), max(rates.values(), default=0.0)]
    row.outside = sum(not building.LOW <= rate <= building.HIGH for rate in rates.values())
    reached = attempt(row, "which convolutions drive neurons", lambda: oracle.Reached(net, case, x))
    count(row, case, net, x, reached)
    if not row.converted:
        return row
    check(row, case, net, x, reached)
    nets: dict[str, nn.Module] = {"source": net}
    for k in KS:
        made = attempt(row, f"k={k}", lambda k=k: sj_tac.convert(net, "preserve", k, example_input=x))
        if made is not None:
            nets[str(k)] = made
    compare(row, case, nets)
    if seconds:
        row.ms, row.rounds = timed(nets, x, seconds)
    return row


def count(row: Row, case: Case, net: nn.Module, x: Tensor, reached: oracle.Reached | None) -> None:
    """Verdicts of the plan, of the convolutions that drive neurons apart."""
    plan = attempt(row, "plan", lambda: sj_tac.plan(net, "preserve", 2, example_input=x))
    if plan is None:
        return
    verdicts = [v for v in plan.verdicts if v.status in ("converted", "refused", "kept")]
    row.convs, row.converted = len(verdicts), len(plan.converted)
    row.refused = dict(Counter(str(v.reason) for v in plan.refused))
    row.why = {str(v.reason): f"{v.layer}: {v.detail}" for v in reversed(plan.refused)}
    if reached is None:
        return
    driving = [v for v in verdicts if v.layer in reached.neurons]
    row.driving, row.shared = len(driving), sum(v.status == "converted" for v in driving)
    with oracle.in_float64():
        affine = attempt(row, "which ways to neurons are affine", lambda: affinely(net, case, x, reached))
    if affine is not None:
        row.affine, row.affine_shared = len(affine), sum(v.status == "converted" and v.layer in affine for v in driving)
    if "NOT_AFFINE" in row.refused:
        row.approximate = len(planned(row, net, x, default={"k": 2, "approximate": True})) - row.converted
    linears = {name for name in reached.neurons if isinstance(net.get_submodule(name), nn.Linear)}
    row.linear = len(linears)
    if linears:
        row.linear_shared = len(linears & planned(row, net, x, layers=("conv", "linear"), default={"k": 2}))


def affinely(net: nn.Module, case: Case, x: Tensor, reached: oracle.Reached) -> set[str]:
    """The convolutions among those that drive neurons for which the drive is affine."""
    affine = oracle.Affine(net, case, x, reached)
    convs = {name for name in reached.neurons if isinstance(net.get_submodule(name), nn.modules.conv._ConvNd)}
    return {name for name in convs if affine(name)}


def planned(row: Row, net: nn.Module, x: Tensor, **policy: Any) -> set[str]:
    """Which layers convert under another policy."""
    made = {"version": 1, **policy}
    plan = attempt(row, f"plan under {policy}", lambda: sj_tac.plan(net, made, example_input=x))
    return set() if plan is None else {v.layer for v in plan.converted}


def check(row: Row, case: Case, net: nn.Module, x: Tensor, reached: oracle.Reached | None) -> None:
    """k=1 against the source, and k > 1 against the definition."""

    def unfused() -> str:
        made = sj_tac.convert(net, "preserve", 1, example_input=x, fuse=False)
        pairs = zip(oracle.run(net, x), oracle.run(made, x), strict=True)
        return "equal" if all(torch.equal(a, b) for a, b in pairs) else "DIFFERENT"

    row.unfused = attempt(row, "k=1, unfused", unfused) or ""
    with oracle.in_float64():
        check_in_float64(row, case, net, x, reached)


def check_in_float64(row: Row, case: Case, net: nn.Module, x: Tensor, reached: oracle.Reached | None) -> None:
    """k=1 fused against the source, and k > 1 against the definition, where rounding moves no spike."""
    source, y = copy.deepcopy(net).double(), x.double()

    def against(expected: nn.Module, made: nn.Module) -> float:
        return oracle.difference(oracle.run(expected, y), oracle.run(made, y))

    row.fused = attempt(
        row, "k=1, fused, float64", lambda: against(source, sj_tac.convert(source, "preserve", 1, example_input=y))
    )
    for k in CHECKED if reached is not None else ():

        def defined(k: int = k) -> float:
            made = sj_tac.convert(source, "preserve", k, example_input=y)
            ks = {v.layer: v.k for v in sj_tac.report(made).converted}
            return against(oracle.define(source, ks, reached, case), made)

        found = attempt(row, f"the definition of k={k}", defined)
        if found is not None:
            row.definition[str(k)] = found


def scores(outputs: list[Tensor], samples: int) -> Tensor | None:
    """Class scores [N, C] of an output [N, C], [T, N, C] or [N, T, C]; None for maps."""
    first = outputs[0]
    if len(outputs) != 1 or first.dim() not in (2, 3):
        return None
    if first.dim() == 2:
        return first
    return first.mean(1) if first.shape[0] == samples else first.mean(0)


def compare(row: Row, case: Case, nets: Mapping[str, nn.Module]) -> None:
    """How alike predictions and spikes are at every k on a few inputs that the conversion has not seen."""
    alike: dict[str, list[bool]] = {}
    same: dict[str, list[float]] = {}
    for seed in range(1, 1 + INPUTS):
        x = building.sample(case, seed)
        expected = oracle.spikes(nets["source"], case, x) if seed == 1 else {}
        first = scores(oracle.run(nets["source"], x), SAMPLES)
        for name, made in nets.items():
            if name in ("source", "1"):
                continue

            def predictions(x: Tensor = x, made: nn.Module = made, name: str = name, first: Tensor | None = first) -> None:
                got = scores(oracle.run(made, x), SAMPLES)
                if first is not None and got is not None:
                    alike.setdefault(name, []).extend((first.argmax(1) == got.argmax(1)).tolist())

            attempt(row, f"running k={name}", predictions)
            if expected:
                found = attempt(row, f"spikes of k={name}", lambda made=made, x=x: oracle.spikes(made, case, x)) or {}
                both = sum(int((expected[n] & found[n]).sum()) for n in found)
                either = sum(int(expected[n].sum() + found[n].sum()) for n in found)
                same.setdefault(name, []).append(2 * both / max(1, either))
    row.argmax = {name: statistics.mean(values) for name, values in alike.items()}
    row.spikes = {name: statistics.mean(values) for name, values in same.items()}


def timed(nets: Mapping[str, nn.Module], x: Tensor, seconds: float) -> tuple[dict[str, float], int]:
    """Median milliseconds in interleaved rounds, at least three, after one to warm up."""
    calls = {name: (lambda net=net: oracle.run(net, x)) for name, net in nets.items()}
    start = time.perf_counter()
    in_turns(calls, 1)
    rounds = int(max(3, min(30, seconds / (time.perf_counter() - start))))
    taken = in_turns(calls, rounds)
    return {name: 1e3 * statistics.median(values) for name, values in taken.items()}, rounds
