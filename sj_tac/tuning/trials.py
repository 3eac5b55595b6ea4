"""Candidates of a search, each measured once on the whole converted net, from the log where it has them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from sj_tac import host
from sj_tac.errors import BatchError, PolicyError, SearchError
from sj_tac.rewrites.pipeline import Source, deep_copy, record_of, report
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.evidence import Trial
from sj_tac.tuning.goal import Goal
from sj_tac.tuning.log import Log
from sj_tac.tuning.matching import Matcher, usual
from sj_tac.tuning.measure import (
    INSTANCES,
    Decode,
    Metric,
    accuracy,
    check_labels,
    labels_of,
    milliseconds,
    milliseconds_afresh,
    scores,
)
from sj_tac.tuning.progress import Bar
from sj_tac.tuning.space import KEEP, Choice, Choices, Space, described, read_choices
from sj_tac.verdicts import total_macs

Cost = Callable[[nn.Module], float]
ROUNDS = 5  # of a candidate; finalists are measured again, side by side
# What writing and reading one output of a convolution costs, in multiply-accumulates: a processor does some tens of them in
# the time that 8 bytes take to memory and back. A first layer of few channels costs little else.
MACS_PER_OUTPUT = 64


class OutOfTime(Exception):
    """The time limit of a search has passed."""


@dataclass
class Score:
    """The metric, a number that is better when larger: "accuracy" and "agreement" (with the source), or the user's own."""

    metric: str | Metric | None
    batches: list[Batch]
    decode: Decode | None
    seed: int
    expected: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    name: str = ""

    def begin(self, source: nn.Module) -> float:
        """Settle what is measured, and measure the source. Raises BatchError, SearchError, PolicyError."""
        if callable(self.metric):
            self.name = getattr(self.metric, "__qualname__", type(self.metric).__name__)
            return self(source)
        self.name = self.metric or ("accuracy" if self.batches[0].labels is not None else "agreement")
        if self.name == "accuracy":
            self.expected = labels_of(self.batches, 'metric="accuracy"')
            said = scores(source, self.batches, self.decode, self.seed)
            check_labels(self.expected, said.shape[1])
            return accuracy(said.argmax(1), self.expected)
        if self.name != "agreement":
            raise PolicyError(f"metric={self.metric!r}: there are 'accuracy', 'agreement', and functions of your own")
        self.expected = scores(source, self.batches, self.decode, self.seed).argmax(1)
        return 1.0

    def predictions(self, net: nn.Module) -> torch.Tensor:
        """Classes [N] of all samples."""
        return scores(net, self.batches, self.decode, self.seed).argmax(1)

    def __call__(self, net: nn.Module) -> float:
        if not callable(self.metric):
            return accuracy(self.predictions(net), self.expected)
        given: list[Any] = [b.given if b.labels is None else (b.given, b.labels) for b in self.batches]
        with host.looked_at(net):
            torch.manual_seed(self.seed)
            value = self.metric(net, given)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise SearchError(f"metric {self.name} returned {value!r} for {type(net).__name__}; it must be a finite number")
        return number


@dataclass
class Trials:
    """Measures candidates; what was measured before, in this process or by the log, is not measured again."""

    source: nn.Module
    batches: Sequence[Batch]
    space: Space
    score: Score
    backend: str
    rounds: int
    cost: Cost | None
    log: Log
    goal: Goal
    bar: Bar
    timed: torch.Tensor  # what is run for time, as the nets take it
    deadline: float  # of candidates; limit: of everything
    limit: float = math.inf
    match: bool = False
    fresh: int = 0

    def __post_init__(self) -> None:
        # Names of candidates that are the same net as another, and what each that was tried makes of every layer.
        self.same: dict[str, str] = {}
        self.known: dict[Any, str] = {}
        self.longest = 0.0
        self.best: Trial | None = None
        ks, layers = len(self.space.ks), len(self.space.layers)
        self.bar.expect(len(self.space.aggregating) + 3 * layers * (ks - 1) + len(self.space.modes) * layers)
        self.done = {entry["name"]: Trial(**entry) for entry in self.log.entries if "name" in entry}
        self.tried: dict[str, Trial] = {}
        # Candidates are timed in turns with one converted net: the source takes several times as long. No layer of the space
        # refuses to preserve.
        self.looked = Source(self.source, self.space.kinds, example_input=self.batches[0].example(), backend=self.backend)
        begun = time.monotonic()
        self.reference = self.net(self.space.all(Choice("preserve", self.space.ks[0])))
        self.making = time.monotonic() - begun
        self.macs = {v.layer: v.macs_before or 0 for v in report(self.reference).verdicts}
        self.baseline = self._baseline()
        self.matcher, self.unmatched = self._matcher() if self.match else (None, "")

    def __call__(self, choices: Choices) -> Trial:
        """The trial of one candidate. Raises OutOfTime where it would have to be measured and there is no time for it."""
        choices = {name: choice.plain for name, choice in choices.items()}
        name = self.space.name(choices)
        name = self.same.get(name, name)
        if name not in self.tried:
            makes = self._makes(choices)
            if makes in self.known:
                self.same[name] = self.known[makes]
                return self.tried[self.known[makes]]
            if name not in self.done:
                begun = time.monotonic()
                if self.tried and begun + self.longest > self.deadline:  # one there must be
                    raise OutOfTime
                trial = self._measure(choices, name)
                self.log.add(trial.to_dict())
                self.done[name] = trial
                self.fresh += 1
                self.longest = max(self.longest, time.monotonic() - begun)
            self.tried[name] = self.done[name]
            if makes is not None:
                self.known[makes] = name
            self.note(self.tried[name])
            self.bar.step(name)
        return self.tried[name]

    def note(self, trial: Trial) -> None:
        """Show the best so far, where this is it."""
        if trial.refused or not self.goal.fits(trial):
            return
        if self.best is not None and self.goal.rank(self.best) <= self.goal.rank(trial):
            return
        self.best = trial
        self.bar.note(f"{trial.name} ({self.score.name} {trial.metric:.4f}, {trial.speedup:.2f}x)")

    def _makes(self, choices: Choices) -> Any:
        """What becomes of every layer, which two candidates may say in different words; None where one is refused.

        Behind a collapse by 4 a k of 1, 2 or 4 is one and the same, in either mode.
        """
        plan = record_of(self.reference, "search").plan
        policy = self.space.policy(choices)
        settings = {n: s for n, (s, _) in policy.resolve(list(plan.measured.convolutions)).items()}
        found = plan.under(self.reference, settings).decision
        if any(name in found.refused for name, choice in choices.items() if choice != KEEP):
            return None
        points = [(name, point.span, point.merging, point.at) for name, point in found.points.items()]
        return frozenset([*points, *((name, place.frames, place.span) for name, place in found.places.items())])

    def net(self, choices: Choices) -> nn.Module:
        """The candidate converted, with MACs in its report. Raises PolicyError where a layer refuses."""
        return self.looked.convert(self.space.policy(choices))

    def matched_net(self, trial: Trial) -> nn.Module:
        """The net that a trial measured."""
        net = self.net(read_choices(trial.choices, self.space.layers))
        if self.matcher is not None:
            self.matcher(net, usual(net))
        return net

    def _matcher(self) -> tuple[Matcher | None, str]:
        """What matches candidates; None, and why, where these batches do not allow it."""
        try:
            return Matcher(self.reference, self.batches, self.score.decode, self.score.seed), ""
        except BatchError as error:
            return None, f"Candidates were not matched: {error}"

    def _measure(self, choices: Choices, name: str) -> Trial:
        plain, uniform = described(choices), self.space.is_uniform(choices)
        try:
            net = self.net(choices)
        except PolicyError as error:
            return Trial(plain, name, uniform, refused=str(error))
        matched = ""
        try:
            if self.matcher is not None:
                matched = self.matcher(net, usual(net)).method
            metric = self.score(net)
        except BatchError as error:
            raise SearchError(f"the converted net {name!r} cannot be measured: {error}") from error
        verdicts = report(net).verdicts
        macs, work = total_macs(verdicts)[1], int(sum((v.macs_after or 0) * self.weight(v.layer) for v in verdicts))
        if self.cost is not None:
            speedup = self.baseline["source"] / self._cost(net, name)
            return Trial(plain, name, uniform, metric, speedup, None, macs, work, matched)
        taken = milliseconds({"reference": self.reference, "net": net}, self.timed, ROUNDS)
        speedup = self.baseline["source"] / self.baseline["reference"] * taken["reference"] / taken["net"]
        return Trial(plain, name, uniform, metric, speedup, taken["net"], macs, work, matched)

    def weight(self, layer: str) -> float:
        """What a multiply-accumulate of this layer costs with its share of the output's traffic."""
        weight = getattr(self.source.get_submodule(layer), "weight", None)
        return 1.0 if weight is None else 1 + MACS_PER_OUTPUT / weight[0].numel()

    def _baseline(self) -> dict[str, float]:
        """What the source and the reference cost: measured once for a log."""
        for entry in self.log.entries:
            if "baseline" in entry:
                return dict(entry["baseline"])
        if self.cost is not None:
            taken = {"source": self._cost(self.source, "source")}
        else:
            taken = milliseconds({"source": self.source, "reference": self.reference}, self.timed, self.rounds)
        self.log.add({"baseline": taken})
        return taken

    def _cost(self, net: nn.Module, name: str) -> float:
        """The user's cost. Raises SearchError where it is none."""
        assert self.cost is not None
        value = self.cost(net)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 < number < math.inf:
            raise SearchError(
                f"cost returned {value!r} for {name!r}; it must be a finite number above 0, such as milliseconds"
            )
        return number

    def in_time(self, finalists: Sequence[Trial]) -> tuple[Sequence[Trial], int]:
        """Those finalists, and so many rounds, that there is time to run side by side; none where there is not."""
        left = self.limit - time.monotonic()
        for count in sorted({len(finalists), min(4, len(finalists)), min(2, len(finalists))}, reverse=True):
            for rounds in (self.rounds, min(5, self.rounds), min(3, self.rounds)):
                each = 2e-3 * (self.baseline["source"] + sum(t.ms or 0.0 for t in finalists[:count]))
                # Of every instance: nets are made, run once untimed, and fast ones for a second more.
                instances = min(INSTANCES, rounds)
                takes = instances * (count * self.making + each * (1 + -(-rounds // instances)) + 1.0)
                if takes <= left:
                    return finalists[:count], rounds
        return [], 0

    def side_by_side(self, finalists: Sequence[Trial]) -> dict[str, float]:
        """Milliseconds of the source and all finalists in turns, from the log where it has just these; {} without time."""
        names = sorted(t.name for t in finalists)
        for entry in self.log.entries:
            if entry.get("final") == names:
                return dict(entry["ms"])
        finalists, rounds = self.in_time(finalists)
        if not finalists:
            return {}
        names = sorted(t.name for t in finalists)
        every = {t.name: read_choices(t.choices, self.space.layers) for t in finalists}
        make = {name: partial(self.net, choices) for name, choices in every.items()}
        make["source"] = partial(deep_copy, self.source)
        taken = milliseconds_afresh(make, self.timed, rounds, "source")
        self.log.add({"final": names, "ms": taken})
        return taken
