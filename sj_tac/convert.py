"""The story on one page: look at the model, decide, swap; and the calls that come after."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rewrites import swap
from rewrites import verify as verification
from rewrites.analysis import Analysis, analyse
from rewrites.trace import as_arguments
from sj_tac import host
from sj_tac.errors import BatchNormMovedWarning, ConversionError, ModelTypeError, PolicyError
from sj_tac.kernels import registry
from sj_tac.operators import has_trained_logits
from sj_tac.places import NormPlace
from sj_tac.policy import as_policy, name_matches, nearest
from sj_tac.report import Reason, Report
from sj_tac.swapped import is_swapped

RECORD = "_sj_tac"


@dataclass
class Record:
    """What a converted model carries: its analysis and the hooks of its collapsed regions."""

    analysis: Analysis
    handles: list[RemovableHandle]
    title: str


def convert(
    model: nn.Module,
    policy: Any = "preserve",
    k: int = 2,
    *,
    example_input: Any = None,
    backend: str = "auto",
    fuse: bool = True,
    inplace: bool = False,
) -> nn.Module:
    """A copy of ``model`` whose Conv -> BatchNorm -> LIF chains run one convolution for every ``k`` frames.

    Args:
        model: a SpikingJelly net in step_mode "m"; input [T, N, C, H, W]. It is left untouched.
        policy: "preserve" (T stays: event data), "collapse" (T/k frames: rate-coded data), "keep", a dict, a ``Policy``,
            or the path of a YAML file.
        k: frames per convolution where the policy does not say.
        example_input: a real input; needed by models that ask their input's shape in forward. With it the report has MACs,
            and the converted net is run: its output must have the source's shape and be finite, and at k=1 be the same.
        backend: "auto" (numba on the CPU, cupy on CUDA, else reference), or the name of a kernel that must run.
        fuse: run each chain as one operator where the graph allows; False keeps every module's own work, the definition.
        inplace: change ``model`` itself; needed where it cannot be deep-copied.

    Returns:
        The same class with the same parameter names and state_dict keys; ``sj_tac.report`` says what became of each layer.

    Raises:
        ModelTypeError, TraceError, PolicyError, BackendError, and ConversionError: no chain, converted before, no deep copy,
        or the converted net fails on ``example_input`` (then it names the first layer that differs). The model is then as
        it was.
    """
    backend = registry.choose(backend, fuse)
    _check_plain(model)
    target = model if inplace else _deep_copy(model)
    analysis = analyse(target, policy, k, example_input, backend, fuse)
    if not analysis.layout.drives:
        raise ConversionError(_no_chain(model, analysis))
    if not inplace:
        host.reset(target)
    handles = swap.apply(target, analysis.layout)
    try:
        _verify(target, analysis, example_input)
    except BaseException:
        swap.undo(target, handles)
        raise
    setattr(target, RECORD, Record(analysis, handles, type(model).__name__))
    return target


def _verify(target: nn.Module, analysis: Analysis, example_input: Any) -> None:
    """Run the converted net once beside what was seen of its source, and forget the large part of that."""
    if analysis.seen is None:
        return
    drives = analysis.layout.drives.values()
    groups = any(analysis.settings[d.name].emit == "groups" for d in drives if d.mode == "collapse")
    device = next((p.device.type for p in target.parameters()), "cpu")
    verification.verify(
        analysis.seen,
        target,
        as_arguments(example_input),
        exact=all(s.k == 1 for s in analysis.settings.values() if s.mode != "keep"),
        any_rate=groups,
        runs_here=analysis.backend != registry.CUPY or device == "cuda",
    )
    analysis.seen = verification.Run(analysis.seen.macs, [], [])


def plan(model: nn.Module, policy: Any = "preserve", k: int = 2, *, example_input: Any = None) -> Report:
    """The verdicts that ``convert`` would give, without converting; no chain is no error here. Raises as ``convert``."""
    _check_plain(model)
    target = _deep_copy(model)
    analysis = analyse(target, policy, k, example_input, registry.choose("auto"), True)
    return analysis.report(target, f"plan for {type(model).__name__}")


def report(converted: nn.Module) -> Report:
    """What became of every conv of a converted model. MACs show once it has seen an input. Raises ConversionError."""
    record = _record(converted, "report")
    return record.analysis.report(converted, record.title)


def restore(converted: nn.Module, *, inplace: bool = False, drop_learned: bool = False) -> nn.Module:
    """The source model again, with the parameters as they are now.

    Args:
        inplace: change ``converted`` itself instead of a copy.
        drop_learned: throw trained aggregation weights away; otherwise they are a reason to refuse.

    Raises:
        ConversionError: not a converted model, or it has trained aggregation weights.

    Warns:
        BatchNormMovedWarning: BatchNorm statistics were updated on aggregated frames.
    """
    record = _record(converted, "restore")
    _check_logits(converted, record.analysis.layout.drives, "restore", drop_learned)
    _warn_if_moved(_norms(converted), "restore")
    if not inplace:
        converted = _deep_copy(converted)
        record = _record(converted, "restore")
    swap.undo(converted, record.handles)
    delattr(converted, RECORD)
    return converted


def set_k(converted: nn.Module, k: int, layers: str = "*", *, drop_learned: bool = False) -> Report:
    """Give the converted layers whose name matches another ``k``, in place, and everything behind a collapse what follows.

    Args:
        layers: exact name, glob or "re:...", of converted convs.
        drop_learned: throw trained aggregation weights of these layers away; otherwise they are a reason to refuse.

    Raises:
        PolicyError: ``k`` is no int of at least 1, ``layers`` matches nothing, or a layer refuses it. The model is then
            as it was. ConversionError: not a converted model, or trained aggregation weights.

    Warns:
        BatchNormMovedWarning: BatchNorm statistics were updated on aggregated frames.
    """
    record = _record(converted, "set_k")
    old = record.analysis
    k = as_policy("preserve", k).default.k
    chosen = [name for name in old.layout.drives if name_matches(name, layers)]
    if not chosen:
        raise PolicyError(f"set_k: layers={layers!r} matches no converted layer; {nearest(layers, old.layout.drives)}")
    settings = old.settings | {name: old.settings[name].model_copy(update={"k": k}) for name in chosen}
    layout = old.lay_out(converted, settings)
    lost = [name for name in old.layout.drives if name not in layout.drives]
    if lost:
        why = layout.refused[lost[0]].detail
        raise PolicyError(f"set_k: layer {lost[0]!r} refuses, {why}; the model was left as it was")
    resized = {n: d for n, d in old.layout.drives.items() if d.frames != layout.drives[n].frames}
    _check_logits(converted, resized, "set_k", drop_learned)
    changing = {name for name in chosen if old.settings[name].k != k}
    _warn_if_moved({name: norm for name, norm in _norms(converted).items() if name in changing}, "set_k")
    for name, drive in layout.drives.items():
        drive.seen = old.layout.drives[name].seen
    for handle in record.handles:
        handle.remove()
    analysis = replace(old, settings=settings, layout=layout)
    setattr(converted, RECORD, Record(analysis, swap.apply(converted, layout), record.title))
    return report(converted)


def freeze_bn(converted: nn.Module, frozen: bool = True) -> list[str]:
    """Keep the BatchNorms of converted and stretched layers in eval mode, also under ``net.train()``.

    Aggregated frames have less variance than single ones, so statistics taken from them change what the layer computes.
    Scale and shift (``weight``, ``bias``) stay trainable. ``frozen=False`` lets the statistics move again.

    Returns:
        The names of the BatchNorms. Raises ConversionError: not a converted model.
    """
    _record(converted, "freeze_bn")
    names = []
    for name, module in converted.named_modules():
        if is_swapped(module) and isinstance(module._tac, NormPlace):
            module._tac.frozen = frozen
            module.train(converted.training)
            names.append(name)
    return names


def _check_plain(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelTypeError(f"a model is a torch.nn.Module, got {type(model).__name__}: {str(model)[:80]!r}")
    for name, module in model.named_modules():
        if is_swapped(module):
            where = f"its module {name!r} is" if name else "it is"
            raise ConversionError(
                f"{type(model).__name__} cannot be converted again: {where} part of a converted chain; "
                "sj_tac.restore it first, or change it with sj_tac.set_k"
            )


def _deep_copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model, host.detached_memories(model))
    except Exception as error:
        stuck = [
            f"{name}.{key}".lstrip(".")
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and not value.is_leaf
        ]
        which = f" because {stuck[0]!r} is a tensor computed from others (pruning, weight_norm)" if stuck else ""
        raise ConversionError(
            f"{type(model).__name__} cannot be deep-copied{which} ({type(error).__name__}: {error}); make the weights "
            "plain first (torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm), or pass inplace=True"
        ) from error


def _record(model: Any, action: str) -> Record:
    if not isinstance(model, nn.Module):
        raise ModelTypeError(f"{action}: a model is a torch.nn.Module, got {type(model).__name__}: {str(model)[:80]!r}")
    record = model.__dict__.get(RECORD)
    if isinstance(record, Record):
        return record
    inner = [name for name, module in model.named_modules() if RECORD in module.__dict__]
    hint = f"its module {inner[0]!r} is: call {action} on that" if inner else "call sj_tac.convert first"
    raise ConversionError(f"{action}: {type(model).__name__} is not a converted model; {hint}")


def _norms(converted: nn.Module) -> dict[str, nn.Module]:
    """The swapped BatchNorms, by the name of their layer."""
    swapped = [m for m in converted.modules() if is_swapped(m)]
    return {m._tac.name: m for m in swapped if isinstance(m._tac, NormPlace)}


def _warn_if_moved(norms: Mapping[str, Any], action: str) -> None:
    moved = [name for name, norm in norms.items() if norm._tac.moved]
    if moved:
        warnings.warn(
            f"{action}: the running statistics of {moved} were updated while frames were aggregated; they have less "
            "variance than single frames, so these layers no longer fit another k. Fine-tune with "
            "sj_tac.freeze_bn(net), or load the source checkpoint's statistics back.",
            BatchNormMovedWarning,
            stacklevel=3,
        )


def _check_logits(converted: nn.Module, drives: Mapping[str, Any], action: str, drop: bool) -> None:
    trained = [name for name in drives if has_trained_logits(converted.get_submodule(name))]
    if trained and not drop:
        raise ConversionError(
            f"{action} would throw away the trained aggregation weights (tac_logits) of {trained}; "
            "pass drop_learned=True if that is meant"
        )


def _no_chain(model: nn.Module, analysis: Analysis) -> str:
    verdicts = analysis.report(model, "").verdicts
    if not verdicts:
        return f"{type(model).__name__} has no convolution; sj_tac converts Conv2d -> [BatchNorm2d] -> neuron chains"
    if all(v.reason == Reason.NOT_MULTI_STEP for v in verdicts):
        return (
            f"{type(model).__name__} is in step_mode 's', one frame a call, where nothing can be aggregated; "
            "call functional.set_step_mode(model, 'm') and feed it [T, N, C, H, W]"
        )
    lines = [f"  {v.layer}: {v.reason}: {v.detail} ({v.hint})" for v in verdicts]
    return f"no chain of {type(model).__name__} can be converted:\n" + "\n".join(lines)
