"""Train faster: k as a schedule, many frames a convolution at first and single ones at the end."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from sj_tac import batchnorm
from sj_tac.conversion import change, set_k
from sj_tac.errors import BatchNormMovedWarning, PolicyError
from sj_tac.policy import Settings, name_matches, nearest
from sj_tac.rewrites.pipeline import check_unedited, record_of

_CURVE = re.compile(r"(cosine|linear) from (\d+) to (\d+)")


class KSchedule:
    """Sets k of a converted net by the epoch, in a training loop of any kind.

        net = sj_tac.convert(model, "preserve", 8)
        schedule = sj_tac.KSchedule(net, {0: 8, 6: 4, 9: 1}, batches=some_batches)
        for epoch in range(12):
            schedule.step(epoch)
            ...                                   # train an epoch as usual: parameters and their optimizer stay
        model = sj_tac.restore(net)

    BatchNorm learns from the frames that it is given, and single frames vary more than the means of eight do. So wherever k
    changes, running statistics are re-estimated on ``batches``; without them they follow as training goes on, and are wrong
    for some hundred steps. With k = 1 at the end the net is the source's, and ``restore`` gives it back.

    Args:
        converted: a net of ``sj_tac.convert``, in preserve or collapse.
        ks: {epoch: k from then on}; or "cosine from 8 to 1", "linear from 8 to 1" over ``epochs``, rounded to whole numbers.
        epochs: of the whole training, for a curve alone.
        layers: exact name, glob or "re:...", of the converted convs whose k changes.
        batches: a few batches of frames [T, N, C, H, W] or (frames, labels), read again at every change.

    Raises:
        PolicyError: ks, epochs, or layers that match nothing.
            Learned aggregation weights whose number would change, too: they are parameters that the optimizer has.
        ConversionError: not a converted model, or a matched one.
    """

    def __init__(
        self,
        converted: nn.Module,
        ks: Mapping[int, int] | str,
        *,
        epochs: int | None = None,
        layers: str = "*",
        batches: Any = None,
    ) -> None:
        record = record_of(converted, "KSchedule")
        batchnorm.refuse_matched(converted, record, "KSchedule")
        names = record.plan.places
        if not any(name_matches(name, layers) for name in names):
            raise PolicyError(f"KSchedule: layers={layers!r} matches no converted layer; {nearest(layers, names)}")
        if batches is not None and iter(batches) is batches:
            raise PolicyError("KSchedule: batches are read again at every change of k; give a list or a DataLoader")
        self.converted, self.layers, self.batches = converted, layers, batches
        self.ks = _curve(ks, epochs) if isinstance(ks, str) else _steps(ks, epochs)
        self.current: int | None = None
        self._refuse_learned()

    def _refuse_learned(self) -> None:
        """Raise PolicyError where a k of the schedule takes away, or makes, aggregation weights that are learned."""
        plan = record_of(self.converted, "KSchedule").plan
        learned = {n: place for n, place in plan.places.items() if place.settings.weights == "learned"}
        if not learned:
            return
        check_unedited(plan, self.converted, "KSchedule")
        for k in sorted(set(self.ks.values())):
            places = plan.under(self.converted, self._settings(k)).places
            changed = [n for n, place in learned.items() if n in places and places[n].frames != place.frames]
            if changed:
                raise PolicyError(
                    f"KSchedule: k={k} gives {changed} another number of learned aggregation weights (tac_logits), which "
                    "are parameters that the optimizer has; leave these layers out (layers=), or give them weights: decay"
                )

    def _settings(self, k: int) -> dict[str, Settings]:
        """Of all layers, with this k for those that are meant."""
        plan = record_of(self.converted, "KSchedule").plan
        meant = {name for name in plan.places if name_matches(name, self.layers)}
        return {name: s.model_copy(update={"k": k}) if name in meant else s for name, s in plan.settings.items()}

    def k(self, epoch: int) -> int | None:
        """k of an epoch; None before the first that the schedule names."""
        past = [at for at in self.ks if at <= epoch]
        return self.ks[max(past)] if past else None

    def step(self, epoch: int) -> int | None:
        """Give the net the k of this epoch; call it before the epoch. Returns that k.

        Raises:
            PolicyError: as ``sj_tac.set_k``.
            ConversionError: as ``sj_tac.set_k``.
            BatchError: batches that cannot be used. The net then has the k that it had.
        """
        k = self.k(epoch)
        if k is not None and (k != self.current or k not in self._held()):
            self._change(k)
        return k

    def _held(self) -> set[int]:
        """The k of the layers that are meant, where it is one; whoever calls ``set_k`` in between changes it."""
        plan = record_of(self.converted, "KSchedule").plan
        found = {plan.settings[name].k for name in plan.places if name_matches(name, self.layers)}
        return found if len(found) == 1 else set()

    def _change(self, k: int) -> None:
        record = record_of(self.converted, "KSchedule")
        batchnorm.refuse_matched(self.converted, record, "KSchedule")
        before = record.plan.settings
        with warnings.catch_warnings():
            # Statistics that moved are what this is about.
            warnings.simplefilter("ignore", BatchNormMovedWarning)
            set_k(self.converted, k, self.layers)
            if self.batches is not None:
                try:
                    batchnorm.recalibrate(self.converted, self.batches)
                except BaseException:
                    change(self.converted, before)
                    raise
        self.current = k
        if self.batches is not None:
            # They are the net's own from now on, and training goes on from them.
            record = record_of(self.converted, "KSchedule")
            record.corrected.clear()
            single = all(place.settings.k == 1 for place in record.plan.places.values())
            for norm in batchnorm.norms(self.converted).values():
                norm._tac.moved = not single


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _steps(ks: Mapping[int, int], epochs: int | None) -> dict[int, int]:
    if epochs is not None:
        raise PolicyError(f"KSchedule: epochs={epochs} is for a curve; {dict(ks)!r} says itself what happens when")
    bad = [f"{at!r}: {k!r}" for at, k in ks.items() if not (_whole(at, 0) and _whole(k, 1))]
    if bad or not ks:
        wrong = f"{{{bad[0]}}}" if bad else "{}"
        raise PolicyError(f"KSchedule: {wrong} is no {{epoch: k}} of an epoch of at least 0 and a k of at least 1")
    return dict(sorted(ks.items()))


def _curve(words: str, epochs: int | None) -> dict[int, int]:
    found = _CURVE.fullmatch(words.strip())
    if found is None or "0" in found.groups()[1:]:
        raise PolicyError(
            f'KSchedule: {words!r} is no curve; write "cosine from 8 to 1", "linear from 8 to 1", or {{epoch: k}}'
        )
    if epochs is None or not _whole(epochs, 2):
        raise PolicyError(f"KSchedule: {words!r} needs epochs=, how many there are in all, at least 2; got {epochs!r}")
    kind, first, last = found[1], int(found[2]), int(found[3])
    ks: dict[int, int] = {}
    for epoch in range(epochs):
        part = epoch / (epochs - 1)
        left = (1 + math.cos(math.pi * part)) / 2 if kind == "cosine" else 1 - part
        k = round(last + (first - last) * left)
        if k != next(reversed(ks.values()), None):
            ks[epoch] = k
    return ks


def lightning_callback(schedule: KSchedule) -> Any:
    """A Lightning callback that calls ``schedule.step`` before every epoch. Raises ImportError without Lightning."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            raise ImportError("lightning_callback needs Lightning: pip install lightning") from None

    class ScheduleK(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            k = schedule.step(trainer.current_epoch)
            if k is not None:
                pl_module.log("k", float(k), prog_bar=True)

    return ScheduleK()
