"""The BatchNorms of a converted model: freeze them, re-estimate them, know whether they moved."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from sj_tac import host
from sj_tac.definition.noted import NotedNorm
from sj_tac.errors import BatchNormMovedWarning, ConversionError, MatchedStatisticsWarning
from sj_tac.rewrites import decide
from sj_tac.rewrites.corrections import MATCH, RECALIBRATE, STATISTICS, Correction, held, loaded_matched, put, take_back
from sj_tac.rewrites.gate import as_defined
from sj_tac.rewrites.pipeline import Record, record_of
from sj_tac.rewrites.plan import Plan
from sj_tac.tuning.batches import read
from sj_tac.tuning.measure import run_batch


def freeze_bn(converted: nn.Module, frozen: bool = True) -> list[str]:
    """Keep the BatchNorms of converted and stretched layers in eval mode, also under ``net.train()``.

    Aggregated frames have less variance than single ones, so statistics taken from them change what the layer computes.
    Scale and shift (``weight``, ``bias``) stay trainable. ``set_k`` leaves them frozen, and freezes those that it stretches.
    ``frozen=False`` lets the statistics of all of them move again.

    Args:
        converted: a net of ``sj_tac.convert``.
        frozen: False lets the statistics move again.

    Returns:
        The names of the BatchNorms.

    Raises:
        ConversionError: not a converted model.
    """
    record = record_of(converted, "freeze_bn")
    record.frozen = frozen
    planned = norms_of(record.plan)
    # Others that keep notes see single frames, and may learn from them.
    found = {n: norm for n, norm in norms(converted).items() if n in planned or norm._tac.frozen}
    for norm in found.values():
        norm._tac.frozen = frozen
        norm.train(converted.training)
    return list(found)


def freeze_new(converted: nn.Module, record: Record, before: Collection[str]) -> None:
    """Freeze what another k stretches, in a net whose BatchNorms are frozen.

    Args:
        before: names of the BatchNorms that the plan spoke of until then.
    """
    planned = norms_of(record.plan)
    for name, norm in norms(converted).items():
        if record.frozen and name not in before and name in planned:
            norm._tac.frozen = True
            norm.train(converted.training)


def recalibrate(converted: nn.Module, batches: Any = None, *, undo: bool = False) -> list[str]:
    """Re-estimate the BatchNorms of converted and stretched layers on aggregated frames, in place.

    So are those that ``set_k`` gave single frames again, where their statistics are of aggregated ones. Running mean and
    variance become the averages of the batches' own, as ``torch.optim.swa_utils.update_bn`` does it; nothing else is
    trained. The source's are kept: ``undo=True`` and ``restore`` put them back. Whether it helps depends on the net:
    docs/choosing.md has what was measured.

    Args:
        converted: a net of ``sj_tac.convert``.
        batches: an iterable of frames [T, N, C, H, W] or (frames, labels); labels are not used.
        undo: put the source's statistics back instead.

    Returns:
        The names of the BatchNorms. Empty where there are none.

    Raises:
        ConversionError: not a converted model, or nothing to undo.
        BatchError: batches that cannot be used, or that the model does not run on; all statistics are then as they were.
    """
    record = record_of(converted, "recalibrate")
    if undo:
        if batches is not None:
            raise ConversionError("recalibrate: undo=True takes no batches; call it once without, once with them")
        names = [name for name, correction in record.corrected.items() if correction.by == RECALIBRATE]
        if not names:
            raise ConversionError("recalibrate: there is nothing to undo; no statistics of this model were re-estimated")
        done = take_back(converted, record.corrected, names)
        if not done:
            raise ConversionError(
                "recalibrate: there is nothing to undo; training or a checkpoint has moved on what it wrote"
            )
        return done
    refuse_matched(converted, record, "recalibrate")
    found = _estimated(converted, record)
    before = {name: held(norm, STATISTICS) for name, norm in found.items()}
    moved = {name: norm._tac.moved for name, norm in found.items()}
    try:
        _estimate(converted, found, batches)
    except BaseException:
        for name, norm in found.items():
            put(norm, before[name])
            norm._tac.moved = moved[name]
        raise
    record.matched = ""
    for name, norm in found.items():
        norm._tac.moved = True
        # What the source had, however often this is called.
        first = record.corrected.get(name)
        had, was_moved = (before[name], moved[name]) if first is None else (first.before, first.moved)
        record.corrected[name] = Correction(RECALIBRATE, had, held(norm, STATISTICS), was_moved)
    return list(found)


def _estimated(converted: nn.Module, record: Record) -> dict[str, Any]:
    """The BatchNorms that do not see the source's frames, or whose statistics are not of these."""
    found, planned = norms(converted), norms_of(record.plan)
    wanted = {n for n, norm in found.items() if n in planned or n in record.corrected or norm._tac.moved}
    return {name: norm for name, norm in found.items() if name in wanted and norm.running_mean is not None}


def _estimate(converted: nn.Module, norms: Mapping[str, Any], batches: Any) -> None:
    """Cumulative averages of batch statistics; the model's mode and memories are left as they were."""
    kept = {name: (norm.momentum, norm.num_batches_tracked.clone()) for name, norm in norms.items()}
    # Few batches in another mode, with silent hooks: no capture is worth it.
    with host.looked_at(converted, trains=True), as_defined():
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum, norm.training = None, True
            for number, batch in enumerate(read(batches, converted)):
                run_batch(converted, batch.on(converted), number)
        finally:
            for name, norm in norms.items():
                norm.momentum = kept[name][0]
                norm.num_batches_tracked.copy_(kept[name][1])


def norms(converted: nn.Module) -> dict[str, Any]:
    """The BatchNorms that keep notes, by their own names."""
    return {n: m for n, m in converted.named_modules() if isinstance(m, NotedNorm)}


def norms_of(plan: Plan) -> set[str]:
    """Names of the BatchNorms of converted and stretched layers."""
    return {*decide.norms(plan.decision, plan.measured)}


def warn_if_moved(norms: Mapping[str, Any], action: str, stacklevel: int = 3) -> None:
    """Of statistics that fit what these layers saw, and not what ``action`` gives them."""
    moved = [*dict.fromkeys(norm._tac.name for norm in norms.values() if norm._tac.moved)]
    if moved:
        warnings.warn(
            f"{action}: the running statistics of {moved} were updated while frames were aggregated; they have less "
            "variance than single frames, so these layers no longer fit another k. Fine-tune with "
            "sj_tac.freeze_bn(net), or load the source checkpoint's statistics back.",
            BatchNormMovedWarning,
            stacklevel=stacklevel,
        )


def refuse_matched(converted: nn.Module, record: Record, action: str) -> None:
    """Raise ConversionError where what ``action`` starts from would be what ``match`` wrote."""
    if record.matched and any(correction.by == MATCH for correction in record.corrected.values()):
        raise ConversionError(f"{action}: this net is matched; sj_tac.match(net, undo=True) first")
    found = loaded_matched(converted, record.corrected)
    if found:
        raise ConversionError(
            f"{action}: values of {[*found]} came matched in a checkpoint; load the source's checkpoint first"
        )


def warn_if_matched(converted: nn.Module, action: str, stacklevel: int = 3) -> None:
    """Of values that came matched in a checkpoint, so that what they replaced is not known."""
    matched = loaded_matched(converted, record_of(converted, action).corrected)
    if matched:
        name, fits = next(iter(matched.items()))
        warnings.warn(
            f"{action}: statistics or biases of {[*matched]} were matched in the checkpoint that was loaded ({name!r} for "
            f"{fits}), and what they were before is not known; they fit no other k. Load the source's checkpoint",
            MatchedStatisticsWarning,
            stacklevel=stacklevel,
        )
