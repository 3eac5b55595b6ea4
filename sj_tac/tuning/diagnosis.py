"""Is time signal or noise in this data, and at every layer's input? With a p-value, an effect size and the reasons."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import BatchError, ModelTypeError, interrupted
from sj_tac.support.printing import Shown
from sj_tac.tuning.batches import Batch, read
from sj_tac.tuning.measure import Decode, is_scores, run_batch
from sj_tac.tuning.ordering import Ordering
from sj_tac.tuning.reordering import Reordered, Reordering

Outcome = Literal["collapse", "preserve", "undecided"]
# The share of what neighbouring frames have in common that a group may lose when it is averaged.
LOST = 0.25
SUGGESTED = (2, 4, 8, 16)
MEASURED = (
    "Measured is whether neighbouring frames are alike, which is not whether anything needs their order; with a model and "
    "labels its accuracy on shuffled and reversed frames is, and decides."
)


@dataclass(frozen=True)
class Diagnosis(Shown):
    """Whether the order of frames carries anything.

    Attributes:
        verdict: "preserve", "collapse" or "undecided".
        p_value: two-sided, of the ratio among re-orderings of the frames of every sample; 1 / (permutations + 1) at least.
        effect: 1 - ratio. Above 0 neighbouring frames are alike, below 0 they are less alike than any two.
        ratio: mean squared distance of neighbouring frames over that of any two of the same sample; 1 where frames can be
            exchanged.
        resolution: half the confidence interval of the effect at ``level``.
        margin: up to which an effect is negligible.
        samples: how many were seen.
        steps: T.
        ordered: the share of samples whose own p-value is below ``level``.
        suggested_k: frames that may share one convolution, as far as the data says; None where undecided.
        lags: the ratio at every lag 1 .. T-1.
        reasons: the verdict in words.
        reordered: the model's accuracy on shuffled and reversed frames, where there were a model and labels; where that can
            tell, it is what decides.
        layers: the same for the input of every convolution, where a model was given. Neurons remember, so spikes deep in a
            net nearly always have an order; it is the input's verdict that counts.
        interrupted: batches that were to come were not seen.
    """

    verdict: Outcome
    p_value: float
    effect: float
    ratio: float
    resolution: float
    margin: float
    level: float
    samples: int
    steps: int
    ordered: float
    suggested_k: int | None
    lags: tuple[float, ...]
    reasons: tuple[str, ...]
    layers: dict[str, Diagnosis] = field(default_factory=dict)
    reordered: Reordered | None = None
    interrupted: bool = False

    def __rich__(self) -> Group | Table:
        seen = f"{self.samples} samples of T = {self.steps}{', interrupted' if self.interrupted else ''}"
        table = Table(title=f"Time in {seen}: {self.verdict}", title_justify="left")
        for column in ("input of", "verdict", "ratio", "effect", "p", "samples with order", "k"):
            table.add_column(column, justify="left" if column in ("input of", "verdict") else "right")
        for name, found in {"the net": self, **self.layers}.items():
            table.add_row(
                name,
                found.verdict,
                f"{found.ratio:.3f}",
                f"{found.effect:+.3f} ± {found.resolution:.3f}",
                f"{found.p_value:.3g}",
                f"{100 * found.ordered:.0f} %",
                str(found.suggested_k or "-"),
            )
        return Group(table, *self.reasons, MEASURED)


def diagnose(
    batches: Any,
    model: nn.Module | None = None,
    *,
    level: float = 0.05,
    margin: float = 0.05,
    permutations: int = 999,
    seed: int = 0,
    decode: Decode | None = None,
) -> Diagnosis:
    """Whether time is signal (preserve it) or noise (collapse it).

    What is measured is whether neighbouring frames are alike. That is not whether a net needs their order: with a model and
    labels its accuracy on shuffled and on reversed frames is measured, too, and decides wherever it can tell.

    Distances between neighbouring frames are set against those between any two frames of the same sample; a permutation test
    says how often re-ordered frames would do the same. "preserve": p < ``level`` and the effect is at least ``margin``.
    "collapse": the whole confidence interval of the effect is within ``margin``. "undecided": neither; take more samples.

    Args:
        batches: an iterable of frames [T, N, C, H, W] or (frames, labels); read once, batch by batch.
        model: a SpikingJelly net in step_mode "m"; then the input of every convolution is tested, too. Left as it was.
        level: of the tests, in (0, 1).
        margin: the effect up to which order is negligible.
        permutations: re-orderings of every sample, at least 19.
        seed: of the re-orderings.
        decode: from the model's output to class scores [N, C], where it is not [T, N, C] or [N, C]. Without it nothing is
            said of the accuracy of models of other outputs.

    Raises:
        BatchError: batches that cannot be used, or that the model does not run on; one recording [T, 2, H, W] whose
            polarities would be taken for samples; labels that are none of the output's classes.
        ValueError: a level, margin or number of permutations out of range.
        ModelTypeError: ``model`` is none.
        MeasurementInterrupted: a KeyboardInterrupt, with what the batches until then say.
    """
    if not 0 < level < 1 or margin <= 0 or permutations < 19:
        raise ValueError(
            f"diagnose: level={level} must be in (0, 1), margin={margin} positive, permutations={permutations} at least 19"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise ModelTypeError(f"diagnose: a model is a torch.nn.Module, got {type(model).__name__}: {str(model)[:80]!r}")
    whole = _Seen(Ordering(permutations, level, seed), Reordering(decode, seed))
    stopped = False
    try:
        for number, batch in enumerate(read(batches, model)):
            # A batch counts as a whole or not at all: the next one is added to a copy.
            more = whole.copy()
            more.add(batch, model, number)
            whole = more
    except KeyboardInterrupt:
        if not whole.batches:
            raise interrupted("diagnose was interrupted before a batch was seen") from None
        stopped = True
    layers = {name: _judged(order, whole.steps, margin, {}) for name, order in whole.layers.items()}
    found = _judged(whole.order, whole.steps, margin, layers)
    found = found if not whole.reordering.labels else _decided(found, whole.reordering.result(level, margin))
    if stopped:
        said = f"diagnose was interrupted after {whole.batches} batches, {whole.order.samples} samples"
        raise interrupted(said, replace(found, interrupted=True))
    return found


@dataclass
class _Seen:
    """What was seen of the batches so far: the frames, the inputs of convolutions, what the model says in other orders."""

    order: Ordering
    reordering: Reordering
    layers: dict[str, Ordering] = field(default_factory=dict)
    steps: int = 0
    batches: int = 0

    def copy(self) -> _Seen:
        """The same, to be added to."""
        return replace(self, order=self.order.copy(), reordering=self.reordering.copy(), layers=_copies(self.layers))

    def add(self, batch: Batch, model: nn.Module | None, number: int) -> None:
        """One batch. Raises BatchError."""
        self.steps = batch.steps
        if model is None:
            _refuse_recording(batch)
        self.order.add(batch.frames)
        if model is not None:
            with host.looked_at(model), _inputs(model, batch.steps, batch.samples, self._layer):
                output = run_batch(model, batch.on(model), number)
            if batch.labels is not None and (self.reordering.decode is not None or is_scores(output, batch)):
                self.reordering.add(model, batch.on(model), number)
        self.batches += 1

    def _layer(self, name: str, frames: Tensor) -> None:
        # Every layer has re-orderings of its own, whatever other layers there are.
        if name not in self.layers:
            own = self.reordering.seed ^ zlib.crc32(name.encode())
            self.layers[name] = Ordering(self.order.permutations, self.order.level, own)
        self.layers[name].add(frames)


def _copies(orders: Mapping[str, Ordering]) -> dict[str, Ordering]:
    return {name: order.copy() for name, order in orders.items()}


def _decided(found: Diagnosis, by: Reordered) -> Diagnosis:
    """What accuracy says goes before what frames look like."""
    reasons = (*found.reasons, by.reason)
    if by.verdict in ("undecided", found.verdict):
        return replace(found, reordered=by, reasons=reasons)
    k = max(k for k in (2, 4, 8) if k <= max(2, found.steps)) if by.verdict == "collapse" else found.suggested_k or 2
    why = f"Frames alone would say {found.verdict}; k = {k} suggested, which sj_tac.search measures."
    return replace(found, verdict=by.verdict, suggested_k=k, reordered=by, reasons=(*reasons, why))


def _refuse_recording(batch: Batch) -> None:
    """Raise BatchError where frames look like one recording without a sample dimension."""
    shape = list(batch.frames.shape)
    recording = (len(shape) == 4 and shape[1] == 2 and min(shape[2:]) > 7) or (len(shape) == 3 and shape[1] == shape[2] > 7)
    if recording and batch.labels is None:
        what = "[T, 2, H, W], whose polarities" if len(shape) == 4 else "[T, H, W], whose rows"
        raise BatchError(
            f"frames {shape} look like one recording, {what} would be taken for samples; frames.unsqueeze(1) puts the "
            "sample dimension in. Where they are samples, give labels with them"
        )


@contextmanager
def _inputs(model: nn.Module, steps: int, samples: int, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Hand every convolution's input to ``see`` as frames [T, N, ...]; what has no T in front is left out."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args and isinstance(args[0], Tensor) else None
            if x is not None and x.shape[:2] == (steps, samples):
                see(name, x)
            elif x is not None and x.shape[0] == steps * samples:  # time folded into the batch
                see(name, x.view(steps, samples, *x.shape[1:]))

        return look

    convs = [(name, module) for name, module in model.named_modules() if host.is_conv(module)]
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in convs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _judged(found: Ordering, steps: int, margin: float, layers: dict[str, Diagnosis]) -> Diagnosis:
    effect, p, within, level = 1 - found.mean, found.p_value, found.resolution, found.level
    facts = (
        f"Neighbouring frames differ {found.mean:.3f} times as much as any two frames of a sample (exchangeable frames: 1), "
        f"p = {p:.3g}; by themselves {100 * found.ordered / found.samples:.0f} % of {found.samples} samples show order at "
        f"level {level:g} (by chance: {100 * level:.0f} %)."
    )
    outcome: Outcome
    if steps < 3:
        outcome, why = "undecided", f"T = {steps}: the one distance between two frames has no order to compare with."
    elif found.constant == found.samples:
        outcome, why = "collapse", "Within each sample all frames are the same (direct coding): time carries nothing."
    elif p < level and abs(effect) >= margin:
        kind = "alike" if effect > 0 else "unlike"
        outcome = "preserve"
        why = f"Order is signal: neighbours are more {kind} than chance, by {abs(effect):.3f}, beyond the margin {margin:g}."
    elif abs(effect) + within < margin:
        outcome = "collapse"
        most = abs(effect) + within
        why = f"Order is noise: whatever effect there is lies within ± {most:.3f}, inside the margin {margin:g}."
    else:
        outcome = "undecided"
        why = (
            f"The effect, {effect:+.3f} ± {within:.3f}, cannot be told from the margin {margin:g}, in or out; "
            f"{found.samples} samples are too few for that."
        )
    reasons = [facts, why]
    k = None
    if outcome == "collapse":
        k = max(k for k in (2, 4, 8) if k <= max(2, steps))
        reasons.append(f"k = {k} suggested: the data sets no limit, neurons do; sj_tac.search measures how far it may go.")
    elif outcome == "preserve":
        fitting = [k for k in SUGGESTED if k <= steps and found.kept(k) >= 1 - LOST] if effect > 0 else []
        k = max(fitting, default=2)
        left = {k: found.kept(k) for k in SUGGESTED if k <= steps}
        told = ", ".join(f"{100 * share:.0f} % at k = {k}" for k, share in left.items())
        reasons.append(f"k = {k} suggested: of what neighbours share, groups of k frames keep {told}.")
    if found.constant and found.constant < found.samples:
        reasons.append(f"{found.constant} samples have frames that are all alike; they count as exchangeable.")
    return Diagnosis(
        verdict=outcome,
        p_value=p,
        effect=float(effect),
        ratio=float(found.mean),
        resolution=float(within),
        margin=margin,
        level=level,
        samples=found.samples,
        steps=steps,
        ordered=found.ordered / found.samples,
        suggested_k=k,
        lags=tuple(found.ratios()),
        reasons=tuple(reasons),
        layers=layers,
    )
