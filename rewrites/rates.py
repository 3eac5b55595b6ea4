"""Where collapsed time begins, what runs at its rate, and where frames must come back.

Every value gets its span: what one of its frames stands for. A collapse makes a region of frames that stand for several; it
grows through whatever treats frames alike, neurons in it take all their steps on every frame, and it ends where a value is
needed at the input's rate: at the output, before a module that T is built into, where it meets frames of another rate.
The pass works on names only, so that ``set_k`` can run it again on a converted net without tracing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rewrites.chains import Chain
from rewrites.graph import CARRIES_SPANS, CARRIES_SUMS, Flow, Kind, Node, site_layer
from sj_tac import host
from sj_tac.policy import Settings
from sj_tac.runtime.places import FiringPlace, NormPlace, Place
from sj_tac.runtime.spans import PLAIN, Span, Timeline
from sj_tac.runtime.swapped import source_class
from sj_tac.runtime.swaps import Swap, drive_place
from sj_tac.verdicts import Reason, Refusal


@dataclass
class Layout:
    """What ``swap`` is to do: every swap, the modules behind which frames come back, and the verdicts that follow."""

    timeline: Timeline
    swaps: list[Swap] = field(default_factory=list)
    exits: list[tuple[nn.Module, Place]] = field(default_factory=list)
    drives: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    stretched: dict[str, Span] = field(default_factory=dict)
    # Of every neuron that was placed, what it runs as one operator with; of a conv whose neuron does not, why.
    fusions: dict[str, Any] = field(default_factory=dict)
    unfused: dict[str, str] = field(default_factory=dict)


def lay_out(model: nn.Module, flow: Flow, chains: Mapping[str, Chain | Refusal], settings: Mapping[str, Settings]) -> Layout:
    """Places for all chains under ``settings``; what cannot be, in ``refused``. Changes nothing.

    One value after another gets its span. Where one turns out to be needed at the input's rate, that is noted and the walk
    begins again; each round notes something new, so it ends.
    """
    plain: dict[int, str] = {}
    refused = {
        name: Refusal(Reason.POOL_BEFORE_NEURON, f"{chain.max_pool!r} stands between it and the neuron")
        for name, chain in chains.items()
        if isinstance(chain, Chain) and chain.max_pool and not settings[name].approximate and settings[name].mode != "keep"
    }
    while True:
        walk = _Walk(model, flow, chains, settings, plain, refused)
        if walk.settled():
            return walk.layout


class _Walk:
    def __init__(
        self,
        model: nn.Module,
        flow: Flow,
        chains: Mapping[str, Chain | Refusal],
        settings: Mapping[str, Settings],
        plain: dict[int, str],
        refused: dict[str, Refusal],
    ) -> None:
        self.flow, self.settings, self.plain = flow, settings, plain
        self.modules = dict(model.named_modules())
        known = [c for c in chains.values() if isinstance(c, Chain) and c.conv not in refused]
        self.chains = {c.site: c for c in known if settings[c.conv].mode != "keep"}
        self.kept = {c.site: c.conv for c in known if settings[c.conv].mode == "keep"}
        self.layout = Layout(Timeline(), refused=refused)
        self.spans: dict[int, Span] = {}
        # Collapses that a value stands behind and that no neuron has taken up yet.
        self.pending: dict[int, frozenset[str]] = {}
        # MaxPools where the mean over the steps of the neuron before is taken.
        self.means: dict[int, int] = {}
        self.again = False

    def settled(self) -> bool:
        """Give every value its span; False where something was noted that changes others."""
        for node in self.flow.nodes:
            inputs = [i for i in node.inputs if i in self.spans]
            self.pending[node.index] = frozenset().union(*(self.pending[i] for i in inputs))
            spans = {self.spans[i] for i in inputs}
            if len(spans) > 1:
                self.end(inputs, f"{node.label} joins frames at different rates")
            else:
                self.visit(node, next(iter(spans), PLAIN))
            if self.again:
                return False
            self.come_back(node)
            if self.again:
                return False
        return True

    def end(self, indices: Any, why: str) -> None:
        """These values are needed at the input's rate."""
        for i in indices:
            if not self.spans[i].is_plain and i not in self.plain:
                self.plain[i], self.again = why, True

    def come_back(self, node: Node) -> None:
        """Where a value is needed at the input's rate, frames come back behind it, or behind what it is made of."""
        span = self.spans[node.index]
        if span.is_plain or node.index not in self.plain:
            return
        why = self.plain[node.index]
        opened = self.pending[node.index]
        if opened:
            for conv in opened:
                detail = f"its drive does not reach its neuron at one rate: {why}"
                self.layout.refused[conv] = Refusal(Reason.COLLAPSE_BRANCHED, detail)
            self.again = True
        elif node.module is not None and node.once:
            self.layout.exits.append((self.modules[node.module], Place(self.layout.timeline, span)))
            self.spans[node.index] = PLAIN
        else:
            self.end(node.inputs, why)

    def visit(self, node: Node, span: Span) -> None:
        """The span of one value, from that of what it is made of."""
        self.spans[node.index] = span
        if node.kind is Kind.OUTPUT:
            if not self.emits_groups(node):
                self.end(node.inputs, "the model's output has the input's rate")
        elif node.kind is Kind.SITE and node.module in self.chains:
            self.take(self.chains[node.module], node, span)
        elif node.kind is Kind.NEURON and (node.once or span.is_plain):
            self.fire(node, span)
        elif span.is_plain:
            return
        elif node.kind is Kind.NORM:
            self.norm(node, span)
        elif node.kind not in CARRIES_SPANS or self.is_refused(node):
            self.end(node.inputs, f"{node.label} needs frames at the input's rate")
        elif node.module in self.kept:
            self.layout.stretched[self.kept[node.module]] = span
        elif node.index in self.means:
            self.layout.swaps.append(Swap(self.modules[str(node.module)], Place(self.layout.timeline, span)))

    def is_refused(self, node: Node) -> bool:
        """True for a conv that was found to be no chain: a collapsed region ends before it."""
        if node.kind is not Kind.SITE or node.module in self.kept:
            return False
        module = self.modules[str(node.module)]
        return not isinstance(site_layer(module) or module, nn.Linear) and node.module not in self.chains

    def emits_groups(self, node: Node) -> bool:
        opened = [d for d in self.layout.drives.values() if d.mode == "collapse"]
        return len(node.inputs) == 1 and bool(opened) and self.settings[opened[-1].name].emit == "groups"

    def take(self, chain: Chain, node: Node, span: Span) -> None:
        """Convert a chain at this place of the time axis, or refuse it."""
        setting = self.settings[chain.conv]
        refusal = None
        if setting.k > span.stretch and setting.k % span.stretch:
            detail = (
                f"k={setting.k} is no multiple of {span.stretch}, the steps that a frame stands for behind the collapse "
                "before it"
            )
            refusal = Refusal(Reason.K_NOT_WHOLE, detail)
        binary = setting.mode == "collapse" and setting.spikes == "binary" and max(setting.k, span.stretch) > 1
        if binary and not chain.direct:
            detail = (
                "a binary collapse makes one step of several, which only a neuron with no other reader or input can take"
            )
            refusal = Refusal(Reason.COLLAPSE_BRANCHED, detail)
        if refusal is not None:
            self.layout.refused[chain.conv], self.again = refusal, True
            return
        drive = drive_place(chain.conv, setting, span, self.modules[chain.neuron], self.layout.timeline)
        self.layout.drives[chain.conv] = drive
        self.layout.swaps.append(Swap(self.modules[chain.site], drive))
        self.spans[node.index] = drive.out
        if drive.out != span:
            self.pending[node.index] |= {chain.conv}
        for norm in self.norms(chain):
            place = NormPlace(self.layout.timeline, drive.out, name=chain.conv, aggregated=drive.k > 1)
            self.layout.swaps.append(Swap(norm, place))

    def norms(self, chain: Chain) -> list[nn.Module]:
        """The norms behind the conv of a chain, and those inside its container."""
        readers = self.flow.readers(self.flow.of(chain.site))
        behind = [n for n in chain.between if source_class(self.modules[n]) in host.NORMS]
        names = {chain.norm, *behind, *(r.module for r in readers if r.kind is Kind.NORM and r.once)} - {None}
        norms = [self.modules[str(name)] for name in names]
        if source_class(self.modules[chain.site]) in host.CONTAINERS:
            norms += [m for m in self.modules[chain.site].children() if source_class(m) in host.PLAIN_NORMS]
        return norms

    def norm(self, node: Node, span: Span) -> None:
        """A norm in a region, of no chain or of a chain that is taken."""
        module = self.modules[str(node.module)]
        if any(swap.module is module for swap in self.layout.swaps):
            return
        if not node.once:
            self.end(node.inputs, f"{node.label} is called more than once")
            return
        self.layout.swaps.append(Swap(module, NormPlace(self.layout.timeline, span, name=str(node.module), aggregated=True)))

    def fire(self, node: Node, span: Span) -> None:
        """A neuron: of converted chains, stretched, or neither."""
        opened = self.pending[node.index]
        driving = [c for c in self.chains.values() if node.module in c.neurons and c.conv in self.layout.drives]
        if span.is_plain and not driving:
            return
        module = self.modules[str(node.module)]
        merged = [c for c in driving if c.conv in opened and self.settings[c.conv].spikes == "binary"]
        at = None
        if span.stretch > 1:
            at, problem = self.mean_pool(node)
            if problem:
                for conv in opened:
                    self.layout.refused[conv], self.again = Refusal(Reason.COLLAPSE_POOL, problem), True
                self.end(node.inputs, problem)
                return
        if at is not None:
            self.means[at] = node.index
        # A direct chain's drive alone can merge steps, so that there is one to ask.
        merge = span.merged // self.layout.drives[merged[0].conv].span.merged if merged else 1
        normalize = self.settings[merged[0].conv].normalize if merged else True
        place = FiringPlace(self.layout.timeline, span, emit_mean=at is None, merge=merge, normalize=normalize)
        self.layout.swaps.append(Swap(module, place))
        self.pending[node.index] = frozenset()
        if not driving:
            self.layout.stretched[str(node.module)] = span

    def mean_pool(self, neuron: Node) -> tuple[int | None, str]:
        """The last MaxPool behind a neuron, before anything that weighs spikes: there the mean is taken.

        Returns:
            Its index or None, and why the mean cannot be taken there.
        """
        last, node = None, neuron
        while True:
            readers = self.flow.readers(node)
            if len(readers) != 1 or readers[0].kind is Kind.SUM:
                break
            node = readers[0]
            pool = self.modules.get(str(node.module))
            if pool is not None and source_class(pool) in host.MAX_POOLS:
                problem = self.pool_problem(node, pool)
                if problem:
                    return None, problem
                last = node.index
            elif node.kind not in (Kind.LINEAR, Kind.ALIKE) or node.module is None:
                break
        behind = self.max_pool_behind(self.flow.nodes[last] if last is not None else neuron)
        if behind is not None:
            return None, f"its MaxPool {behind.module!r} pools more than this neuron's spikes"
        return last, ""

    def max_pool_behind(self, start: Node) -> Node | None:
        """A MaxPool that spikes reach through branches and sums: it would pool means."""
        ahead, seen = [start], {start.index}
        while ahead:
            for reader in self.flow.readers(ahead.pop()):
                pool = self.modules.get(str(reader.module))
                if isinstance(pool, host.ANY_MAX_POOLS):
                    return reader
                if reader.kind in CARRIES_SUMS and reader.index not in seen:
                    seen.add(reader.index)
                    ahead.append(reader)
        return None

    def pool_problem(self, node: Node, pool: nn.Module) -> str:
        if not node.once:
            return f"its MaxPool {node.module!r} is called more than once in one forward"
        if getattr(pool, "return_indices", False):
            return f"its MaxPool {node.module!r} returns indices"
        return "" if host.is_multi_step(pool) else f"its MaxPool {node.module!r} is in step_mode 's'"
