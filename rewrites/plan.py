"""What is to become of a model under a policy, by name alone; and what a report says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from sj_tac import host
from sj_tac.errors import ConversionError, PolicyError
from sj_tac.kernels import backends
from sj_tac.policy import SOURCE, Policy, Rule, Settings, as_policy, exactly
from sj_tac.rewrites import verify as verification
from sj_tac.rewrites.arguments import as_arguments
from sj_tac.rewrites.axes import find_axes, why_unknown
from sj_tac.rewrites.chains import Chain, find_chains
from sj_tac.rewrites.dtypes import decided
from sj_tac.rewrites.folds import misread
from sj_tac.rewrites.fuse import Fusion, fuse
from sj_tac.rewrites.graph import Graph, read
from sj_tac.rewrites.layouts import Sample
from sj_tac.rewrites.promises import broken_promises, own_forwards
from sj_tac.rewrites.rates import DrivePlace, Layout, lay_out
from sj_tac.rewrites.trace import trace
from sj_tac.rewrites.weights import MIXED
from sj_tac.runtime.borders import PLAIN, Axes, Span
from sj_tac.runtime.convs import DriveModule
from sj_tac.runtime.drives import Drive
from sj_tac.runtime.neurons import Unit
from sj_tac.runtime.swaps import is_swapped, own_class
from sj_tac.verdicts import AT_RISK, HELP, Reason, Refusal, Report, Verdict

# So many layers of IF neurons with hard reset behind each other lose accuracy that a user would notice.
DEEP = 3


@dataclass(frozen=True)
class Plan:
    """What is to become of a model. It holds names and settings, no module: it can be kept, and made again for another k.

    Attributes:
        seen: a run of the source on the example input, or None; sampled: a real sample ran beside the trace's symbols.
        backend, fused: as the arguments of ``convert``. axes: where T and N stand among forward's arguments, if known.
        untold: why no call can tell them, as far as it was tried.
        wide: why a layer's convolution does not run in the dtype that was asked for.
        stand_ins: convs and Linears with a forward of their own that may stand for the known ones.
    """

    chains: dict[str, Chain | Refusal]
    settings: dict[str, Settings]
    graph: Graph
    sampled: bool
    seen: verification.Run | None
    backend: str
    fused: bool
    layout: Layout
    fusion: Fusion
    axes: Axes | None = None
    untold: str = ""
    wide: Mapping[str, str] = field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()

    @property
    def macs(self) -> dict[str, tuple[int, int]]:
        return {} if self.seen is None else self.seen.macs

    def under(self, model: nn.Module, settings: dict[str, Settings], entry: Span = PLAIN) -> Plan:
        """The plan of ``model`` under other settings; ``entry``: what a frame of its input stands for. Changes nothing."""
        _let_stand_in(model, self.stand_ins)
        axes = self.axes
        knows = axes is not None and (axes.steps is not None or axes.batch is not None)
        no_time = None if knows else Refusal(Reason.TIME_UNKNOWN, self.untold)
        layout = lay_out(model, self.graph, self.chains, settings, entry, no_time)
        fusion = fuse(model, self.graph, self.chains, layout, self.backend) if self.fused else Fusion()
        return replace(self, settings=settings, layout=layout, fusion=fusion)

    def policy(self, model: nn.Module) -> Policy:
        """What is converted, as rules by exact name over a default that keeps the rest.

        A chain that its place refused has a rule by pattern, and is refused again: it ends a collapse, what is kept does
        not.
        """
        modules = dict(model.named_modules())
        linear = any(name in modules and not host.is_conv(modules[name]) for name in self.chains)
        default = Settings(mode="keep")
        rules = []
        for name, settings in self.settings.items():
            if settings.mode == "keep" or not isinstance(self.chains[name], Chain):
                # An image's copies are looked for there, too.
                settings = Settings(mode="keep", exact=settings.exact and settings.normalize)
            said = {key: value for key, value in settings if value != getattr(default, key)}
            if said:
                match = exactly(name) if name in self.layout.drives else f"re:{re.escape(name)}"
                k = {} if settings.mode == "keep" else {"k": settings.k}
                rules.append(Rule.model_validate({"match": match} | said | k))
        return Policy(layers=("conv", "linear") if linear else ("conv",), default=default, rules=tuple(rules))

    def without_runs(self) -> Plan:
        """The plan without the large part of what was seen of the source."""
        seen = None if self.seen is None else verification.Run(self.seen.macs, [], [])
        return replace(self, seen=seen)


def analyse(model: nn.Module, policy: Any, k: int, example_input: Any, backend: str, fused: bool) -> Plan:
    """Trace, find chains, apply the policy, lay out time, fuse. Changes nothing in ``model``."""
    checked = as_policy(policy, k)
    return decide(look(model, checked.layers, example_input, backend, fused), model, checked, example_input)


def look(model: nn.Module, layers: Sequence[str], example_input: Any, backend: str, fused: bool) -> Plan:
    """What every policy for these ``layers`` finds in a model: its chains, without settings. Changes nothing in it."""
    arguments = None if example_input is None else as_arguments(example_input)
    own = own_forwards(model, arguments, "linear" in layers)
    stand_ins = tuple(name for name, problem in own.items() if not problem)
    _let_stand_in(model, stand_ins)
    traced = trace(model, example_input)
    graph = read(model, traced.graph)
    broken = broken_promises(model, arguments)
    chains = find_chains(
        model, graph, traced.closed, "linear" in layers, broken, arguments is not None, _refusals(model, own)
    )
    return Plan(
        chains, {}, graph, traced.sampled, None, backend, fused, Layout(), Fusion(), stand_ins=stand_ins
    )  # fmt: skip


def _let_stand_in(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        module = model.get_submodule(name)
        if not is_swapped(module):
            host.stand_in(module)


def _refusals(model: nn.Module, own: Mapping[str, str]) -> dict[str, Refusal]:
    """Why convs and Linears with a forward of their own may not stand for the known ones."""
    found = {}
    for name, problem in own.items():
        if problem:
            module = model.get_submodule(name)
            kind, made = own_class(module), parametrize.is_parametrized(module)
            named = f"a {kind.__module__}.{kind.__qualname__}, " + ("parametrized" if made else "with a forward of its own")
            found[name] = Refusal(Reason.PARAMETRIZED if made else Reason.UNSUPPORTED_CONV, f"it is {named}: {problem}")
    return found


def run_source(looked: Plan, model: nn.Module, example_input: Any, exact: bool) -> Plan:
    """A plan with what runs of the source show; with digests of every value where ``exact``."""
    arguments, sample = as_arguments(example_input), looked.graph.sample
    sites = {chain.conv: chain.site for chain in looked.chains.values() if isinstance(chain, Chain)}
    seen = _run_source(model, arguments, sites, exact, sample)
    axes = find_axes(model, arguments, sample)
    chains = {**looked.chains, **misread(model, arguments, axes, sample, looked.chains)}
    untold = "" if axes is None or axes.steps or axes.batch else why_unknown(model, arguments, sample)
    return replace(looked, seen=seen, axes=axes, untold=untold, chains=chains)


def decide(looked: Plan, model: nn.Module, checked: Policy, example_input: Any) -> Plan:
    """The plan of a model that was looked at, under a policy; the source runs here, if it has not. Changes nothing in it."""
    resolved = checked.resolve(list(looked.chains))
    if "conv" not in checked.layers:
        convs = [name for name in resolved if host.is_conv(model.get_submodule(name))]
        resolved |= {name: (Settings(mode="keep"), None) for name in convs}
    settings, wide = decided(model, looked.chains, resolved, checked._source)
    if example_input is not None and looked.seen is None:
        looked = run_source(looked, model, example_input, all_single(settings))
    plan = replace(looked.under(model, settings), wide=wide)
    _check_exact_rules(resolved, looked.chains, plan.layout, checked._source)
    return plan


def all_single(settings: Mapping[str, Settings]) -> bool:
    """Nothing is aggregated: a converted net computes what its source does."""
    return all(s.k == 1 and s.dtype == SOURCE for s in settings.values() if s.mode != "keep")


def _run_source(
    model: nn.Module, arguments: tuple[Any, ...], sites: Mapping[str, str], exact: bool, sample: Sample | None
) -> verification.Run:
    found = verification.run(model, arguments, sites, exact=exact, sample=sample)
    if found.failure:
        hooks = (
            "; its own forward pre-hooks are silent meanwhile: pass what they hand on" if model._forward_pre_hooks else ""
        )
        raise ConversionError(
            f"the model {found.failure}; pass a batch [T, N, C, H, W] that it takes{hooks}"
        ) from found.error
    return found


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


def report_on(plan: Plan, model: nn.Module, title: str) -> Report:
    """The verdicts of a plan for ``model``, with what its last call did where it is converted already."""
    return _Reporter(plan, model).report(title)


class _Reporter:
    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan, self.layout, self.model = plan, plan.layout, model
        self.modules = dict(model.named_modules())

    def role(self, name: str) -> Any:
        """What the module has become, where it is converted."""
        return self.modules[name].__dict__.get("_tac") if name in self.modules else None

    def report(self, title: str) -> Report:
        verdicts = []
        stretched = dict(self.layout.stretched)
        for name in self.modules:
            if name in self.plan.chains:
                stretched.pop(name, None)
                verdicts.append(self.verdict(name))
            elif name in stretched:
                verdicts.append(self.stretched(name, stretched.pop(name)))
        return Report(tuple(verdicts), title, notes=self.notes(), policy=self.plan.policy(self.model))

    def notes(self) -> tuple[str, ...]:
        """What is to know of the net as a whole."""
        return (*self.order_of_input(), *self.risky_neurons())

    def order_of_input(self) -> list[str]:
        """Where time stands in the input, where that is not in front."""
        axes = self.plan.axes
        if axes is None or axes.batch is None or axes.steps in ((0, 0), None):
            return []
        argument, dim = axes.steps or (0, 0)
        return [f"the input {axes.names[argument]!r} has time in dimension {dim} and samples in dimension {axes.batch[1]}"]

    def risky_neurons(self) -> list[str]:
        """IF neurons with hard reset behind each other: on shared drives they lose less at a reset, and fire more often."""
        found = []
        for name, place in self.layout.drives.items():
            chain = self.plan.chains[name]
            node: Any = self.modules.get(chain.neuron) if isinstance(chain, Chain) else None
            if isinstance(node, host.neuron.IFNode) and node.v_reset is not None and place.settings.k > 1:
                found.append(name)
        if len(found) < DEEP:
            return []
        why = "which fire more often on shared drives than in the source, layer by layer more so"
        return [f"{AT_RISK}: {len(found)} layers drive IF neurons with hard reset, {why}; {HELP}"]

    def stretched(self, name: str, span: Span) -> Verdict:
        detail = f"runs {span.stretch} steps on every frame behind a collapse and emits their mean"
        if span.stretch == 1:
            detail = "runs one step on every frame behind a binary collapse"
        kernel, _ = self.kernel(name, name)
        return Verdict(name, "stretched", k=span.stretch, kernel=kernel, detail=detail)

    def kernel(self, name: str, neuron: str) -> tuple[str, str]:
        """What ran in the last call, or will run: a kernel and what keeps the chain from a faster one."""
        fused, unit = self.plan.fusion.units.get(neuron), self.role(neuron)
        if fused is None:
            why = self.plan.fusion.unfused.get(name, "")
            return "reference", f"not fused: {why}" if why else ""
        ran = unit.ran if isinstance(unit, Unit) else ""
        if isinstance(unit, Unit) and unit.gave == "plain":
            why = ran if ran not in backends.AVAILABLE else "frames were ordinary at every module's border"
            return "reference", f"not fused in the last call: {why}"
        slower = fused.slower
        if slower and ran in backends.COMPILED:
            slower = f"in training it runs on reference: {slower}"
        with_it = " with its convolution" if isinstance(unit, Unit) and unit.convolved else ""
        return f"{ran or fused.kernel}, fused{with_it}", slower

    def caveats(self, chain: Chain, repeated: bool) -> list[str]:
        """Where a shared drive is less than it could be, or more."""
        found = []
        if repeated:
            found.append("exact: one convolution for all T frames, which are alike")
        elif chain.max_pool:
            found.append(f"approximate: {chain.max_pool!r} takes the largest of shared drives")
        if chain.readout and not repeated:
            found.append("its drive is also read as a mean over time, which weighs the frames of a group as the neuron does")
        if chain.conv in self.layout.early:
            found.append(self.layout.early[chain.conv])
        if self.plan.settings[chain.conv].weights == MIXED:
            found.append(f"mixed weights: {self.layout.drives[chain.conv].settings.weights}")
        if chain.conv in self.plan.wide:
            found.append(f"in the net's dtype: {self.plan.wide[chain.conv]}")
        with torch.no_grad():
            nodes = [self.modules[n] for n in chain.neurons if n in self.modules]
            decays = {round(float(host.decay(n, torch.float64)), 12) for n in nodes}
        if len(decays) > 1:
            found.append(f"its drive reaches {len(chain.neurons)} neurons of different decay; weighted for {chain.neuron!r}")
        return found

    def verdict(self, name: str) -> Verdict:
        chain, place = self.plan.chains[name], self.layout.drives.get(name)
        drive = self.role(place.site) if place is not None else None
        site: Any = self.modules.get(place.site) if place is not None else None
        seen = (site.macs() if isinstance(site, DriveModule) else None) or self.plan.macs.get(name)
        before = seen[0] * seen[1] if seen else None
        if place is not None and isinstance(chain, Chain):
            kernel, slower = self.kernel(name, chain.neuron)
            why = "; ".join([*self.caveats(chain, place.repeated), *([slower] if slower else [])])
            kept = self.plan.settings[name].mode == "keep"
            made = drive if isinstance(drive, Drive) else None
            unit = self.role(chain.neuron)
            return Verdict(
                name, "kept" if kept else "converted", place.settings.mode, place.settings.k, kernel,
                Reason.POLICY_KEEP.value if kept else None, why, "", before,
                _groups(place, seen[0]) * seen[1] if seen else None, exact=place.repeated,
                dtype=place.settings.dtype, reads=self.reads(place.site, place.span), last_read=made.ran if made else "",
                last_gave=unit.gave if isinstance(unit, Unit) else "",
                frames_made={**(made.made if made else {}), **(unit.made if isinstance(unit, Unit) else {})},
            )  # fmt: skip
        if name in self.layout.stretched:
            span = self.layout.stretched[name]
            after = len(span.lengths(seen[0])) * seen[1] if seen else None
            detail = f"kept by the policy, at the rate of a collapse before it: a frame stands for {span.factor} frames"
            return Verdict(name, "stretched", k=span.stretch, detail=detail, macs_before=before, macs_after=after)
        refusal = self.layout.refused.get(name) or (chain if isinstance(chain, Refusal) else Refusal(Reason.POLICY_KEEP))
        return Verdict.refuse(name, refusal, macs_before=before, macs_after=before)

    def reads(self, site: str, span: Span) -> str:
        """What is planned to come to a conv."""
        if not self.plan.fused:
            return "plain"
        if site in self.plan.fusion.readers.values():
            return "sums"
        return "frames" if span.factor == 1 else "shared"


def _groups(place: DrivePlace, steps: int) -> int:
    """Convolutions that ``steps`` frames of the input cost."""
    if place.repeated:
        return 1
    frames = len(place.span.lengths(steps))
    return -(-frames // max(1, place.settings.k // place.span.stretch))
