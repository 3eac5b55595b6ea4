"""Match a converted net to its source without labels: correct what aggregated drives lose, and keep what proves nearer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from rich.table import Table
from torch import nn

from sj_tac import host
from sj_tac.definition.neurons import OperatorNeuron
from sj_tac.definition.noted import Noted
from sj_tac.errors import BatchError, ConversionError, MeasurementInterrupted, PolicyError, interrupted, refuse_unknown
from sj_tac.policy import nearest
from sj_tac.rewrites.corrections import MATCH, RECALIBRATE, Correction, is_as_made, loaded_matched, take_back
from sj_tac.rewrites.pipeline import Record, at_k_1, record_of
from sj_tac.support.memory import kept_meanwhile
from sj_tac.support.printing import Shown
from sj_tac.tuning.batches import Batch, collect
from sj_tac.tuning.comparing import Candidate, Comparison, Rates
from sj_tac.tuning.distilling import distil
from sj_tac.tuning.fitting import Aim, Fit, Places, put_all
from sj_tac.tuning.measure import Decode
from sj_tac.tuning.progress import Bar

NONE, DISTILLED = "none", "distilled"
# What a method fits: moments of drives, firing rates, or both.
METHODS = {NONE: (False, False), "moments": (True, False), "rates": (False, True), "both": (True, True)}
SAMPLES = 64


class MatchOptions(TypedDict, total=False):
    """What ``match`` takes by keyword beside the method."""

    steps: int
    samples: int
    decode: Decode | None
    seed: int
    progress: bool


@dataclass(frozen=True)
class Match(Shown):
    """What ``match`` did. ``print`` shows tables.

    Attributes:
        method: what was kept: "none", "moments", "rates", "both" or "distilled".
        candidates: all that were tried.
        layers: firing rates of every neuron.
        corrected: names of the modules that were written to.
        skipped: neurons whose rates could not be fitted, and why.
        fitted: how many samples it was fitted on.
        held_out: how many samples it was compared on.
        seconds: of the whole call.
        interrupted: not all methods were tried.
    """

    method: str
    candidates: tuple[Candidate, ...]
    layers: tuple[Rates, ...]
    corrected: tuple[str, ...]
    skipped: Mapping[str, str]
    fitted: int
    held_out: int
    seconds: float
    interrupted: bool = False

    @property
    def before(self) -> Candidate:
        """The converted net as it was."""
        return self.candidates[0]

    @property
    def after(self) -> Candidate:
        """The converted net as it is now."""
        return next(c for c in self.candidates if c.method == self.method)

    @property
    def sentence(self) -> str:
        """For a report."""
        before, after = (c.words for c in (self.before, self.after))
        if self.method == NONE:
            return f"matched: left as it is, {before} on {self.held_out} samples; no correction came nearer"
        return f"matched by {self.method!r} on {self.fitted} samples; on {self.held_out} others: {before} -> {after}"

    def __rich__(self) -> Table:
        head = (
            f"Matched by {self.method!r}, on {self.fitted} samples, chosen on {self.held_out} others, {self.seconds:.1f} s"
        )
        table = Table(title=head, title_justify="left", caption=self._words(), caption_justify="left")
        for column in ("neuron", "rate, source", "before", "after"):
            table.add_column(column, justify="left" if column == "neuron" else "right")
        for row in self.layers:
            table.add_row(row.neuron, f"{row.source:.4f}", f"{row.before:.4f}", f"{row.after:.4f}")
        return table

    def _words(self) -> str:
        tried = [f"{c.method}: {c.words}" for c in self.candidates]
        left = [f"{name} keeps its rate: {why}" for name, why in self.skipped.items()]
        stopped = ["interrupted: not all methods were tried"] if self.interrupted else []
        return "\n".join([*tried, *left, *stopped])


@dataclass
class _Tried:
    """What methods made of one net: values written, nets compared, neurons skipped; by the name of the method."""

    fits: dict[str, Any]
    compared: dict[str, Any]
    skipped: dict[str, Mapping[str, str]]

    @property
    def best(self) -> str:
        """The method whose outputs are nearest to the source's; of equals, "none"."""
        return _nearest(self.compared)


def _nearest(tried: Mapping[str, tuple[Candidate, Any]]) -> str:
    return min((c for c, _ in tried.values()), key=lambda c: (c.distance, c.method != NONE)).method


class Matcher:
    """Matches nets that were converted from one source, on the same samples; what is known of the source is measured once.

    Args:
        converted: one of them. At k = 1 it computes what the source does, and fused it does so faster.
        batches: every second sample is fitted, on the others methods are compared; at most ``samples`` of both are used.
    """

    def __init__(
        self,
        converted: nn.Module,
        batches: Sequence[Batch],
        decode: Decode | None = None,
        seed: int = 0,
        samples: int = SAMPLES,
    ) -> None:
        self.source, self.decode, self.seed = at_k_1(converted), decode, seed
        self.fitted, rest = _halves(batches, samples)
        self.compared = Comparison(self.source, rest, decode, seed)
        self.known: list[tuple[tuple[Places, bool], Aim]] = []

    def aim(self, places: Places, rates: bool) -> Aim:
        """What the source does where nets are corrected; ``rates``: of neurons, too."""
        found = next((aim for known, aim in self.known if known == (places, rates)), None)
        if found is None:
            found = Aim.of(self.source, places, self.fitted, self.seed, rates=rates)
            self.known.append(((places, rates), found))
        return found

    def __call__(
        self,
        converted: nn.Module,
        methods: Sequence[str],
        tick: Any = lambda what: None,
        steps: int = 0,
        keeps: bool = False,
    ) -> Match:
        """Correct a net in place; ``steps`` of distilling come last.

        Args:
            keeps: where it is interrupted, keep the best method until then, if one was compared.

        Raises:
            BatchError: the net is then as it was. MeasurementInterrupted: where ``keeps``.
        """
        begun = time.monotonic()
        record = record_of(converted, "match")
        _refuse_others(converted, record)
        places = Places.of(converted, record.plan)
        aim = self.aim(places, rates=any(METHODS[method][1] for method in methods))
        stopped = False
        with _all_or_nothing(converted, record, places):
            take_back(converted, record.corrected, [*record.corrected])
            plain = places.take(converted)
            tried = _Tried({NONE: plain}, {}, {NONE: {}})
            try:
                self._try(converted, places, aim, methods, tried, tick)
                if steps:
                    self._distil(converted, places, tried, steps, tick)
            except KeyboardInterrupt:
                if not keeps or len(tried.compared) < 2:
                    raise
                stopped = True
            best = tried.best
            put_all(converted, tried.fits[best])
        for name in plain:
            if any(not torch.equal(plain[name][key], value) for key, value in tried.fits[best][name].items()):
                role: Any = converted.get_submodule(name)._tac
                record.corrected[name] = Correction(MATCH, plain[name], tried.fits[best][name], role.moved)
                role.matched = role.fits
        made = Match(
            method=best,
            candidates=tuple(candidate for candidate, _ in tried.compared.values()),
            layers=self.compared.rates_of(tried.compared[NONE][1], tried.compared[best][1]),
            corrected=tuple(record.corrected),
            skipped=tried.skipped[best],
            fitted=self.fitted.samples,
            held_out=self.compared.samples,
            seconds=time.monotonic() - begun,
            interrupted=stopped,
        )
        record.matched = made.sentence
        if stopped:
            raise interrupted(f"match was interrupted; of {[*tried.compared]} the net keeps the nearest, {best!r}", made)
        return made

    def _try(self, converted: nn.Module, places: Places, aim: Aim, methods: Sequence[str], tried: _Tried, tick: Any) -> None:
        """Fit every method to the net as it came, and compare."""
        tried.compared[NONE] = self.compared(NONE, converted)
        tick(NONE)
        for method in methods:
            put_all(converted, tried.fits[NONE])
            fit = Fit(converted, places, aim, moments=METHODS[method][0], rates=METHODS[method][1])
            fit(self.fitted, self.seed)
            tried.fits[method], tried.skipped[method] = places.take(converted), fit.skipped
            tried.compared[method] = self.compared(method, converted)
            tick(method)

    def _distil(self, converted: nn.Module, places: Places, tried: _Tried, steps: int, tick: Any) -> None:
        """Move the best further, by gradient descent, and compare."""
        best = tried.best
        put_all(converted, tried.fits[best])
        distil(converted, self.source, places, self.fitted, steps=steps, seed=self.seed, decode=self.decode, tick=tick)
        tried.fits[DISTILLED], tried.skipped[DISTILLED] = places.take(converted), tried.skipped[best]
        tried.compared[DISTILLED] = self.compared(DISTILLED, converted)


def usual(converted: nn.Module) -> tuple[str, ...]:
    """The one method that is right for most nets of these neurons: rates for IF with hard reset, else moments."""
    nodes = [m for m in converted.modules() if isinstance(m, OperatorNeuron)]
    hard = [m for m in nodes if isinstance(m, host.neuron.IFNode) and m.v_reset is not None]
    return ("rates",) if 2 * len(hard) > len(nodes) else ("moments",)


@contextmanager
def _all_or_nothing(converted: nn.Module, record: Record, places: Places) -> Iterator[None]:
    """Put everything back that a fit writes, where it fails."""
    held, corrected = places.take(converted), dict(record.corrected)
    noted = [(role, role.matched, role.moved) for role in _noted(converted)]
    try:
        yield
    except BaseException:
        put_all(converted, held)
        record.corrected.clear()
        record.corrected.update(corrected)
        for role, matched, moved in noted:
            role.matched, role.moved = matched, moved
        raise


def _noted(converted: nn.Module) -> list[Noted]:
    return [m.__dict__["_tac"] for m in converted.modules() if isinstance(m.__dict__.get("_tac"), Noted)]


def _refuse_others(converted: nn.Module, record: Record) -> None:
    """Raise ConversionError where what is there is not the source's own."""
    recalibrated = [
        name
        for name, correction in record.corrected.items()
        if correction.by == RECALIBRATE and is_as_made(converted, name, correction)
    ]
    if recalibrated:
        raise ConversionError(
            f"match: the statistics of {recalibrated} were re-estimated, and are not the source's; sj_tac.recalibrate(net, "
            "undo=True) first"
        )
    loaded = loaded_matched(converted, record.corrected)
    if loaded:
        raise ConversionError(
            f"match: values of {[*loaded]} came matched in a checkpoint, so that the source's are not known; load the "
            "source's checkpoint first"
        )


def _halves(batches: Sequence[Batch], samples: int) -> tuple[Batch, list[Batch]]:
    """Every second sample, in one batch, and the others in theirs; at most ``samples`` of both."""
    total = sum(batch.samples for batch in batches)
    if total < 2:
        raise BatchError(
            "match needs at least two samples: one half is fitted, on the other methods are compared; give 16 or more"
        )
    frames = [batch.frames for batch in batches]
    first, parts, rest, at = batches[0], [], [], 0
    for batch, x in zip(batches, frames, strict=True):
        even = [i for i in range(batch.samples) if (at + i) % 2 == 0]
        odd = [i for i in range(batch.samples) if (at + i) % 2]
        at += batch.samples
        parts += [x[:, even]] if even else []
        rest += [Batch(x[:, odd], None, batch.batch_first)] if odd else []
    if any(part.shape[2:] != parts[0].shape[2:] for part in parts):
        shapes = sorted({tuple(part.shape[2:]) for part in parts})
        raise BatchError(
            f"match fits all samples at once, but they have frames of shapes {shapes}; give samples of one shape"
        )
    kept, left = [], samples
    for batch in rest:
        kept += [Batch(batch.frames[:, :left], None, batch.batch_first)] if left > 0 else []
        left -= batch.samples
    return Batch(torch.cat(parts, 1)[:, :samples], None, first.batch_first), kept


def unmatch(converted: nn.Module, record: Record) -> None:
    """Take back what ``match`` wrote, and what is said of it."""
    take_back(converted, record.corrected, [n for n, correction in record.corrected.items() if correction.by == MATCH])
    record.matched = ""


def match(
    converted: nn.Module, batches: Any = None, *, method: str = "auto", undo: bool = False, **options: Unpack[MatchOptions]
) -> Match | None:
    """Correct a converted net, in place, so that it answers as its source does. No labels are needed.

    Frames that share a drive make neurons fire more or less often than in the source, layer by layer more so. "moments"
    gives every drive the mean and the standard deviation that it has in the source; "rates" scales drives until every
    channel of a neuron fires as often as there; "both" does one after the other. Each is fitted on every second sample and
    compared on the others: what is nearest to the source, by the KL divergence of the outputs, stays. That may be "none".
    Corrections are written into running statistics (of a convolution without a norm, into its bias): no key is added, and
    nothing is slower. Equations: docs/equations.md. Meanwhile the process keeps its memory, as by ``keep_memory``; what is
    free is given back at the end.

    Args:
        converted: a net of ``sj_tac.convert``. Corrections fit its k and modes: ``set_k`` takes them back, as ``restore``
            and ``undo=True`` do.
        batches: a few batches of frames [T, N, C, H, W], 16 samples or more in all; labels are not used. "rates" wants them
            to be like those that will come; "moments" serves other ones, too.
        method: "auto" tries all; "moments", "rates" or "both" are tried beside "none".
        undo: take the corrections back instead.

    Keyword Args:
        steps: so many steps of gradient descent on the source's outputs move scales and
            shifts further, which is kept where held out samples come nearer ("distilled"); default 0, try 60.
        samples: at most so many are fitted, in one batch, as many compared; default 64.
        decode: from the net's output to class scores [N, C], where it is not [T, N, C] or [N, C]. Without it other outputs
            are compared by their mean squared difference.
        seed: of random encoders in the net, default 0.
        progress: show a bar, default True.

    Returns:
        What it did, a ``Match``; None where ``undo``.

    Raises:
        ConversionError: not a converted model, one that was recalibrated or got matched values from a checkpoint, one that
            cannot be copied, or nothing to undo.
        PolicyError: method, samples or steps.
        BatchError: batches that cannot be used, or that the model does not run on; nothing is then changed.
        MeasurementInterrupted: a KeyboardInterrupt; the net keeps the best method that was compared until then, or is as it
            was.
    """
    refuse_unknown("match", options, MatchOptions.__annotations__)
    record = record_of(converted, "match")
    if undo:
        if batches is not None:
            raise ConversionError("match: undo=True takes no batches; call it once without, once with them")
        if not record.matched:
            raise ConversionError("match: there is nothing to undo; this model was not matched")
        unmatch(converted, record)
        return None
    if method not in ("auto", *tuple(METHODS)[1:]):
        raise PolicyError(f"match: method={method!r}; {nearest(str(method), ['auto', *tuple(METHODS)[1:]])}")
    methods = tuple(METHODS)[1:] if method == "auto" else (method,)
    steps, samples = options.get("steps", 0), options.get("samples", SAMPLES)
    if type(steps) is not int or steps < 0:
        raise PolicyError(f"match: steps={steps!r} must be a whole number of at least 0, steps of distilling")
    if type(samples) is not int or samples < 1:
        raise PolicyError(f"match: samples={samples!r} must be a whole number of at least 1, the samples that are fitted")
    held = collect(batches, converted)
    try:
        # It would fetch the pages of its largest tensors anew in every run.
        with kept_meanwhile(), Bar("match", 1 + len(methods) + steps, options.get("progress", True)) as bar:
            matcher = Matcher(converted, held, options.get("decode"), options.get("seed", 0), samples)
            return matcher(converted, methods, bar.step, steps, keeps=True)
    except MeasurementInterrupted:
        raise
    except KeyboardInterrupt:
        raise interrupted("match was interrupted before a method was compared; the net is as it was") from None
