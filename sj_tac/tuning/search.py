"""The fastest policy whose metric stays within a budget, or the most accurate at a wanted speed; all of it measured."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from sj_tac.errors import PolicyError, SearchError, SearchInterrupted, WriteError
from sj_tac.kernels import backends
from sj_tac.policy import Policy
from sj_tac.rewrites.pipeline import check_plain
from sj_tac.support import machine
from sj_tac.support.files import beside, check_place
from sj_tac.tuning import plots
from sj_tac.tuning.batches import Batch, as_given, collect
from sj_tac.tuning.diagnosis import Diagnosis, diagnose
from sj_tac.tuning.evidence import Evidence, Trial, simplicity
from sj_tac.tuning.goal import Goal
from sj_tac.tuning.holding import at_chance, judge, split
from sj_tac.tuning.log import Log, fingerprint, this_machine
from sj_tac.tuning.matching import NONE
from sj_tac.tuning.measure import Metric
from sj_tac.tuning.options import Search, SearchOptions
from sj_tac.tuning.progress import Bar
from sj_tac.tuning.space import Space, read_choices
from sj_tac.tuning.strategy import Strategy
from sj_tac.tuning.trials import ROUNDS, OutOfTime, Score, Trials

# Times that differ by less are one time: the metric, and then work, which do not depend on the moment, decide.
SAME = 0.05
FINALISTS = 6
# The share of a time limit that is left for them.
AT_THE_END = 0.25


def search(
    model: nn.Module,
    batches: Any,
    *,
    metric: str | Metric | None = None,
    max_drop: float = 0.01,
    speedup: float | None = None,
    time_limit: float | None = None,
    **options: Unpack[SearchOptions],
) -> Policy:
    """The fastest per-layer policy whose metric, measured on the whole converted net, stays within ``max_drop``.

    Tried are: every k and mode in all layers; every layer alone; a path from there, cheapest loss first; then single moves
    and exchanges around the best; and the best with layers left as they are ("keep"). Which candidates are tried depends on
    metrics and work alone (multiply-accumulates and the outputs' memory traffic), not on the clock, unless a ``speedup`` is
    wanted. Finalists are timed side by side; times within 5 % of the best count as equal: the better metric wins, then less
    work.

    Args:
        model: a SpikingJelly net in step_mode "m"; left untouched, measured in eval mode.
        batches: a few batches of frames [T, N, C, H, W] or (frames, labels), kept in memory. The first one is timed. What is
            found fits these samples: check it on others.
        metric: "accuracy" (needs labels), "agreement" (with the source's predictions), or ``f(net, batches) -> float``,
            larger is better; None: accuracy where there are labels.
        max_drop: how much of the metric may be lost, absolutely (0.01: one point of accuracy).
        speedup: search the best metric at this speed, at the least, instead; ``max_drop`` then has no say.
        time_limit: seconds after which nothing new is tried; the first candidate and the finalists are measured in any case.

    Keyword Args:
        ks: None: 1, 2, 3, 4, 6, 8, 12, 16 ... up to T.
        modes: default ("preserve", "collapse"); the first is searched layer by layer, the others on what that finds.
        layers: "conv", "linear"; default ("conv",).
        rounds: timed rounds of the finalists, default 9.
        cost: a function of a net (milliseconds on another device, joules) that takes the place of measured time.
        decode: from the net's output to class scores [N, C].
        backend: as ``sj_tac.convert``.
        seed: of random encoders in the net, default 0.
        progress: show a bar, default True.
        match: correct every candidate by the batches before it is measured, as ``sj_tac.match`` does, default True: what a
            policy loses without says little. The evidence says by which method, so that you can match the net, too.
        holdout: the share of samples that have no say in the choice: the evidence says by how much the metric drops on them.
            Default: a quarter of 400 samples or more, otherwise none.
        log: a JSON-lines file; after a kill, the same call goes on from it.
        out: writes the evidence as JSON, and the Pareto frontier as PNG beside it (needs matplotlib).

    Returns:
        The policy; ``policy.evidence`` has everything tried, ``policy.save(path)`` writes it.

    Raises:
        SearchError: no policy meets the goal or is faster than the source, the metric is no number, or ``log`` is another
            search's; its attribute ``evidence`` says what was tried.
        WriteError: ``log`` or ``out`` cannot be written; for ``out``, where only the end shows it, its attribute ``policy``
            is what was found.
        ConversionError: no layer can be converted.
        BatchError: batches that cannot be used.
        PolicyError: ks, modes or another option out of range.
        ModelTypeError: ``model`` is no ``torch.nn.Module``.
        TraceError: as ``sj_tac.convert``.
        BackendError: as ``sj_tac.convert``.
    """
    begun = time.monotonic()
    how = Search.read("search", 9, options)
    if how.out is not None:
        plots.require()
        check_place(beside(how.out, ".png"))
    _check_numbers(max_drop, speedup, time_limit)
    check_plain(model)
    held = collect(batches, model)
    space = Space.of(model, how.ks, how.modes, how.layers, held[0].steps, held[0].example())
    chosen_by, rest = split(held, how.holdout)
    score = Score(metric, chosen_by, how.decode, how.seed)
    source = score.begin(model)
    goal = _goal(score.name, source, max_drop, speedup)
    header = fingerprint(model, chosen_by) | {
        "space": [list(space.layers), list(space.ks), list(space.modes), list(space.kinds)],
        "metric": [score.name, _named(how.decode, "decode")],
        "seed": how.seed,
        "match": how.match,
        "speed": [backends.choose(how.backend), how.rounds, ROUNDS, _named(how.cost, "cost")],
        "machine": this_machine(),
    }
    limit = math.inf if time_limit is None else begun + time_limit
    # Finalists run side by side at the end, which the whole of the limit is for, too.
    until = limit if how.cost is not None or time_limit is None else limit - AT_THE_END * time_limit
    interrupted = False
    with Log(how.log, header) as kept, Bar("search", None, how.progress) as bar:
        trials = Trials(
            source=model, batches=chosen_by, space=space, score=score, backend=how.backend, rounds=how.rounds, cost=how.cost,
            log=kept, goal=goal, bar=bar, timed=held[0].fresh(), deadline=until, limit=limit, match=how.match,
        )  # fmt: skip
        try:
            stopped = _explore(trials, goal)
            final = _playoff(trials, goal)
        except KeyboardInterrupt:
            interrupted, final = True, {}
            stopped = "it was interrupted" + ("" if how.log is None else f"; the same call goes on from {how.log}")
        chosen, problem = _choose(trials, goal, final, source) if trials.tried else (None, "")
        held_out = None if interrupted or chosen is None else judge(score, rest, model, trials.matched_net(chosen))
    evidence = Evidence(
        objective=goal.words,
        metric=score.name,
        source_metric=source,
        trials=tuple(trials.tried.values()),
        chosen=chosen.name if chosen else "",
        final=final,
        samples=sum(batch.samples for batch in chosen_by),
        seconds=time.monotonic() - begun,
        stopped=stopped,
        notes=(
            *at_chance(score, source),
            *_notes(score.name, source, chosen_by, max_drop, speedup),
            *(held_out.words(score.name, max_drop if speedup is None else None) if held_out else ()),
            *_of_matching(trials, chosen),
        ),
        machine=machine.describe(),
        held_out=held_out,
    )
    policy = None if chosen is None else space.policy(read_choices(chosen.choices, space.layers))
    if policy is not None:
        policy._evidence = evidence
    if interrupted:
        ended = SearchInterrupted(f"the search was interrupted after {len(trials.tried)} candidates; {stopped}")
        ended.policy, ended.evidence = policy, evidence
        raise ended
    if policy is None:
        error = SearchError(problem)
        error.evidence = evidence
        raise error
    if how.out is not None:
        try:
            evidence.save(how.out)
        except WriteError as failed:
            failed.policy = policy
            raise
    return policy


def choose(model: nn.Module, batches: Any, **options: Any) -> Policy:
    """``search`` after ``diagnose``, whose verdict says which mode is searched layer by layer. Raises as ``search``."""
    check_plain(model)
    given = as_given(batches, model)
    # With the model, which says which way round frames are, and, with labels, whether it needs their order.
    found: Diagnosis = diagnose(given, model)
    modes = ("collapse", "preserve") if found.verdict == "collapse" else ("preserve", "collapse")
    policy = search(model, given, **({"modes": modes} | options))
    policy._evidence = replace(policy.evidence, diagnosis=found)
    return policy


def _named(function: Any, otherwise: str) -> str | None:
    return None if function is None else getattr(function, "__qualname__", otherwise)


def _check_numbers(max_drop: float, speedup: float | None, time_limit: float | None) -> None:
    if not math.isfinite(max_drop):
        raise PolicyError(
            f"search: max_drop={max_drop} must be a finite number, the metric that may be lost (0.01: a point)"
        )
    if speedup is not None and not 1 <= speedup < math.inf:
        raise PolicyError(f"search: speedup={speedup} must be at least 1, in multiples of the source's speed")
    if time_limit is not None and not time_limit > 0:
        raise PolicyError(f"search: time_limit={time_limit} must be positive, in seconds")


def _goal(name: str, source: float, max_drop: float, speedup: float | None) -> Goal:
    if speedup is not None:
        return Goal(-math.inf, speedup, f"the best {name} at {speedup:g}x the source's speed or more")
    return Goal(source - max_drop, None, f"the fastest with {name} >= {source - max_drop:.4f} (source {source:.4f})")


def _explore(trials: Trials, goal: Goal) -> str:
    """Try candidates. Returns why it ended early, or ""."""
    work = {name: macs * trials.weight(name) for name, macs in trials.macs.items()}
    strategy = Strategy(trials, work)
    try:
        if not strategy.uniform():
            return ""
        strategy.alone()
        strategy.path(goal.fits if goal.speedup is None else None)
        fitting = [t for t in trials.tried.values() if not t.refused and goal.fits(t)]
        if fitting:
            best = strategy.climb(min(fitting, key=goal.rank), goal.better, goal.speedup is None)
            strategy.variants(best)
    except OutOfTime:
        return f"the time limit ended it after {trials.fresh} new measurements"
    return ""


def _playoff(trials: Trials, goal: Goal) -> dict[str, float]:
    """Milliseconds side by side of the source, the best few and the best uniform ones; empty where ``cost`` decides."""
    fitting = sorted((t for t in trials.tried.values() if not t.refused and goal.fits(t)), key=goal.rank)
    if not fitting or trials.cost is not None:
        return {}
    uniform = [t for t in fitting if t.uniform]
    fastest = sorted(fitting, key=lambda t: -t.speedup)
    some = {t.name: t for t in [*fitting[:FINALISTS], *uniform[:2], *fastest[:2]]}
    return trials.side_by_side(list(some.values()))


def _choose(trials: Trials, goal: Goal, final: dict[str, float], source: float) -> tuple[Trial | None, str]:
    """The winner, or None and why there is none."""
    tried = [t for t in trials.tried.values() if not t.refused]
    if final:
        speeds = {name: final["source"] / ms for name, ms in final.items() if name != "source"}
    else:
        speeds = {t.name: t.speedup for t in tried}
    running = [t for t in tried if t.name in speeds and goal.fits(replace(t, speedup=speeds[t.name]))]
    if not running:
        return None, _unreachable(trials, tried, goal, source, speeds)
    fastest = max(running, key=lambda t: speeds[t.name])
    if speeds[fastest.name] < 1:
        return None, (
            f"no policy is faster than the source here: within the goal ({goal.words}) the fastest is {fastest.name!r} at "
            f"{speeds[fastest.name]:.2f}x; leave this net as it is, or try larger batches, backend= or layers="
        )
    if goal.speedup is not None:
        return min(running, key=goal.rank), ""
    margin = SAME if final else 0.0  # a ``cost`` is exact
    alike = [t for t in running if speeds[t.name] >= max(1.0, speeds[fastest.name] / (1 + margin))]
    return min(alike, key=lambda t: (-t.metric, t.work, *simplicity(t))), ""


def _unreachable(trials: Trials, tried: Sequence[Trial], goal: Goal, source: float, speeds: Mapping[str, float]) -> str:
    metric = trials.score.name
    refused = [t for t in trials.tried.values() if t.refused]
    if not tried:
        return f"no layer may be converted alike in modes {trials.space.modes}: {refused[0].refused}"
    if goal.speedup is None:
        top = max(tried, key=lambda t: t.metric)
        return (
            f"no policy has {metric} >= {goal.floor:.4f}: the source has {source:.4f}, and the best of {len(tried)} tried, "
            f"{top.name!r}, {top.metric:.4f}; allow a larger max_drop"
        )
    # Of those that were timed side by side, where any were.
    fastest = max((t.name for t in tried if t.name in speeds), key=lambda name: speeds[name])
    return (
        f"no policy reaches {goal.speedup:g}x the source's speed: the fastest of {len(tried)} tried is {fastest!r} at "
        f"{speeds[fastest]:.2f}x; ask for less, or add layers=('conv', 'linear')"
    )


def _of_matching(trials: Trials, chosen: Trial | None) -> tuple[str, ...]:
    """What the user must do to have what was measured."""
    if trials.unmatched:
        return (trials.unmatched,)
    if trials.matcher is None or chosen is None or chosen.matched == NONE:
        return ()
    return (f"Measured as sj_tac.match(convert(model, policy), batches, method={chosen.matched!r}) leaves the net.",)


def _notes(metric: str, source: float, held: Sequence[Batch], max_drop: float, speedup: float | None) -> tuple[str, ...]:
    count = sum(batch.samples for batch in held)
    notes = []
    if metric in ("accuracy", "agreement"):
        spread = math.sqrt(max(source * (1 - source), 1 / count) / count)
        notes.append(
            f"One of {count} samples is {1 / count:.4f} of {metric}, its standard error about {spread:.4f}; the policy was "
            "chosen on these samples, so check it on others."
        )
        if speedup is None and 0 < max_drop < 1 / count:
            notes.append(f"max_drop {max_drop:g} is less than one sample: no prediction may get worse on balance.")
    return tuple(notes)
