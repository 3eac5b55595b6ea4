"""A plan: what was measured of a net, what a policy makes of it, and the verdicts that say so."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import ConversionError, PolicyError, TraceError
from sj_tac.kernels import reference
from sj_tac.policy import SOURCE, Policy, Rule, Settings, as_policy, exactly
from sj_tac.rewrites import dtypes
from sj_tac.rewrites.arguments import as_arguments, check_arguments, described
from sj_tac.rewrites.decide import PLAIN, Decision, Place, Span, decide
from sj_tac.rewrites.measure.examples import find_example
from sj_tac.rewrites.measure.measured import Measured, measure
from sj_tac.rewrites.measure.runs import fresh, uncopied
from sj_tac.verdicts import AT_RISK, HELP, Reason, Refusal, Report, Verdict

# So many layers of IF neurons with hard reset behind each other lose accuracy that a user would notice.
DEEP = 3


@dataclass(frozen=True)
class Looked:
    """A model that was measured once, for any number of policies over the same kinds of ``layers``.

    Attributes:
        given: whether the user gave the example.
    """

    measured: Measured
    layers: tuple[str, ...]
    given: bool


@dataclass(frozen=True)
class Plan(Looked):
    """What a net's layers become.

    Attributes:
        decision: of its layers under ``settings``. backend: as it was asked for. fused: whether calls are captured.
        wide: of layers that do not compute in the dtype that they were to, why.
    """

    settings: dict[str, Settings]
    decision: Decision
    backend: str
    fused: bool
    wide: Mapping[str, str]

    @property
    def places(self) -> dict[str, Place]:
        """The convolutions that are converted."""
        return self.decision.places

    @property
    def stretched(self) -> dict[str, Span]:
        """Convolutions and neurons that run behind a collapse without being converted, with the span of their frames."""
        driven = {neuron for name in self.places for neuron in self.measured.shared[name].neurons}
        points = self.decision.points.items()
        return self.decision.behind | {n: point.span for n, point in points if not point.by and n not in driven}

    def under(self, model: nn.Module, settings: Mapping[str, Settings]) -> Plan:
        """Return the same plan under other settings."""
        return replace(self, settings=dict(settings), decision=decide(self.measured, model, settings))

    def policy(self) -> Policy:
        """Return what is converted, as rules by exact name over a default that keeps the rest.

        A layer that its place refused has a rule by pattern, and is refused again: it ends a collapse, as what is
        kept does not.
        """
        default, rules = Settings(mode="keep"), []
        for name, settings in self.settings.items():
            refused = isinstance(self.measured.convolutions[name], Refusal)
            if settings.mode == "keep" or refused:
                continue
            said = {key: value for key, value in settings if value != getattr(default, key)}
            match = exactly(name) if name in self.places else f"re:{re.escape(name)}"
            rules.append(Rule.model_validate({"match": match} | said | {"k": settings.k}))
        return Policy(layers=self.layers, default=default, rules=tuple(rules))


def look(model: nn.Module, layers: Sequence[str], example_input: Any, groups_too: bool = True) -> Looked:
    """Measure a model on an example, or on a usual shape that it takes. It is left as it was.

    Args:
        groups_too: measure what policies with collapses and mixed weights ask for.

    Raises:
        ConversionError: it does not run on the example, or takes none of the usual shapes.
        TraceError: its forward takes other arguments.
    """
    with _on_cpu():
        arguments = (find_example(model),) if example_input is None else as_arguments(example_input)
    check_arguments(model, arguments)
    try:
        on_cpu, arguments = _at_rest(model, arguments)
    except Exception as error:
        what, fix = uncopied(model)
        raise ConversionError(
            f"{type(model).__name__} is measured on a copy, and cannot be deep-copied{what} ({type(error).__name__}: "
            f"{error}); {fix}"
        ) from error
    try:
        # What the user had torch compile of the net would not meet the hooks that measure it.
        with _on_cpu(), torch.compiler.set_stance("force_eager"):
            measured = measure(on_cpu, arguments, "linear" in layers, groups_too)
    except (ConversionError, TraceError):
        raise
    except Exception as error:
        raise ConversionError(
            f"the model does not run on example_input of shape {described(arguments)} ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}); pass a batch [T, N, C, H, W] that it takes"
        ) from error
    return Looked(measured.slim(), tuple(layers), example_input is not None)


def _on_cpu() -> AbstractContextManager[Any]:
    """Return a context in which tensors are made on the CPU, whatever the user's default is."""
    # torch asks a context before each of its functions: none, where no default is set.
    return torch.device("cpu") if torch._C._len_torch_function_stack() else nullcontext()


def _at_rest(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a copy of a model at rest, on the CPU, where measurements compare small tensors; and its arguments there."""
    with host.stack_for(model):
        if all(t.device.type == "cpu" for t in (*model.parameters(), *model.buffers())):
            made = fresh(model)
        else:
            made = copy.deepcopy(model).cpu()
            arguments = torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, arguments)
    host.reset_memories(made)
    return made, arguments


def make(looked: Looked, model: nn.Module, policy: Policy, backend: str, fused: bool) -> Plan:
    """Return the plan of a model that was looked at, under a policy. Raises PolicyError."""
    measured = looked.measured
    resolved = policy.resolve(list(measured.convolutions))
    if "conv" not in policy.layers:
        others = [name for name in resolved if not isinstance(model.get_submodule(name), nn.Linear)]
        resolved |= dict.fromkeys(others, (Settings(mode="keep"), None))
    has_kernels = fused and backend != reference.NAME
    settings, wide = dtypes.decided(model, measured.convolutions, resolved, policy._source, has_kernels)
    decision = decide(measured, model, settings)
    _check_exact_rules(resolved, decision, policy._source)
    return Plan(**vars(looked), settings=settings, decision=decision, backend=backend, fused=fused, wide=wide)


def analyse(model: nn.Module, policy: Any, k: int, example_input: Any, backend: str, fused: bool) -> Plan:
    """Measure a model and decide under a policy. Changes nothing in ``model``."""
    checked = as_policy(policy, k)
    said: list[Settings | Rule] = [checked.default, *checked.rules]
    groups_too = any(s.mode == "collapse" or s.weights == "mixed" for s in said)
    return make(look(model, checked.layers, example_input, groups_too), model, checked, backend, fused)


def all_single(settings: Mapping[str, Settings]) -> bool:
    """Return whether nothing is aggregated: the converted net computes what its source does."""
    return all(s.k == 1 and s.dtype == SOURCE for s in settings.values() if s.mode != "keep")


def _check_exact_rules(resolved: Mapping[str, tuple[Settings, Rule | None]], decision: Decision, source: str) -> None:
    """A rule that names one layer and cannot be followed is an error; a glob over it is only reported."""
    for name, (settings, rule) in resolved.items():
        refusal = decision.refused.get(name)
        if refusal is None or rule is None or not rule.is_exact or settings.mode == "keep":
            continue
        verdict = Verdict.refuse(name, refusal)
        raise PolicyError(
            f"{source}, rule for {name!r}: mode {settings.mode!r} is impossible there, {verdict.reason}: "
            f"{verdict.detail}. {verdict.hint[:1].upper() + verdict.hint[1:]}, or set mode: keep"
        )


def report_on(
    plan: Plan,
    model: nn.Module,
    title: str,
    kernels: Mapping[str, str] | None = None,
    unfused: Callable[[nn.Module], str] = lambda node: "",
) -> Report:
    """Return the verdicts of a plan, in the order of the model's modules.

    Args:
        kernels: by neuron, what ran, or runs. unfused: says why a neuron has no kernel.
    """
    verdicts, stretched, modules = [], plan.stretched, dict(model.named_modules())
    for name in modules:
        if name in plan.places:
            node = plan.measured.shared[name].neurons[0]
            kernel = (kernels or {}).get(node, "reference")
            why = unfused(modules[node]) if plan.fused and kernel == "reference" and node in modules else ""
            verdicts.append(_converted(plan, name, kernel, why))
        elif name in plan.measured.convolutions:
            verdicts.append(_left(plan, name))
        elif name in stretched:
            k, kernel = stretched[name].stretch, (kernels or {}).get(name, "reference")
            detail = f"runs {k} steps on every frame behind a collapse and emits their mean"
            if k == 1:
                detail = "runs one step on every frame behind a binary collapse"
            verdicts.append(Verdict(name, "stretched", k=k, kernel=kernel, detail=detail))
    notes = (*plan.measured.notes, *_risky(plan, modules))
    return Report(tuple(verdicts), title, notes=notes, policy=plan.policy())


def _converted(plan: Plan, name: str, kernel: str, unfused: str) -> Verdict:
    place, found = plan.places[name], plan.measured.shared[name]
    s, why = place.settings, [*found.notes]
    if not found.is_affine:
        why.insert(0, f"approximate: shared drives are off by {found.off:.2g} of their norm")
    if name in plan.decision.early:
        why.append(plan.decision.early[name])
    if plan.settings[name].weights == "mixed":
        why.append(f"mixed weights: {s.weights}")
    if name in plan.wide:
        why.append(dtypes.wide(plan.wide[name]))
    if unfused:
        why.append(f"not fused: {unfused}")
    macs = _macs(plan, name, place.span.rate * place.k)
    return Verdict(name, "converted", s.mode, s.k, kernel, None, "; ".join(why), "", *macs, s.dtype)


def _left(plan: Plan, name: str) -> Verdict:
    span, found = plan.decision.behind.get(name, PLAIN), plan.measured.convolutions[name]
    before, after = _macs(plan, name, span.rows)
    if span.rows > 1:
        detail = f"kept by the policy, at the rate of a collapse before it: a frame stands for {span.rows} frames"
        return Verdict(name, "stretched", k=span.stretch, detail=detail, macs_before=before, macs_after=after)
    refusal = plan.decision.refused.get(name)
    if refusal is None or (plan.settings[name].mode == "keep" and not isinstance(found, Refusal)):
        refusal = Refusal(Reason.POLICY_KEEP)
    return Verdict.refuse(name, refusal, macs_before=before, macs_after=after)


def _macs(plan: Plan, name: str, rows: int) -> tuple[int | None, int | None]:
    """Return multiply-accumulates of a convolution on a sample of the user's example, before and once for ``rows`` rows."""
    seen = plan.measured.macs.get(name)
    if seen is None or not plan.given:
        return None, None
    steps, each = seen
    return steps * each, -(-steps // rows) * each


def _risky(plan: Plan, modules: Mapping[str, nn.Module]) -> list[str]:
    """IF neurons with hard reset behind each other: on shared drives they lose less at a reset, and fire more often."""
    nodes: list[Any] = [modules.get(plan.measured.shared[n].neurons[0]) for n, p in plan.places.items() if p.settings.k > 1]
    count = sum(isinstance(node, host.neuron.IFNode) and node.v_reset is not None for node in nodes)
    if count < DEEP:
        return []
    why = "which fire more often on shared drives than in the source, layer by layer more so"
    return [f"{AT_RISK}: {count} layers drive IF neurons with hard reset, {why}; {HELP}"]


def no_layer(model: nn.Module, plan: Plan) -> str:
    """Return what an error says of a model in which nothing is converted."""
    verdicts = report_on(plan, model, "").verdicts
    if not verdicts:
        return f"{type(model).__name__} has no convolution; sj_tac converts convolutions that drive neurons"
    nodes = [m for m in model.modules() if host.is_neuron(m)]
    if nodes and not any(map(host.is_multi_step, nodes)):
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
    return f"no convolution of {type(model).__name__} can be converted:\n" + "\n".join(lines)
