"""What was found out about a model under a policy, and how a report says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rewrites import verify as verification
from rewrites.chains import Chain, find_chains
from rewrites.fuse import fuse as fuse_chains
from rewrites.graph import Flow, read
from rewrites.rates import Layout, lay_out
from rewrites.trace import as_arguments, trace
from sj_tac import host
from sj_tac.errors import ConversionError, PolicyError
from sj_tac.kernels import backends
from sj_tac.policy import Rule, Settings, as_policy
from sj_tac.runtime.spans import Timeline
from sj_tac.verdicts import Reason, Refusal, Report, Verdict


@dataclass
class Analysis:
    """What was found out about a model, under a policy; nothing has been changed yet."""

    chains: dict[str, Chain | Refusal]
    settings: dict[str, Settings]
    flow: Flow
    sampled: bool
    seen: verification.Run | None
    backend: str
    fused: bool
    layout: Layout

    @property
    def macs(self) -> dict[str, tuple[int, int]]:
        return {} if self.seen is None else self.seen.macs

    def lay_out(self, model: nn.Module, settings: dict[str, Settings]) -> Layout:
        """The layout of ``model`` under other settings. Changes nothing."""
        layout = lay_out(model, self.flow, self.chains, settings)
        if self.fused:
            fuse_chains(model, layout, self.flow, self.chains, self.backend)
        return layout

    def report(self, model: nn.Module, title: str) -> Report:
        verdicts = []
        stretched = dict(self.layout.stretched)
        for name, _ in model.named_modules():
            if name in self.chains:
                stretched.pop(name, None)
                verdicts.append(self.verdict(name, model))
            elif name in stretched:
                span = stretched.pop(name)
                detail = f"runs {span.stretch} steps on every frame behind a collapse and emits their mean"
                if span.stretch == 1:
                    detail = "runs one step on every frame behind a binary collapse"
                kernel, _ = self.kernel(name, name)
                verdicts.append(Verdict(name, "stretched", k=span.stretch, kernel=kernel, detail=detail))
        return Report(tuple(verdicts), title)

    def kernel(self, name: str, neuron: str) -> tuple[str, str]:
        """What ran in the last call, or will run: a kernel and what keeps the chain from a faster one."""
        fusion = self.layout.fusions.get(neuron)
        if fusion is None:
            why = self.layout.unfused.get(name, "")
            return "reference", f"not fused: {why}" if why else ""
        if fusion.ran and fusion.ran not in backends.AVAILABLE:
            return "reference", f"not fused in the last call: {fusion.ran}"
        slower = fusion.slower
        if slower and fusion.ran in backends.COMPILED:
            slower = f"in training it runs on reference: {slower}"
        return f"{fusion.ran or fusion.planned}, fused", slower

    def caveats(self, chain: Chain, model: nn.Module) -> list[str]:
        """Where a shared drive is less than it could be."""
        found = []
        if chain.max_pool:
            found.append(f"approximate: {chain.max_pool!r} takes the largest of shared drives")
        with torch.no_grad():
            decays = {round(float(host.decay(model.get_submodule(n), torch.float64)), 12) for n in chain.neurons}
        if len(decays) > 1:
            found.append(f"its drive reaches {len(chain.neurons)} neurons of different decay; weighted for {chain.neuron!r}")
        return found

    def verdict(self, name: str, model: nn.Module) -> Verdict:
        chain, drive = self.chains[name], self.layout.drives.get(name)
        seen = drive.seen if drive is not None and drive.seen else self.macs.get(name)
        before = seen[0] * seen[1] if seen else None
        if drive is not None and isinstance(chain, Chain):
            after = len(drive.groups(seen[0])) * seen[1] if seen else None
            kernel, slower = self.kernel(name, chain.neuron)
            why = "; ".join([*self.caveats(chain, model), *([slower] if slower else [])])
            return Verdict(name, "converted", drive.mode, drive.k, kernel, None, why, "", before, after)
        if name in self.layout.stretched:
            span = self.layout.stretched[name]
            after = len(span.lengths(seen[0])) * seen[1] if seen else None
            detail = f"kept by the policy, at the rate of a collapse before it: a frame stands for {span.factor} frames"
            return Verdict(name, "stretched", k=span.stretch, detail=detail, macs_before=before, macs_after=after)
        refusal = self.layout.refused.get(name) or (chain if isinstance(chain, Refusal) else Refusal(Reason.POLICY_KEEP))
        return Verdict.refuse(name, refusal, macs_before=before, macs_after=before)


def analyse(model: nn.Module, policy: Any, k: int, example_input: Any, backend: str, fuse: bool) -> Analysis:
    """Trace, find chains, apply the policy, lay out time. Changes nothing in ``model``."""
    checked = as_policy(policy, k)
    traced = trace(model, example_input)
    flow = read(model, traced.graph)
    chains = find_chains(model, flow, traced.closed, "linear" in checked.layers)
    resolved = checked.resolve(list(chains))
    if "conv" not in checked.layers:
        convs = [name for name in resolved if host.is_conv(model.get_submodule(name))]
        resolved |= {name: (Settings(mode="keep"), None) for name in convs}
    settings = {name: found for name, (found, _) in resolved.items()}
    sites = {chain.conv: chain.site for chain in chains.values() if isinstance(chain, Chain)}
    exact = all(s.k == 1 for s in settings.values() if s.mode != "keep")
    seen = None if example_input is None else _run_source(model, as_arguments(example_input), sites, exact)
    analysis = Analysis(chains, settings, flow, traced.sampled, seen, backend, fuse, Layout(Timeline()))
    analysis.layout = analysis.lay_out(model, settings)
    _check_exact_rules(resolved, chains, analysis.layout, checked._source)
    return analysis


def _run_source(model: nn.Module, arguments: tuple[Any, ...], sites: Mapping[str, str], exact: bool) -> verification.Run:
    found = verification.run(model, arguments, sites, exact=exact)
    if found.failure:
        raise ConversionError(f"the model {found.failure}; pass a batch [T, N, C, H, W] that it takes") from found.error
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
