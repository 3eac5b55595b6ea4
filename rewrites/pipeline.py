"""From a model to a converted one, and the record that it carries: its plan and what was done to it since."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from sj_tac import host
from sj_tac.definition import collapse
from sj_tac.definition.convs import SharedConv, torchs_own
from sj_tac.definition.neurons import OperatorNeuron, is_known
from sj_tac.definition.noted import is_norm
from sj_tac.errors import BackendError, ConversionError, ModelTypeError
from sj_tac.kernels import backends, reference
from sj_tac.kernels.fire import kernel_problem
from sj_tac.policy import Policy
from sj_tac.rewrites import decide, dtypes
from sj_tac.rewrites.arguments import as_arguments
from sj_tac.rewrites.corrections import MATCH, Correction, is_as_made, take_back
from sj_tac.rewrites.decide import norms
from sj_tac.rewrites.gate import Forget, capture_calls, detach, gate_of
from sj_tac.rewrites.measure.runs import UNSET, uncopied
from sj_tac.rewrites.plan import Plan, all_single, analyse, look, make, no_layer, report_on
from sj_tac.rewrites.verify import verify
from sj_tac.verdicts import AT_RISK, Report

RECORD = "_sj_tac"


@dataclass
class Record:
    """What a converted model carries: its plan, what its policy was chosen by, what a sample showed.

    Attributes:
        corrected: by the name of a module. matched: what ``match`` did, in a sentence; empty where it was not called.
        frozen: whether ``freeze_bn`` froze the net's BatchNorms last, those that another k stretches among them.
    """

    plan: Plan
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
    """``convert`` under any policy but "auto"; ``evidence`` for the policy goes into the report."""
    backend = backends.choose(backend, fuse)
    check_plain(model)
    target = model if inplace else deep_copy(model)
    plan = analyse(target, policy, k, example_input, backend, fuse)
    return _made(plan, model, target, example_input, evidence)


class Source:
    """A model that is converted under many policies, and measured once. It must not change meanwhile.

    Args:
        model: left as it is. layers: kinds of layers, which every policy then has.
        example_input, backend: as of ``convert``.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], *, example_input: Any, backend: str = "auto") -> None:
        check_plain(model)
        self.model, self.layers, self.backend = model, tuple(layers), backends.choose(backend)
        self._looked = look(model, layers, example_input)

    def convert(self, policy: Policy) -> nn.Module:
        """What ``convert_with`` makes of the model under ``policy``."""
        assert set(policy.layers) == set(self.layers), (policy.layers, self.layers)
        target = deep_copy(self.model, or_inplace=False)
        return _made(make(self._looked, target, policy, self.backend, True), self.model, target, None, None)


def _made(plan: Plan, model: nn.Module, target: nn.Module, example_input: Any, evidence: Any) -> nn.Module:
    """``target``, the model or a copy of it, converted and verified; as it was where that fails."""
    if not plan.places:
        raise ConversionError(no_layer(model, plan))
    check_backend(plan.backend, target, [plan.measured.shared[name].neurons[0] for name in plan.places])
    if target is not model:
        host.reset(target)
    try:
        apply(plan, target)
        if example_input is not None:
            verify(model, target, as_arguments(example_input), exact=all_single(plan.settings), groups=plan.decision.groups)
        setattr(target, RECORD, Record(plan, type(model).__name__, evidence))
    except BaseException:
        target.__dict__.pop(RECORD, None)
        undo(target)
        raise
    dtypes.tell(plan.wide, plan.places)
    return target


def apply(plan: Plan, target: nn.Module) -> None:
    """Make a plan true in a model, in place."""
    decide.apply(plan.decision, plan.measured, target)
    if plan.fused and plan.backend != reference.NAME:
        capture_calls(target, plan.backend)
    elif not any(isinstance(hook, Forget) for hook in target._forward_pre_hooks.values()):
        target.register_forward_pre_hook(Forget())


def undo(target: nn.Module) -> None:
    """Give a model its own classes and its own call again."""
    detach(target)
    decide.undo(target)


def check_backend(backend: str, target: nn.Module, names: Sequence[str]) -> None:
    """Raise BackendError where kernels that were named cannot run the neurons of these names."""
    if backend not in backends.COMPILED:
        return
    weight = next(target.parameters(), None)
    # A net that is to run on the GPU may be converted before it is moved there.
    elsewhere = weight is None or weight.is_meta or (backend in backends.ON_CUDA and weight.device.type == "cpu")
    problem = ""
    if weight is not None and elsewhere:
        problem = backends.fastest(backend, None, weight.dtype)[1]
    elif weight is not None:
        problem = backends.fastest(backend, weight.device, weight.dtype)[1]
    for name in () if problem else names:
        if problem := unfused(target.get_submodule(name)):
            problem = f"{name!r}: {problem}"
            break
    if problem:
        raise BackendError(f"backend={backend!r} cannot run: {problem}; backend='auto' takes what can")


def unfused(node: Any) -> str:
    """Return why a neuron has no kernel; empty if it has one."""
    if not is_known(node):
        return f"a {type(node).__name__} runs its own steps, for which there is no kernel"
    return host.neuron_problem(node) or kernel_problem(node, None)


def kernels(net: nn.Module, plan: Plan) -> tuple[dict[str, str], Callable[[nn.Module], str]]:
    """Return, by neuron, what ran in captured graphs, or will run; and a function that says why a neuron has no kernel."""
    gate, weight = gate_of(net), next(net.parameters(), None)
    if not plan.fused or plan.backend == reference.NAME or weight is None:
        return {}, lambda node: ""
    name, problem = backends.fastest(plan.backend, weight.device, weight.dtype)
    if problem:
        return {}, lambda node: problem
    if gate is not None and gate.capture.graphs:
        fused = gate.capture.fused()
    else:
        fused = {n for n, m in net.named_modules() if is_known(m) and not unfused(m)}
    return dict.fromkeys(fused, f"{name}, fused"), unfused


def plan(model: nn.Module, policy: Any = "preserve", k: int = 2, *, example_input: Any = None) -> Report:
    """The verdicts that ``convert`` would give, without converting; no layer is no error here.

    Args:
        model: takes frames [T, N, C, H, W], or images that it repeats; left untouched.
        policy: as of ``convert``, but for "auto".
        k: frames per convolution where the policy does not say.
        example_input: as of ``convert``. With it the report has MACs.

    Raises:
        ModelTypeError: ``model`` is no ``torch.nn.Module``.
        TraceError: its forward takes other arguments.
        PolicyError: a bad policy, or a rule that matches nothing.
        ConversionError: converted before, or it does not run on the example, or takes none of the usual shapes.
    """
    check_plain(model)
    found = analyse(model, policy, k, example_input, backends.choose("auto"), True)
    return report_on(found, model, f"plan for {type(model).__name__}", *kernels(model, found))


def report(converted: nn.Module) -> Report:
    """What became of every conv of a converted model. Raises ConversionError."""
    record = record_of(converted, "report")
    found = report_on(record.plan, converted, record.title, *kernels(converted, record.plan))
    gate = gate_of(converted)
    slow = () if gate is None else tuple(gate.capture.told)
    notes = [*found.notes, *record.notes, *(f"runs as it is defined: {problem}" for problem in slow)]
    notes += [text for m in converted.modules() if isinstance(m, SharedConv) for text in m.sharing.unshared]
    corrections = ((n, c) for n, c in record.corrected.items() if c.by == MATCH)
    if record.matched and all(is_as_made(converted, name, c) for name, c in corrections):
        # What was seen before it was matched is told no more.
        notes = [*(note for note in notes if not note.startswith(AT_RISK)), record.matched]
    graphs = () if gate is None else tuple(gate.capture.graphs)
    found = replace(found, verdicts=tuple(dtypes.as_captured(found.verdicts, graphs)))
    return replace(found, evidence=record.evidence, notes=tuple(notes), policy=policy_of(converted), graphs=graphs)


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
    policy = record.plan.policy()
    policy._evidence = record.evidence
    return policy


def is_swapped(module: nn.Module) -> bool:
    """Return whether a conversion changed a module."""
    hooks = module._forward_hooks.values()
    return isinstance(module, (SharedConv, OperatorNeuron)) or any(isinstance(hook, collapse.Mean) for hook in hooks)


def check_unedited(plan: Plan, model: nn.Module, action: str) -> None:
    """Raise ConversionError where a module that the plan rests on is gone, or is of another kind now."""
    modules, measured = dict(model.named_modules()), plan.measured

    def fits(name: str) -> bool:
        if name in plan.places:
            return isinstance(modules[name], SharedConv) or torchs_own(modules[name]) is not None
        if name in measured.norms:
            return is_norm(modules[name])
        return host.is_neuron(modules[name]) or measured.kinds[name] == type(modules[name]).__qualname__

    behind = [n for name in plan.places for n in measured.shared[name].neurons]
    for name in (*plan.places, *behind, *norms(plan.decision, measured)):
        if name in modules and fits(name):
            continue
        now = f"a {type(modules[name]).__name__} now" if name in modules else "gone"
        raise ConversionError(
            f"{action}: module {name!r} was converted, and is {now}; the model was left as it was. Call sj_tac.restore on "
            "it, then convert it as it is now"
        )


def check_plain(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelTypeError(f"a model is a torch.nn.Module, got {type(model).__name__}: {str(model)[:80]!r}")
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


def deep_copy(model: nn.Module, or_inplace: bool = True) -> nn.Module:
    """A copy. Raises ConversionError.

    Args:
        or_inplace: the user's call takes ``inplace=True``.
    """
    instead = "; or pass inplace=True" if or_inplace else ""
    held = next(_held_by_functions(model), None)
    if held is not None:
        raise ConversionError(
            f"{type(model).__name__} cannot be deep-copied: {held[0]!r} is a function that holds its module {held[1]!r}, "
            f"which a copy would share with its source (checkpoint wrappers do so); wrap it after it is converted{instead}"
        )
    try:
        return copy.deepcopy(model, host.detached_memories(model))
    except Exception as error:
        what, fix = uncopied(model)
        if fix == UNSET and RECORD not in vars(model):  # a conversion in place measures copies, too
            instead = ""
        raise ConversionError(
            f"{type(model).__name__} cannot be deep-copied{what} ({type(error).__name__}: {error}); {fix}{instead}"
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
        yield from (item.__self__ if isinstance(item, MethodType) else item for item in inner)
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
    check_unedited(record.plan, copied, "what the source does is measured on a copy of the converted net")
    take_back(copied, record.corrected, [*record.corrected])
    source = {
        name: s if s.mode == "keep" else s.model_copy(update={"mode": "preserve", "k": 1})
        for name, s in record.plan.settings.items()
    }
    record.plan = record.plan.under(copied, source)
    apply(record.plan, copied)
    return copied


def record_of(model: Any, action: str) -> Record:
    if not isinstance(model, nn.Module):
        raise ModelTypeError(f"{action}: a model is a torch.nn.Module, got {type(model).__name__}: {str(model)[:80]!r}")
    record = model.__dict__.get(RECORD)
    if isinstance(record, Record):
        return record
    inner = [name for name, module in model.named_modules() if RECORD in module.__dict__]
    swapped = [name for name, module in model.named_modules() if isinstance(module, SharedConv)]
    hint = f"its module {inner[0]!r} is: call {action} on that" if inner else "call sj_tac.convert first"
    if swapped and not inner:
        hint = f"it holds layers of one ({swapped[0]!r}): call {action} on the net that sj_tac.convert returned"
    raise ConversionError(f"{action}: {type(model).__name__} is not a converted model; {hint}")
