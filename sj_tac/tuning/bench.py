"""A model beside its conversions: accuracy, agreement, firing rate, MACs and time, in one table."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from rich.table import Table
from torch import nn

from sj_tac import host
from sj_tac.errors import PolicyError, interrupted
from sj_tac.rewrites.pipeline import check_plain, convert_with, plan, report
from sj_tac.support import machine, memory
from sj_tac.support.files import beside, write_text
from sj_tac.support.printing import Shown
from sj_tac.tuning import plots
from sj_tac.tuning.batches import Batch, collect
from sj_tac.tuning.matching import Matcher, usual
from sj_tac.tuning.measure import accuracy, check_labels, firing, labels_of, medians, scores, seconds_afresh
from sj_tac.tuning.options import Measurement, MeasurementOptions
from sj_tac.tuning.progress import Bar
from sj_tac.verdicts import total_macs

SOURCE = "SpikingJelly"
FOLDED = "SpikingJelly, BN folded"
COMPILED = "SpikingJelly, BN folded, torch.compile"


def host_configurations(net: nn.Module, compiled: bool = False) -> dict[str, nn.Module]:
    """What a converted net is compared with: the source as it is, with SpikingJelly's own conv-BN folding, and compiled."""
    folded = host.folded(net)
    found = {SOURCE: net} if folded is None else {SOURCE: net, FOLDED: folded}
    if compiled:
        again: Any = host.folded(net)
        found[COMPILED] = cast(nn.Module, torch.compile(net if again is None else again))
    return found


@dataclass(frozen=True)
class Row:
    """One net. ``accuracy``: None without labels; ``agreement``: share of the source's predictions that it shares;
    ``macs``: of the convolutions, per sample. Of the first batch alone: ``firing``, spikes per neuron and step; ``ms``, a
    median; ``speedup``, over the fastest of SpikingJelly's rows. The last two are None where that was interrupted before."""

    name: str
    host: bool
    accuracy: float | None
    agreement: float
    firing: float
    macs: int
    ms: float | None
    speedup: float | None


@dataclass(frozen=True)
class Bench(Shown):
    """Rows of one model on the same batches. ``print`` shows a table; ``save`` writes JSON and a picture.

    Attributes:
        title: of the table.
        rows: SpikingJelly's own and one for each policy; ``bench["preserve k=4"]`` is the one of that name.
        samples: how many accuracy and agreement were measured on.
        timed: shape of the batch that was timed.
        rounds: timed rounds, all nets in turns.
        machine: what it ran on.
        interrupted: rows and times that are missing were not measured; times may be of fewer rounds.
    """

    title: str
    rows: tuple[Row, ...]
    samples: int
    timed: tuple[int, ...]
    rounds: int
    machine: dict[str, Any]
    interrupted: bool = False

    def __getitem__(self, name: str) -> Row:
        """The row of that name. Raises KeyError."""
        return {row.name: row for row in self.rows}[name]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """JSON at ``path``, accuracy and speed-up as bars in a PNG beside it. Returns the PNG's path.

        Raises:
            WriteError: a file could not be written, or ``path`` is that of the PNG itself, or of a pipe.
            ImportError: no matplotlib.
        """
        picture = beside(path, ".png")
        write_text(path, self.to_json() + "\n")
        plots.bars(picture, [self])
        return picture

    def __rich__(self) -> Table:
        rounds = f"at least {self.rounds} round{'s' if self.rounds > 1 else ''}"
        about = (
            f"Agreement: same prediction as {SOURCE}. Speed-up: over the fastest SpikingJelly row; medians of {rounds}, all "
            f"in turns, input {list(self.timed)}. Memory mode: {self.machine.get('memory', memory.DEFAULT)}."
        )
        table = Table(
            title=self.title + (" (interrupted)" if self.interrupted else ""),
            title_justify="left",
            caption=about,
            caption_justify="left",
        )
        table.add_column("net")
        for column in ("accuracy %", "agreement %", "firing rate", "conv MACs/sample", "ms/batch", "speed-up"):
            table.add_column(column, justify="right")
        for r in self.rows:
            table.add_row(
                r.name,
                "-" if r.accuracy is None else f"{100 * r.accuracy:.1f}",
                f"{100 * r.agreement:.1f}",
                f"{r.firing:.3f}",
                f"{r.macs / 1e6:.1f} M",
                "-" if r.ms is None else f"{r.ms:.1f}",
                "-" if r.speedup is None else f"{r.speedup:.2f}x",
            )
        return table


def bench(
    model: nn.Module,
    batches: Any,
    policies: Mapping[str, Any] | Sequence[Any] = ("preserve:2", "preserve:4", "collapse:4"),
    *,
    title: str = "",
    compiled: bool = False,
    match: Any = None,
    time_limit: float | None = None,
    **options: Unpack[MeasurementOptions],
) -> Bench:
    """Measure the model and its conversions on the same batches; the first batch is timed.

    Args:
        model: a SpikingJelly net in step_mode "m"; left untouched, measured in eval mode.
        batches: frames [T, N, C, H, W] or (frames, labels), kept in memory.
        policies: what ``sj_tac.convert`` takes, "preserve:4", a path, a dict or a ``Policy``; in a dict by the name of their
            row; a pair (policy, k) where the policy does not say k.
        title: of the table; default: the model's class.
        compiled: compare with torch.compile of the source as well (minutes).
        match: batches that every conversion is matched by before it is measured, as a search does it; others than
            ``batches``, or what they say of accuracy is too good.
        time_limit: seconds after which no further round is timed; what every net answers, and one round, are measured in
            any case.

    Keyword Args:
        rounds: timed rounds, all nets in turns, default 9.
        decode: from the net's output to class scores [N, C], where it is not [T, N, C] or [N, C].
        backend: as ``sj_tac.convert``.
        seed: of random encoders in the net, default 0.
        progress: show a bar, default True.

    Raises:
        BatchError: batches that cannot be used, or labels that are none of the output's classes.
        PolicyError: two rows of one name, or a time_limit that is not positive. Otherwise as ``sj_tac.convert``.
        MeasurementInterrupted: a KeyboardInterrupt, with the rows that were finished until then.
    """
    begun = time.monotonic()
    how = Measurement.read("bench", 9, options)
    if time_limit is not None and not time_limit > 0:
        raise PolicyError(f"bench: time_limit={time_limit} must be positive, in seconds")
    check_plain(model)
    held = collect(batches, model)
    example = held[0].example()
    nets = host_configurations(model, compiled)
    hosts = set(nets)
    make: dict[str, Callable[[], nn.Module]] = {name: partial(nets.__getitem__, name) for name in nets}
    rows = _named_rows(policies)
    for name, (policy, k) in rows:
        if name in nets:
            raise PolicyError(f"bench: two rows are named {name!r}; give each policy a name of its own")
        make[name] = partial(convert_with, model, policy, k, example_input=example, backend=how.backend)
        nets[name] = make[name]()
    if match is not None:
        _match([nets[name] for name, _ in rows], collect(match, model), how)
    before, _ = total_macs(plan(model, example_input=example).verdicts)
    truth = labels_of(held, "accuracy") if held[0].labels is not None else None
    said: dict[str, torch.Tensor] = {}
    rates: dict[str, float] = {}
    seconds: dict[str, list[float]] = {}
    stopped = False
    with Bar("bench", len(nets) + 1, how.progress) as bar:
        try:
            for name, net in nets.items():
                given = scores(net, held, how.decode, how.seed)
                if truth is not None:
                    check_labels(truth, given.shape[1])
                said[name] = given.argmax(1)
                # Compiled code has no modules to watch; it is the source's.
                rates[name] = rates[SOURCE] if name == COMPILED else _rate(net, held[:1])
                bar.step(name)
            until = math.inf if time_limit is None else begun + time_limit
            seconds_afresh(make, held[0].fresh(), how.rounds, SOURCE, until=until, seconds=seconds)
        except KeyboardInterrupt:
            if not rates:
                raise interrupted("bench was interrupted before a row was finished") from None
            stopped = True
    taken = medians(seconds)
    best = min((taken[name] for name in hosts if name in taken), default=0.0)
    found = Bench(
        title=title or type(model).__name__,
        rows=tuple(
            Row(
                name=name,
                host=name in hosts,
                accuracy=None if truth is None else accuracy(said[name], truth),
                agreement=accuracy(said[name], said[SOURCE]),
                firing=rates[name],
                macs=before if name in hosts else total_macs(report(nets[name]).verdicts)[1],
                ms=taken.get(name),
                speedup=best / taken[name] if name in taken else None,
            )
            for name in rates
        ),
        samples=sum(batch.samples for batch in held),
        timed=tuple(held[0].frames.shape),
        rounds=min(map(len, seconds.values()), default=0),
        machine=machine.describe(),
        interrupted=stopped,
    )
    if stopped:
        times = "their times are of fewer rounds" if taken else "none of them is timed"
        raise interrupted(f"bench was interrupted after {len(rates)} of {len(nets)} rows; {times}", found)
    return found


def _named_rows(policies: Mapping[str, Any] | Sequence[Any]) -> list[tuple[str, tuple[Any, int]]]:
    """Rows with their names, policies and ks."""
    if isinstance(policies, str):
        raise PolicyError(f"bench: policies={policies!r} are a list, as [{policies!r}], or a dict by the names of rows")
    named = policies.items() if isinstance(policies, Mapping) else ((_row_name(policy), policy) for policy in policies)
    return [(name, given if isinstance(given, tuple) else (given, 2)) for name, given in named]


def _row_name(policy: Any) -> str:
    mode, colon, k = policy.partition(":") if isinstance(policy, str) else ("", "", "")
    if colon and mode in ("preserve", "collapse"):
        return f"{mode} k={k}"
    if isinstance(policy, (str, os.PathLike)):
        return str(policy)
    raise PolicyError(
        f"bench: a row for a {type(policy).__name__} has no name; give a dict, {{'mine': policy}}, or 'preserve:4' and files"
    )


def _match(nets: Sequence[nn.Module], held: Sequence[Batch], how: Measurement) -> None:
    """Match conversions of one source, as a search does it."""
    if nets:
        matcher = Matcher(nets[0], held, how.decode, how.seed)
        for net in nets:
            matcher(net, usual(net))


def _rate(net: nn.Module, held: Sequence[Batch]) -> float:
    found = firing(net, held).values()
    neurons = sum(count for _, count in found)
    return sum(rate * count for rate, count in found) / neurons if neurons else 0.0
