"""The story on one page: convert a model, say what became of it, change it, turn it back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from sj_tac import batchnorm
from sj_tac.definition import noted
from sj_tac.definition.convs import has_trained_logits
from sj_tac.errors import BatchNormMovedWarning, ConversionError, NewParametersWarning, PolicyError, refuse_unknown
from sj_tac.policy import Settings, as_policy, name_matches, nearest, with_dtype
from sj_tac.rewrites import pipeline
from sj_tac.rewrites.corrections import take_back
from sj_tac.rewrites.decide import Place
from sj_tac.rewrites.pipeline import RECORD, deep_copy, plan as plan, policy_of as policy_of, record_of
from sj_tac.tuning import matching
from sj_tac.tuning.batches import as_given
from sj_tac.tuning.layers import measure_layers
from sj_tac.tuning.matching import unmatch
from sj_tac.tuning.search import choose
from sj_tac.verdicts import Report


class ConvertOptions(TypedDict, total=False):
    """What ``convert`` takes by keyword of the user's own frames. See there."""

    calibration: Any
    match: Any
    dtype: torch.dtype | None


def convert(
    model: nn.Module,
    policy: Any = "preserve",
    k: int = 2,
    *,
    example_input: Any = None,
    backend: str = "auto",
    fuse: bool = True,
    inplace: bool = False,
    **options: Unpack[ConvertOptions],
) -> nn.Module:
    """A copy of ``model`` whose convolutions in front of spiking neurons run once for every ``k`` frames.

    Args:
        model: a net that takes all frames in one call, as SpikingJelly's in step_mode "m" do. It is left untouched.
        policy: "preserve" (T stays: event data), "collapse" (T/k frames: rate-coded data), "keep", "exact" (k=1: the
            source's spikes, faster), a dict, a ``Policy``, the path of a YAML file, or "auto": ``sj_tac.diagnose`` and
            ``sj_tac.search`` on ``calibration``, with defaults.
        k: frames per convolution where the policy does not say.
        example_input: a batch of two or more samples that the net runs on; a tuple for several arguments. Without it a usual
            shape is looked for. With it the report has MACs, and the converted net is run: its output must have the source's
            shape and be finite, and at k=1 be the same.
        backend: "auto" (cpp on the CPU; cupy, else nvrtc, on CUDA; else reference), or the name of a kernel that must run.
        fuse: capture the net's calls and run them in kernels; False runs every module's own forward, the definition.
        inplace: change ``model`` itself; needed where it cannot be deep-copied.

    Keyword Args:
        calibration: for "auto" alone: a few batches of frames [T, N, C, H, W] or (frames, labels). With labels at most a
            point of accuracy is lost on them; without, the predictions of 99 % stay. The net is matched by them, and its
            report carries the evidence.
        dtype: torch.bfloat16 (or float16): the convolutions of all converted layers compute in it, where the machine has
            instructions for it; neurons, norms and what goes in and out stay as they are. torch.int8: weights are rounded to
            it in inference, on a CPU with VNNI, where a layer reads spikes or sums of them; a report says which layers do.
            Under torch.autocast none has a meaning. A policy's key ``dtype`` says so for single layers.
        match: a few batches of frames, labels or none: ``sj_tac.match`` corrects the converted net by them.

    Returns:
        The same class with the same parameter names and state_dict keys; ``sj_tac.report`` says what became of each layer.

    Raises:
        ModelTypeError: ``model`` is no ``torch.nn.Module``.
        TraceError: its forward takes other arguments than ``example_input``.
        PolicyError: a bad policy, or a rule that matches nothing.
        BackendError: a named kernel that cannot run here.
        ConversionError: no convolution that can be converted, converted before, no deep copy, no usual shape that the model
            takes, or the converted net fails on ``example_input`` (then it names the first layer that differs).
        BatchError: batches of ``calibration`` or ``match`` that cannot be used.
        SearchError: with "auto", no policy is faster.

    After any of them the model is as it was.
    """
    refuse_unknown("convert", options, ConvertOptions.__annotations__)
    calibration, batches = options.get("calibration"), options.get("match")
    evidence, method, dtype = None, "auto", options.get("dtype")
    if isinstance(policy, str) and policy == "auto":
        _check_auto(calibration, k, fuse, dtype)
        pipeline.check_plain(model)
        calibration = as_given(calibration, model)
        policy = choose(model, calibration, backend=backend)
        evidence = policy.evidence
        # As the candidates were, so that the evidence says what this net does.
        matched = evidence[evidence.chosen].matched
        if batches is None and matched not in ("", matching.NONE):
            batches, method = calibration, matched
    elif calibration is not None:
        raise PolicyError(f'calibration= is for policy="auto"; with policy={policy!r} there is nothing to choose')
    if dtype is not None:
        policy, k = with_dtype(policy, k, dtype), 2
    converted = pipeline.convert_with(
        model, policy, k, example_input=example_input, backend=backend, fuse=fuse, inplace=inplace, evidence=evidence
    )
    if batches is not None:
        try:
            matching.match(converted, batches, method=method)
        except BaseException:
            if inplace:
                restore(converted, inplace=True)
            raise
    return converted


def _check_auto(calibration: Any, k: int, fuse: bool, dtype: torch.dtype | None) -> None:
    """Raise PolicyError where ``convert`` cannot measure, or was told what it is to find out."""
    if calibration is None:
        raise PolicyError(
            'policy="auto" measures on your data: convert(model, "auto", calibration=batches), with a few batches of '
            "frames [T, N, C, H, W] or (frames, labels)"
        )
    if k != 2 or not fuse or dtype is not None:
        dropped = f"k={k}, fuse={fuse}" + (f", dtype={dtype}" if dtype is not None else "")
        raise PolicyError(f'policy="auto" chooses k for each layer and measures fused kernels; drop {dropped}')


def report(converted: nn.Module, batches: Any = None, *, rounds: int = 5) -> Report:
    """What became of every conv of a converted model; MACs show once it has seen an input. The model is left as it was.

    Args:
        converted: a net of ``sj_tac.convert``.
        batches: frames [T, N, C, H, W], (frames, labels), or a list of them: ``.layers`` then has every layer's firing rate
            and time, of the source and of the converted net. ``.to_html(path)`` shows them.
        rounds: timed calls of each.

    Raises:
        ConversionError: not a converted model, or it has trained aggregation weights, which its source has not.
        BatchError: the batches cannot be used.
    """
    found = pipeline.report(converted)
    if batches is None:
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BatchNormMovedWarning)
        source = restore(converted)
    return replace(found, layers=measure_layers(source, deep_copy(converted, or_inplace=False), batches, rounds))


def restore(converted: nn.Module, *, inplace: bool = False, drop_learned: bool = False) -> nn.Module:
    """The source model again, with the parameters as they are now; what ``recalibrate`` and ``match`` wrote is taken back.

    Args:
        converted: a net of ``sj_tac.convert``.
        inplace: change ``converted`` itself instead of a copy.
        drop_learned: throw trained aggregation weights away; otherwise they are a reason to refuse.

    Raises:
        ConversionError: not a converted model, or it has trained aggregation weights.

    Warns:
        BatchNormMovedWarning: BatchNorm statistics were updated on aggregated frames.
    """
    record = record_of(converted, "restore")
    _check_logits(converted, record.plan.places, "restore", drop_learned)
    if not inplace:
        converted = deep_copy(converted)
        record = record_of(converted, "restore")
    take_back(converted, record.corrected, [*record.corrected])
    batchnorm.warn_if_moved(batchnorm.norms(converted), "restore")
    batchnorm.warn_if_matched(converted, "restore")
    pipeline.undo(converted)
    delattr(converted, RECORD)
    return converted


def set_k(converted: nn.Module, k: int, layers: str = "*", *, drop_learned: bool = False) -> Report:
    """Give the converted layers whose name matches another ``k``, in place, and everything behind a collapse what follows.

    What ``match`` corrected fits the old k: it is taken back. Learned aggregation weights (``tac_logits``) are as many as a
    group has frames: another number makes new parameters, which an optimizer must be given.

    Args:
        converted: a net of ``sj_tac.convert``.
        k: source steps that share one convolution, at least 1; 1 is the original layer.
        layers: exact name, glob or "re:...", of converted convs.
        drop_learned: throw trained aggregation weights of these layers away; otherwise they are a reason to refuse.

    Raises:
        PolicyError: ``k`` is no int of at least 1, ``layers`` matches nothing, or a layer refuses it. The model is then
            as it was.
        ConversionError: not a converted model, trained aggregation weights, or a converted module was replaced since.

    Warns:
        BatchNormMovedWarning: BatchNorm statistics were updated on aggregated frames, of another number than now.
        NewParametersWarning: the net is being trained, and has ``tac_logits`` now that its optimizer does not know.
    """
    old = record_of(converted, "set_k").plan
    pipeline.check_unedited(old, converted, "set_k")
    k = as_policy("preserve", k).default.k
    chosen = [name for name in old.places if name_matches(name, layers)]
    if not chosen:
        raise PolicyError(f"set_k: layers={layers!r} matches no converted layer; {nearest(layers, old.places)}")
    settings = old.settings | {name: old.settings[name].model_copy(update={"k": k}) for name in chosen}
    return change(converted, settings, drop_learned=drop_learned)


def change(converted: nn.Module, settings: dict[str, Settings], *, drop_learned: bool = False) -> Report:
    """``set_k`` for layers that each have settings of their own."""
    record = record_of(converted, "set_k")
    old = record.plan
    plan = old.under(converted, settings)
    lost = [name for name in old.places if name not in plan.places]
    if lost:
        why = plan.decision.refused[lost[0]].detail
        raise PolicyError(f"set_k: layer {lost[0]!r} refuses, {why}; the model was left as it was")
    resized = {name: place for name, place in old.places.items() if place.frames != plan.places[name].frames}
    _check_logits(converted, resized, "set_k", drop_learned)
    norms = batchnorm.norms(converted)
    was, is_now, sources = old.decision.rate, plan.decision.rate, old.measured.sources
    other = {n: norm for n, norm in norms.items() if any(was(s) != is_now(s) for s in sources.get(n, ()))}
    batchnorm.warn_if_moved(other, "set_k", stacklevel=4)
    if settings != old.settings:
        batchnorm.warn_if_matched(converted, "set_k", stacklevel=4)
        # What was fitted to the old k would be wrong for the new one, also behind these layers.
        unmatch(converted, record)
    pipeline.apply(plan, converted)
    # What was re-estimated can be taken back at this k, too.
    noted.remember(converted, record.corrected)
    # What the policy was chosen by, and what a sample showed, says nothing about another k.
    setattr(converted, RECORD, replace(record, plan=plan, evidence=None, notes=()))
    batchnorm.freeze_new(converted, record_of(converted, "set_k"), batchnorm.norms_of(old))
    _warn_of_logits(converted, {name: plan.places[name] for name in resized})
    return report(converted)


def _warn_of_logits(converted: nn.Module, resized: Mapping[str, Place]) -> None:
    """Of new weights that are learned, in a net that is being trained."""
    new = [name for name, place in resized.items() if place.settings.weights == "learned" and place.frames > 1]
    # Between two epochs the net may be in eval mode.
    if new and (converted.training or any(p.grad is not None for p in converted.parameters())):
        warnings.warn(
            f"set_k: tac_logits of {new} are new parameters; an optimizer made before does not train them: make it anew, or "
            "give it them (optimizer.add_param_group)",
            NewParametersWarning,
            stacklevel=4,
        )


def _check_logits(converted: nn.Module, places: Mapping[str, Place], action: str, drop: bool) -> None:
    modules = dict(converted.named_modules())
    trained = [name for name in places if name in modules and has_trained_logits(modules[name])]
    if trained and not drop:
        raise ConversionError(
            f"{action} would throw away the trained aggregation weights (tac_logits) of {trained}; "
            "pass drop_learned=True if that is meant"
        )
