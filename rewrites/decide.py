"""What a policy makes of a net that was measured: which convolutions share, who emits means, and what cannot be.

A collapse makes frames equal in groups. The walk below goes through convolutions and neurons in the order of their calls,
and gives each a ``Span``: how many rows of its input are equal because of the collapses in front of it. Nothing here runs
the net, so ``set_k`` decides again without an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from sj_tac import host
from sj_tac.definition import collapse, convs, neurons, noted
from sj_tac.policy import SOURCE, Settings
from sj_tac.rewrites.measure.codes import OUTPUT
from sj_tac.rewrites.measure.measured import Measured, Shared
from sj_tac.verdicts import Reason, Refusal


class Span(NamedTuple):
    """How far frames are equal: a frame counts ``stretch`` steps of a neuron, each of ``rate`` rows of the tensor."""

    rate: int = 1
    stretch: int = 1

    @property
    def rows(self) -> int:
        """Equal rows."""
        return self.rate * self.stretch


PLAIN = Span()


@dataclass(frozen=True)
class Place:
    """A converted convolution: its settings, with "mixed" weights resolved, and the span of its input."""

    settings: Settings
    span: Span = PLAIN

    @property
    def k(self) -> int:
        """Steps in a group."""
        return max(self.settings.k, self.span.stretch)

    @property
    def frames(self) -> int:
        """Frames that differ in a group: so many learned weights there are."""
        return max(1, self.settings.k // self.span.stretch)


@dataclass(frozen=True)
class Point:
    """A neuron whose span is not plain.

    Attributes:
        span: of its output. merging: what it does behind, or in, a binary collapse. at: the module that emits the means,
            itself or a MaxPool; empty if no module does.
        by: the convolution whose collapse begins here; empty for a neuron that is stretched by one in front.
    """

    span: Span
    merging: neurons.Merging | None = None
    at: str = ""
    by: str = ""


@dataclass
class Decision:
    """What becomes of a net's layers.

    Attributes:
        places: converted convolutions. points: neurons. refused: why other convolutions stay.
        early: of a convolution that collapses, why its neuron emits frames all the same.
        behind: kept convolutions that run behind a collapse, with their span.
        groups: how many equal frames of the output stand for one, where ``emit: groups`` leaves one of them; else 1.
    """

    places: dict[str, Place] = field(default_factory=dict)
    points: dict[str, Point] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    early: dict[str, str] = field(default_factory=dict)
    behind: dict[str, Span] = field(default_factory=dict)
    groups: int = 1

    def rate(self, name: str) -> tuple[int, Span]:
        """Return how many frames a convolution or neuron takes at once, and the span of its frames."""
        if name in self.places:
            return self.places[name].k, self.places[name].span
        return 1, self.points[name].span if name in self.points else self.behind.get(name, PLAIN)


def decide(measured: Measured, model: nn.Module, settings: Mapping[str, Settings]) -> Decision:
    """Return what ``settings`` make of a measured net. Where a layer turns out to be impossible the walk begins again."""
    refused: dict[str, Refusal] = {}
    while True:
        walk = _Walk(measured, model, settings, refused)
        found = walk.run()
        if not walk.impossible:
            return found
        refused |= walk.impossible


class _Walk:
    def __init__(
        self, measured: Measured, model: nn.Module, settings: Mapping[str, Settings], refused: Mapping[str, Refusal]
    ) -> None:
        self.measured, self.model, self.settings, self.found = measured, model, settings, Decision()
        self.impossible: dict[str, Refusal] = {}
        # What leaves each convolution and neuron; and of convolutions whether a neuron behind may emit means.
        self.spans: dict[str, Span] = {}
        self.collapsing: dict[str, Settings] = {}
        for name, found in measured.convolutions.items():
            wanted = settings[name]
            if isinstance(found, Refusal):
                self.found.refused[name] = found
            elif name in refused:
                self.found.refused[name] = refused[name]
            elif wanted.mode != "keep" and not found.is_affine and not wanted.approximate and wanted.k > 1:
                off = f"shared drives are off by {found.off:.2g} of their norm" if found.off else "its path is not affine"
                self.found.refused[name] = Refusal(Reason.NOT_AFFINE, off)

    def run(self) -> Decision:
        for name in self.measured.calls:
            if name in self.measured.convolutions:
                self.convolve(name)
            elif name in self.measured.neurons:
                self.fire(name)
        self.found.places = {n: self._weighed(n, place) for n, place in self.found.places.items()}
        last = [*self.collapsing.values()][-1:]
        if last and last[0].emit == "groups":
            self.found.groups = self.entering(OUTPUT)[0].rows
        return self.found

    def entering(self, name: str) -> tuple[Span, str]:
        """Return the span of a module's input, and why it is plain where something in front is not."""
        sources = self.measured.sources.get(name, set())
        spans = {self.spans.get(source, PLAIN) for source in sources}
        if not spans or spans == {PLAIN}:
            return PLAIN, ""
        if self.measured.calls.get(name, 1) > 1:
            return PLAIN, "it is called more than once"
        if len(spans) > 1:
            return PLAIN, "frames at different rates meet in front of it"
        return (spans.pop(), "") if name in self.measured.alike else (PLAIN, "frames differ in front of it")

    def convolve(self, name: str) -> None:
        if name in self.found.refused:
            return
        settings = self.settings[name]
        span = self.spans[name] = self.entering(name)[0]
        if settings.mode == "keep":
            if span != PLAIN:
                self.found.behind[name] = span
            return
        if settings.k > span.stretch and settings.k % span.stretch:
            steps = f"{span.stretch}, the steps that a frame stands for behind the collapse before it"
            self.impossible[name] = Refusal(Reason.K_NOT_WHOLE, f"k={settings.k} is no multiple of {steps}")
            return
        place = self.found.places[name] = Place(settings, span)
        if settings.mode == "collapse" and place.k > 1:
            self.collapsing[name] = settings
            self.spans[name] = Span(span.rate, place.k)

    def fire(self, name: str) -> None:
        sources = self.measured.sources.get(name, set())
        opened = [source for source in sources if source in self.collapsing]
        span, why = self.entering(name)
        layout = self.measured.neurons[name].layout
        if opened and (layout.folded or layout.dim):
            self.impossible |= {conv: Refusal(Reason.COLLAPSE_FOLDED) for conv in opened}
            return
        binary = [conv for conv in opened if self.collapsing[conv].spikes == "binary"]
        known = neurons.is_known(self.model.get_submodule(name))
        if binary and not (known and span != PLAIN and self._is_direct(binary[0], name)):
            detail = why or (
                "a binary collapse makes one step of several, which only SpikingJelly's neurons take, with no other input"
            )
            self.impossible |= {conv: Refusal(Reason.COLLAPSE_BRANCHED, f"{name!r}: {detail}") for conv in binary}
            return
        if span == PLAIN or layout.folded or layout.dim or (span.rate > 1 and not known):
            self.found.early |= {conv: f"frames come back before {name!r}: {why}" for conv in opened}
            return
        if binary:
            merging = neurons.Merging(span.rate, span.stretch, self.collapsing[binary[0]].normalize)
            point = Point(Span(span.rows), merging, "", binary[0])
        else:
            at = "" if span.stretch == 1 else self.measured.pools.get(name, name)
            point = Point(span, neurons.Merging(span.rate) if span.rate > 1 else None, at, opened[0] if opened else "")
        self.found.points[name], self.spans[name] = point, point.span

    def _is_direct(self, conv: str, neuron: str) -> bool:
        found = self.measured.convolutions[conv]
        return isinstance(found, Shared) and found.neurons == (neuron,) and self.measured.sources[neuron] == {conv}

    def _weighed(self, name: str, place: Place) -> Place:
        """Return it without "mixed": spikes of neurons with shared drives are counted, other frames decay.

        Within a group such a neuron's spikes come when its voltage has risen, which says nothing of when anything happened.
        Frames from outside are the newer, the more they say of the group's end.
        """
        if place.settings.weights != "mixed":
            return place
        sources = self.measured.sources.get(name, set())
        shared = {n for c, p in self.found.places.items() if p.k > 1 for n in self.measured.shared[c].neurons}
        counts = sources and sources <= shared and name in self.measured.alike
        weights = "uniform" if counts else "decay"
        return replace(place, settings=place.settings.model_copy(update={"weights": weights}))


def sharing(place: Place, found: Shared, model: nn.Module) -> convs.Sharing:
    """Return how the definition runs a convolution."""
    s, span = place.settings, place.span
    weights: Any = s.weights
    normalize = s.normalize
    if s.k <= span.stretch and span.stretch > 1:  # its frames are equal within a group
        weights, normalize = "uniform", True
    dtype = None if s.dtype == SOURCE else getattr(torch, s.dtype)
    return replace(
        found.sharing(place.k, model),
        weights=weights,
        normalize=normalize,
        stretch=span.stretch,
        rate=span.rate,
        dtype=dtype,
    )


def apply(decision: Decision, measured: Measured, model: nn.Module) -> None:
    """Make a decision true in a model, in place, whatever an earlier one made of it."""
    neurons.swap(model)
    plan = {name: sharing(place, measured.shared[name], model) for name, place in decision.places.items()}
    convs.undo(model, but=plan)
    convs.share(model, plan)
    for name, place in decision.places.items():
        s = place.settings
        model.get_submodule(name)._tac.fits = noted.words(s.mode, s.k, s.weights)  # type: ignore[union-attr]
    for name, module in model.named_modules():
        if isinstance(module, neurons.OperatorNeuron):
            module.merging = decision.points[name].merging if name in decision.points else None
    means = {
        point.at: collapse.Mean(point.span.stretch, point.span.rate, measured.neurons[name].layout.frames, point.at)
        for name, point in decision.points.items()
        if point.at
    }
    collapse.put_means(model, means, decision.groups)
    noted.note_norms(model, norms(decision, measured))
    host.forget_reset_cache(model)


def norms(decision: Decision, measured: Measured) -> dict[str, noted.Noted]:
    """Return what is to be noted of the BatchNorms behind converted convolutions, and of those behind a collapse."""
    found = {}
    for name in measured.norms:
        sources = sorted(measured.sources.get(name, set()))
        converted = [source for source in sources if source in decision.places]
        is_aggregated = any(decision.rate(source) != (1, PLAIN) for source in sources)
        if converted:
            s = decision.places[converted[0]].settings
            found[name] = noted.Noted(converted[0], noted.words(s.mode, s.k, s.weights), aggregated=is_aggregated)
        elif is_aggregated:
            found[name] = noted.Noted(name, "the rate of a collapse before it", aggregated=True)
    return found


def undo(model: nn.Module) -> None:
    """Give every module its own class again, and take the hooks of ``apply`` away."""
    convs.undo(model)
    collapse.put_means(model, {}, 1)
    neurons.undo(model)
    for module in model.modules():
        noted.forget(module)
    host.forget_reset_cache(model)
