"""A conversion under a policy that is known: copy, look, decide, swap, verify; and what a converted model carries."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.hooks import RemovableHandle

from sj_tac import host
from sj_tac.errors import ConversionError, ModelTypeError
from sj_tac.kernels import backends
from sj_tac.policy import Policy
from sj_tac.rewrites import swap, verify as verification
from sj_tac.rewrites.arguments import as_arguments
from sj_tac.rewrites.corrections import MATCH, Correction, is_as_made, take_back
from sj_tac.rewrites.observe import observe
from sj_tac.rewrites.plan import Plan, all_single, analyse, decide, look, report_on, run_source
from sj_tac.rewrites.way import check_way
from sj_tac.runtime.swaps import is_swapped
from sj_tac.verdicts import AT_RISK, Reason, Report

RECORD = "_sj_tac"


@dataclass
class Record:
    """What a converted model carries: its plan, its hooks, what its policy was chosen by, what a sample showed.

    Attributes:
        corrected: by the name of a module. matched: what ``match`` did, in a sentence; empty where it was not called.
        frozen: whether ``freeze_bn`` froze the net's BatchNorms last, those that another k stretches among them.
    """

    plan: Plan
    handles: list[RemovableHandle]
    title: str
    evidence: Any = None
    corrected: dict[str, Correction] = field(default_factory=dict)
    matched: str = ""
    notes: tuple[str, ...] = ()
    frozen: bool = False


def convert_with(
    model: nn.Module,
    policy: Any,
    k: int = 2,
    *,
    example_input: Any = None,
    backend: str = "auto",
    fuse: bool = True,
    inplace: bool = False,
    evidence: Any = None,
) -> nn.Module:
    """``convert`` under any policy but "auto", without ``note``; ``evidence`` for the policy goes into the report."""
    backend = backends.choose(backend, fuse)
    check_plain(model)
    target = model if inplace else deep_copy(model)
    plan = analyse(target, policy, k, example_input, backend, fuse)
    return _made(plan, model, target, example_input, evidence)


class Source:
    """A model that is converted under many policies: traced, and run on the example, once. It must not change meanwhile.

    Args:
        model: left as it is. layers: kinds of layers, which every policy then has.
        example_input, backend: as of ``convert``.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], *, example_input: Any, backend: str = "auto") -> None:
        check_plain(model)
        self.model, self.layers, self.example = model, tuple(layers), example_input
        target = deep_copy(model, or_inplace=False)
        found = look(target, layers, example_input, backends.choose(backend), True)
        self._looked = run_source(found, target, example_input, True)

    def convert(self, policy: Policy) -> nn.Module:
        """What ``convert_with`` makes of the model under ``policy``."""
        assert set(policy.layers) == set(self.layers), (policy.layers, self.layers)
        target = deep_copy(self.model, or_inplace=False)
        # Who tries many policies measures what each does, and converts under the one that is kept once more.
        return _made(decide(self._looked, target, policy, self.example), self.model, target, self.example, None, tried=True)


def _made(
    plan: Plan, model: nn.Module, target: nn.Module, example_input: Any, evidence: Any, *, tried: bool = False
) -> nn.Module:
    """``target``, the model or a copy of it, converted and verified; as it was where that fails.

    ``tried``: it is not compared with its definition.
    """
    if not plan.layout.drives:
        raise ConversionError(_no_chain(model, plan))
    if target is not model:
        host.reset(target)
    handles: list[RemovableHandle] = []
    try:
        handles = swap.apply(plan, target)
        _verify(target, plan, example_input, not tried)
        setattr(target, RECORD, Record(plan.without_runs(), handles, type(model).__name__, evidence))
    except BaseException:
        target.__dict__.pop(RECORD, None)
        swap.undo(target, handles)
        swap.drop_hooks(target)  # an interrupted ``apply`` gives no handles
        raise
    return target


def note(source: nn.Module, converted: nn.Module, example_input: Any) -> None:
    """Put into the report what a sample shows of accuracy and time: some twenty calls, which who measures them can spare."""
    record = record_of(converted, "note")
    if record.plan.seen is None or not _runs_here(converted, record.plan):
        return
    settings = [place.settings for place in record.plan.layout.drives.values()]
    aggregates = any(s.k > 1 for s in settings)
    seen = observe(source, converted, as_arguments(example_input), aggregates=aggregates, timed=record.plan.fused)
    record.notes = tuple(seen)


def _runs_here(target: nn.Module, plan: Plan) -> bool:
    device = next((p.device.type for p in target.parameters()), "cpu")
    return plan.backend not in backends.ON_CUDA or device == "cuda"


def _verify(target: nn.Module, plan: Plan, example_input: Any, compared: bool) -> None:
    """Run the converted net once beside what was seen of its source."""
    if plan.seen is None:
        return
    exact = all_single(plan.settings)
    verification.verify(
        plan.seen,
        target,
        as_arguments(example_input),
        exact=exact,
        any_rate=plan.layout.emits_groups,
        runs_here=_runs_here(target, plan),
        compared=compared,
    )
    if compared and not exact and plan.layout.emits is None:
        check_way(plan.seen, target, as_arguments(example_input))


def plan(model: nn.Module, policy: Any = "preserve", k: int = 2, *, example_input: Any = None) -> Report:
    """The verdicts that ``convert`` would give, without converting; no chain is no error here.

    Args:
        model: a SpikingJelly net in step_mode "m"; left untouched.
        policy: as of ``convert``, but for "auto".
        k: frames per convolution where the policy does not say.
        example_input: a real input. With it the report has MACs, and more nets can be looked into.

    Raises:
        ModelTypeError: ``model`` is no ``torch.nn.Module``.
        TraceError: ``torch.fx`` cannot follow its forward.
        PolicyError: a bad policy, or a rule that matches nothing.
        ConversionError: converted before, or no deep copy.
    """
    check_plain(model)
    target = deep_copy(model, dry=True, or_inplace=False)
    found = analyse(target, policy, k, example_input, backends.choose("auto"), True)
    return report_on(found, target, f"plan for {type(model).__name__}")


def report(converted: nn.Module) -> Report:
    """What became of every conv of a converted model. MACs show once it has seen an input. Raises ConversionError."""
    record = record_of(converted, "report")
    found = report_on(record.plan, converted, record.title)
    notes = [*found.notes, *record.notes]
    corrections = ((n, c) for n, c in record.corrected.items() if c.by == MATCH)
    if record.matched and all(is_as_made(converted, name, c) for name, c in corrections):
        # What was seen before it was matched is told no more.
        notes = [*(note for note in notes if not note.startswith(AT_RISK)), record.matched]
    return replace(found, evidence=record.evidence, notes=tuple(notes), policy=policy_of(converted))


def policy_of(converted: nn.Module) -> Policy:
    """The policy of a converted model as it now is: one rule for each converted layer, everything else kept.

    ``k`` and modes are what ``set_k`` has made of them; ``policy.evidence`` is what a search measured, while it still holds.
    ``sj_tac.convert`` makes the same of a model of the same class, and ``policy.save("policy.yaml")`` writes it. What
    ``match`` wrote is no part of a policy: ``sj_tac.save`` keeps it.

    Args:
        converted: a net of ``sj_tac.convert``.

    Raises:
        ConversionError: not a converted model.
    """
    record = record_of(converted, "policy_of")
    policy = record.plan.policy(converted)
    policy._evidence = record.evidence
    return policy


def check_plain(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelTypeError(f"a model is a torch.nn.Module, got {type(model).__name__}: {str(model)[:80]!r}")
    host.know_loaded()
    if hasattr(model, "_orig_mod"):
        raise ConversionError(
            f"{type(model).__name__} is what torch.compile made of a {type(model._orig_mod).__name__}; convert that one, "
            "and compile what comes out"
        )
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ConversionError(
                f"module {name!r} is a {type(module).__name__} that has no weights yet; call the model once on a batch, "
                "which makes them, then convert it"
            )
        if is_swapped(module):
            where = f"its module {name!r} is" if name else "it is"
            raise ConversionError(
                f"{type(model).__name__} cannot be converted again: {where} part of a converted chain; "
                "sj_tac.restore it first (the whole net, where this is a part of one), or change it with sj_tac.set_k"
            )


def deep_copy(model: nn.Module, dry: bool = False, or_inplace: bool = True) -> nn.Module:
    """A copy. Raises ConversionError.

    Args:
        dry: it is only looked at, so that it may share what it will. or_inplace: the user's call takes ``inplace=True``.
    """
    instead = "; or pass inplace=True" if or_inplace else ""
    held = None if dry else next(_held_by_functions(model), None)
    if held is not None:
        raise ConversionError(
            f"{type(model).__name__} cannot be deep-copied: {held[0]!r} is a function that holds its module {held[1]!r}, "
            f"which a copy would share with its source (checkpoint wrappers do so); wrap it after it is converted{instead}"
        )
    try:
        return copy.deepcopy(model, host.detached_memories(model))
    except Exception as error:
        stuck = [
            f"{name}.{key}".lstrip(".")
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and not value.is_leaf
        ]
        which = f" because {stuck[0]!r} is a tensor computed from others" if stuck else ""
        raise ConversionError(
            f"{type(model).__name__} cannot be deep-copied{which} ({type(error).__name__}: {error}); set it to None if a "
            "forward keeps it (a feature, a loss), or call the model under torch.no_grad() first; make weights plain "
            f"(torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm){instead}"
        ) from error


def _held_by_functions(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Attributes that are functions which a forward calls, and the module of the model that each has in its closure."""
    names = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        # Statically: a ScriptModule's class makes its forward when asked.
        called = getattr(getattr(inspect.getattr_static(type(module), "forward"), "__code__", None), "co_names", ())
        for key, value in vars(module).items():
            for cell in _closures(value) if key in called or hasattr(type(module), key) else ():
                if isinstance(cell, nn.Module) and cell in names:
                    yield f"{name}.{key}".lstrip("."), names[cell] or type(cell).__name__


def _closures(value: Any, depth: int = 4) -> Iterator[Any]:
    """What a function, or those that a partial binds, holds in its closures."""
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType) and value.__closure__:
        inner = []
        for cell in value.__closure__:
            with contextlib.suppress(ValueError):  # an empty one
                inner.append(cell.cell_contents)
        yield from inner
    else:
        return
    for item in inner if depth else ():
        yield from _closures(item, depth - 1)


def at_k_1(converted: nn.Module) -> nn.Module:
    """A copy of a converted model that computes what its source does: k = 1 in every layer, and no corrections."""
    try:
        copied = deep_copy(converted)
    except ConversionError as error:
        raise ConversionError(
            f"what the source does is measured on a copy of the converted net: {str(error).split(';')[0]}; make the weights "
            "plain first, then convert"
        ) from error
    record = record_of(copied, "at_k_1")
    swap.check_unedited(record.plan, copied, "what the source does is measured on a copy of the converted net")
    take_back(copied, record.corrected, [*record.corrected])
    source = {
        name: s if s.mode == "keep" else s.model_copy(update={"mode": "preserve", "k": 1})
        for name, s in record.plan.settings.items()
    }
    record.plan = record.plan.under(copied, source)
    for handle in record.handles:
        handle.remove()
    record.handles = swap.apply(record.plan, copied)
    return copied


def record_of(model: Any, action: str) -> Record:
    if not isinstance(model, nn.Module):
        raise ModelTypeError(f"{action}: a model is a torch.nn.Module, got {type(model).__name__}: {str(model)[:80]!r}")
    record = model.__dict__.get(RECORD)
    if isinstance(record, Record):
        return record
    inner = [name for name, module in model.named_modules() if RECORD in module.__dict__]
    hint = f"its module {inner[0]!r} is: call {action} on that" if inner else "call sj_tac.convert first"
    raise ConversionError(f"{action}: {type(model).__name__} is not a converted model; {hint}")


def _no_chain(model: nn.Module, found: Plan) -> str:
    verdicts = report_on(found, model, "").verdicts
    if not verdicts:
        return f"{type(model).__name__} has no convolution; sj_tac converts Conv2d -> [BatchNorm2d] -> neuron chains"
    if all(v.reason == Reason.NOT_MULTI_STEP for v in verdicts):
        return (
            f"{type(model).__name__} is in step_mode 's', one frame a call, where nothing can be aggregated; "
            "call functional.set_step_mode(model, 'm') and feed it [T, N, C, H, W]"
        )
    lines = [f"  {v.layer}: {v.reason}: {v.detail} ({v.hint})" for v in verdicts]
    seen = {v.layer for v in verdicts}
    if any(isinstance(m, nn.Linear) and name not in seen for name, m in model.named_modules()):
        lines.append(
            "  Linear layers were not looked at: a policy with layers: [conv, linear] converts those that drive neurons"
        )
    return f"no chain of {type(model).__name__} can be converted:\n" + "\n".join(lines)
