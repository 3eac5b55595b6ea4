"""What each layer loses and gains at each k, converted alone: predictions, outputs, firing rates and milliseconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from rich.table import Table
from torch import Tensor, nn

from sj_tac.errors import PolicyError, interrupted
from sj_tac.rewrites.pipeline import Source, check_plain, report
from sj_tac.support import machine
from sj_tac.support.files import beside, write_text
from sj_tac.support.printing import Shown
from sj_tac.tuning.batches import Batch, collect
from sj_tac.tuning.measure import firing, milliseconds, scores
from sj_tac.tuning.options import Measurement, MeasurementOptions
from sj_tac.tuning.plots import heat_map
from sj_tac.tuning.progress import Bar
from sj_tac.tuning.space import Choice, Space

Firing = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Effect:
    """One layer converted alone, against the source on the same batches.

    Attributes:
        disagreement: share of samples whose predicted class differs; kl: KL(source || converted) of the softmax of the
            class scores, in nats, mean over samples.
        drift: spikes gained and lost, summed over the layers' mean rates, as a share of all spikes of the source.
        ms_saved: of the first batch's run; speedup: source / converted. Medians of interleaved rounds.
        refused: why the layer cannot take this setting; the figures are then None.
    """

    layer: str
    mode: str
    k: int
    disagreement: float | None = None
    kl: float | None = None
    drift: float | None = None
    ms_saved: float | None = None
    speedup: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Sensitivity(Shown):
    """Effects of every layer, mode and k. ``print`` shows a table; ``save`` writes JSON and a heat map.

    Attributes:
        effects: one for each layer, mode and k.
        source_ms: milliseconds of the source, for one batch.
        samples: how many were measured on.
        steps: T.
        rounds: timed rounds.
        machine: what it ran on.
        interrupted: effects that are missing were not measured.
    """

    effects: tuple[Effect, ...]
    source_ms: float
    samples: int
    steps: int
    rounds: int
    machine: dict[str, Any]
    interrupted: bool = False

    def save(self, path: str | os.PathLike[str]) -> Path:
        """JSON at ``path``, the heat map (layers x k) as a PNG beside it. Returns the PNG's path.

        Raises:
            WriteError: a file could not be written, or ``path`` is that of the PNG itself, or of a pipe.
            ImportError: no matplotlib.
        """
        picture = beside(path, ".png")
        write_text(path, self.to_json() + "\n")
        heat_map(picture, self.effects)
        return picture

    def __rich__(self) -> Table:
        head = (
            f"Each layer alone, {self.samples} samples of T = {self.steps}; the source takes {self.source_ms:.1f} ms a batch"
        )
        table = Table(title=head + ("; interrupted" if self.interrupted else ""), title_justify="left")
        table.add_column("layer", style="bold")
        for column in ("mode", "k", "predictions changed", "KL, nats", "firing drift", "ms saved", "speed-up"):
            table.add_column(column, justify="left" if column == "mode" else "right")
        before = ""
        for e in self.effects:
            name = e.layer if e.layer != before else ""
            before = e.layer
            if e.refused:
                table.add_row(name, e.mode, str(e.k), f"refused: {e.refused}")
                continue
            figures = (
                f"{100 * (e.disagreement or 0):.1f} %", f"{e.kl:.2g}", f"{100 * (e.drift or 0):.1f} %", f"{e.ms_saved:.1f}",
                f"{e.speedup:.2f}x",
            )  # fmt: skip
            table.add_row(name, e.mode, str(e.k), *figures)
        return table


def sensitivity(
    model: nn.Module,
    batches: Any,
    ks: Sequence[int] = (2, 4, 8),
    modes: Sequence[str] = ("preserve", "collapse"),
    *,
    layers: Sequence[str] = ("conv",),
    **options: Unpack[MeasurementOptions],
) -> Sensitivity:
    """Convert every layer alone, at every ``k`` and mode, and measure what that changes.

    Args:
        model: a SpikingJelly net in step_mode "m"; left untouched, measured in eval mode.
        batches: a few batches of frames [T, N, C, H, W] or (frames, labels), kept in memory. The first one is timed.
        ks: at least 1; those above T are left out.
        modes: "preserve", "collapse".
        layers: "conv", "linear": which layers are looked at.

    Keyword Args:
        rounds: timed rounds, source and converted nets in turns, default 5.
        decode: from the net's output to class scores [N, C], where it is not [T, N, C] or [N, C].
        backend: as ``sj_tac.convert``.
        seed: of random encoders in the net, default 0.
        progress: show a bar, default True.

    Raises:
        ConversionError: no layer can be converted.
        PolicyError: ks or modes.
        BatchError: batches that cannot be used.
        ModelTypeError: ``model`` is no ``torch.nn.Module``.
        TraceError: as ``sj_tac.convert``.
        BackendError: as ``sj_tac.convert``.
        MeasurementInterrupted: a KeyboardInterrupt, with the effects that were measured until then.
    """
    how = Measurement.read("sensitivity", 5, options)
    check_plain(model)
    held = collect(batches, model)
    example = held[0].example()
    space = Space.of(model, ks, modes, layers, held[0].steps, example)
    looked = Source(model, layers, example_input=example, backend=how.backend)
    before = _Known(held, scores(model, held, how.decode, how.seed), firing(model, held), how, looked)
    effects: list[Effect] = []
    source: list[float] = []
    stopped = False
    with Bar("sensitivity", len(space.layers) * len(space.aggregating), how.progress) as bar:
        try:
            for layer in space.layers:
                _measure(model, layer, space, before, effects, source, bar)
        except KeyboardInterrupt:
            if not source or not effects:
                raise interrupted("sensitivity was interrupted before a layer was measured") from None
            stopped = True
    order = {(layer, c.mode, c.k): i for i, (layer, c) in enumerate((x, c) for x in space.layers for c in space.aggregating)}
    effects.sort(key=lambda e: order[e.layer, e.mode, e.k])
    found = Sensitivity(
        effects=tuple(effects),
        source_ms=sorted(source)[len(source) // 2],
        samples=sum(batch.samples for batch in held),
        steps=held[0].steps,
        rounds=how.rounds,
        machine=machine.describe(),
        interrupted=stopped,
    )
    if stopped:
        raise interrupted(f"sensitivity was interrupted after {len(effects)} of {len(order)} settings", found)
    return found


class _Known(NamedTuple):
    """What is known of the source on the batches: its class scores and firing rates, and how both were measured."""

    held: Sequence[Batch]
    scores: Tensor
    rates: Firing
    how: Measurement
    looked: Source


def _measure(
    model: nn.Module,
    layer: str,
    space: Space,
    before: _Known,
    effects: list[Effect],
    source: list[float],
    bar: Bar,
) -> None:
    """Add the effects of one layer, and the milliseconds of the source beside it."""
    nets: dict[Choice, nn.Module] = {}
    held, how = before.held, before.how
    for choice in space.aggregating:
        policy = space.policy({layer: choice})
        try:
            nets[choice] = before.looked.convert(policy)
        except PolicyError as error:
            effects.append(Effect(layer, choice.mode, choice.k, refused=str(error)))
    taken = milliseconds({"": model} | {str(c): net for c, net in nets.items()}, held[0].fresh(), how.rounds)
    source.append(taken[""])
    for choice, net in nets.items():
        effects.append(_effect(layer, choice, net, before, taken))
        bar.step(f"{layer} {choice}")


def _effect(layer: str, choice: Choice, net: nn.Module, before: _Known, taken: dict[str, float]) -> Effect:
    held, expected, rates, how, _ = before
    verdict = report(net)[layer]
    if verdict.status != "converted":
        return Effect(layer, choice.mode, choice.k, refused=f"{verdict.reason}: {verdict.detail}")
    got = scores(net, held, how.decode, how.seed)
    logs = torch.log_softmax(expected, 1), torch.log_softmax(got, 1)
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(1).mean().item()
    changed = firing(net, held)
    spikes = sum(rate * neurons for rate, neurons in rates.values())
    moved = sum(abs(changed[name][0] - rate) * neurons for name, (rate, neurons) in rates.items() if name in changed)
    return Effect(
        layer=layer,
        mode=choice.mode,
        k=choice.k,
        disagreement=(expected.argmax(1) != got.argmax(1)).double().mean().item(),
        kl=max(0.0, kl),
        drift=moved / spikes if spikes else 0.0,
        ms_saved=taken[""] - taken[str(choice)],
        speedup=taken[""] / taken[str(choice)],
    )
