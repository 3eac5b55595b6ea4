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
from rewrites.chains import Chain, find_chains
from rewrites.fuse import Link, find_links
from rewrites.fuse import fuse as fuse_chains
from rewrites.timeaxis import Layout, Step, lay_out, skeleton
from rewrites.trace import as_arguments, trace
from sj_tac import host
from sj_tac.errors import BatchNormMovedWarning, ConversionError, ModelTypeError, PolicyError
from sj_tac.kernels import registry
from sj_tac.operators import has_trained_logits
from sj_tac.policy import Rule, Settings, as_policy, name_matches, nearest
from sj_tac.report import Reason, Refusal, Report, Verdict
from sj_tac.spans import Timeline
from sj_tac.swapped import NormPlace, is_swapped

RECORD = "_sj_tac"


@dataclass
class Analysis:
    """What was found out about a model, under a policy; nothing has been changed yet."""

    chains: dict[str, Chain | Refusal]
    settings: dict[str, Settings]
    steps: list[Step] | None
    branches: str
    macs: dict[str, tuple[int, int]]
    backend: str
    links: dict[str, Link] | None
    layout: Layout

    def lay_out(self, model: nn.Module, settings: dict[str, Settings]) -> Layout:
        """The layout of ``model`` under other settings. Changes nothing."""
        layout = lay_out(model, self.chains, settings, self.steps, self.branches)
        if self.links is not None:
            fuse_chains(model, layout, self.chains, self.links, self.backend)
        return layout

    def report(self, model: nn.Module, title: str) -> Report:
        verdicts = []
        stretched = dict(self.layout.stretched)
        for name, module in model.named_modules():
            if name in self.chains:
                stretched.pop(name, None)
                verdicts.append(self.verdict(name, module))
            elif name in stretched:
                span = stretched.pop(name)
                detail = f"runs {span.stretch} steps on every frame behind a collapse and emits their mean"
                if span.stretch == 1:
                    detail = "runs one step on every frame behind a binary collapse"
                verdicts.append(Verdict(name, "stretched", k=span.stretch, kernel="reference", detail=detail))
        return Report(tuple(verdicts), title)

    def kernel(self, name: str, drive: Any) -> tuple[str, str]:
        """What ran in the last call, or will run: a kernel and what keeps the chain from a faster one."""
        fusion = drive.fusion
        if fusion is None:
            why = self.layout.unfused.get(name, "")
            return "reference", f"not fused: {why}" if why else ""
        if fusion.ran and fusion.ran not in registry.AVAILABLE:
            return "reference", f"not fused in the last call: {fusion.ran}"
        return f"{fusion.ran or self.layout.kernels[name]}, fused", self.layout.unfused[name]

    def verdict(self, name: str, conv: nn.Module) -> Verdict:
        chain, drive = self.chains[name], self.layout.drives.get(name)
        seen = drive.seen if drive is not None and drive.seen else self.macs.get(name)
        before = seen[0] * seen[1] if seen else None
        if drive is not None:
            after = len(drive.groups(seen[0])) * seen[1] if seen else None
            kernel, why = self.kernel(name, drive)
            return Verdict(name, "converted", drive.mode, drive.k, kernel, None, why, "", before, after)
        if name in self.layout.stretched:
            span = self.layout.stretched[name]
            after = len(span.lengths(seen[0])) * seen[1] if seen else None
            detail = f"kept by the policy, at the rate of a collapse before it: a frame stands for {span.factor} frames"
            return Verdict(name, "stretched", k=span.stretch, detail=detail, macs_before=before, macs_after=after)
        refusal = self.layout.refused.get(name) or (chain if isinstance(chain, Refusal) else Refusal(Reason.POLICY_KEEP))
        return Verdict.refuse(name, refusal, macs_before=before, macs_after=before)


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
        example_input: a real input; needed by models that ask their input's shape in forward, and fills the report's MACs.
        backend: "auto" (numba on the CPU, cupy on CUDA, else reference), or the name of a kernel that must run.
        fuse: run each chain as one operator where the graph allows; False keeps every module's own work, the definition.
        inplace: change ``model`` itself; needed where it cannot be deep-copied.

    Returns:
        The same class with the same parameter names and state_dict keys; ``sj_tac.report`` says what became of each layer.

    Raises:
        ModelTypeError, ConversionError (no chain, converted before, no deep copy), TraceError, PolicyError, BackendError.
        The model is then as it was.
    """
    backend = registry.choose(backend, fuse)
    target = model if inplace else _copy(model)
    analysis = _analyse(target, policy, k, example_input, backend, fuse)
    if not analysis.layout.drives:
        raise ConversionError(_no_chain(model, analysis))
    if not inplace:
        host.reset(target)
    handles = swap.apply(target, analysis.layout)
    setattr(target, RECORD, Record(analysis, handles, type(model).__name__))
    return target


def plan(model: nn.Module, policy: Any = "preserve", k: int = 2, *, example_input: Any = None) -> Report:
    """The verdicts that ``convert`` would give, without converting; no chain is no error here. Raises as ``convert``."""
    target = _copy(model)
    analysis = _analyse(target, policy, k, example_input, registry.choose("auto"), True)
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


def _analyse(model: nn.Module, policy: Any, k: int, example_input: Any, backend: str, fuse: bool) -> Analysis:
    """Trace, find chains, apply the policy, lay out time. Changes nothing in ``model``."""
    _check_plain(model)
    checked = as_policy(policy, k)
    graph = trace(model, example_input)
    chains = find_chains(model, graph)
    resolved = checked.resolve(list(chains))
    settings = {name: found for name, (found, _) in resolved.items()}
    steps, branches = skeleton(model, graph)
    links = find_links(model, graph, chains) if fuse else None
    macs = {} if example_input is None else _measure(model, as_arguments(example_input))
    analysis = Analysis(chains, settings, steps, branches, macs, backend, links, Layout(Timeline()))
    analysis.layout = analysis.lay_out(model, settings)
    _check_exact_rules(resolved, chains, analysis.layout, checked._source)
    return analysis


def _check_exact_rules(
    resolved: Mapping[str, tuple[Settings, Rule | None]],
    chains: Mapping[str, Chain | Refusal],
    layout: Layout,
    source: str,
) -> None:
    """A rule that names one conv and cannot be followed is an error; a glob over it is only reported."""
    for name, (settings, rule) in resolved.items():
        found = chains[name]
        refusal = layout.refused.get(name) or (found if isinstance(found, Refusal) else None)
        if refusal is None or rule is None or not rule.is_exact or settings.mode == "keep":
            continue
        verdict = Verdict.refuse(name, refusal)
        raise PolicyError(
            f"{source}, rule for {name!r}: mode {settings.mode!r} is impossible there, {verdict.reason}: "
            f"{verdict.detail}. {verdict.hint[:1].upper() + verdict.hint[1:]}, or set mode: keep"
        )


def _measure(model: nn.Module, arguments: tuple[Any, ...]) -> dict[str, tuple[int, int]]:
    """(T, multiply-accumulates per frame and sample) of every conv, from one run of the source net."""
    seen: dict[str, tuple[int, int]] = {}
    data = arguments[0]
    samples = data.shape[1] if isinstance(data, Tensor) and data.dim() == 5 else len(data)

    def watch(name: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            steps = output.shape[0] if output.dim() == 5 else 1
            macs = output.numel() * module.weight[0].numel() // samples // steps
            seen[name] = (steps, macs)

        return hook

    with host.looked_at(model):
        for name, module in model.named_modules():
            if host.is_conv(module) and not isinstance(module, nn.modules.conv._ConvTransposeNd):
                module.register_forward_hook(watch(name))
        try:
            model(*arguments)
        except Exception as error:
            shape = list(data.shape) if isinstance(data, Tensor) else type(data).__name__
            raise ConversionError(
                f"the model does not run on example_input of shape {shape} ({type(error).__name__}: {error}); "
                "pass a batch [T, N, C, H, W] that it takes"
            ) from error
    return seen


def _check_plain(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_swapped(module):
            where = f"its module {name!r} is" if name else "it is"
            raise ConversionError(
                f"{type(model).__name__} cannot be converted again: {where} part of a converted chain; "
                "sj_tac.restore it first, or change it with sj_tac.set_k"
            )


def _copy(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ModelTypeError(f"a model is a torch.nn.Module, got {type(model).__name__}: {str(model)[:80]!r}")
    _check_plain(model)
    return _deep_copy(model)


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
