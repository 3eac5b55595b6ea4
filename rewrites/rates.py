"""Where collapsed time begins, what runs at its rate, and where it ends.

Every value gets its span: what the trace says that one of its frames stands for. A collapse makes a region of frames that
stand for several; it grows through whatever treats frames alike, neurons in it take all their steps on every frame, and it
ends where a value is read that needs ordinary frames: at the output, at a module that T is built into, where it meets frames
of another rate. In a call, values know all this themselves; spans are for plain borders (runtime/borders.py), for ``k``
and for the report. The pass works on names only, so that ``set_k`` can run it again on a converted net without tracing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from sj_tac import host
from sj_tac.policy import Settings
from sj_tac.rewrites import weights
from sj_tac.rewrites.chains import Chain
from sj_tac.rewrites.graph import Graph, Node, pool_problem
from sj_tac.rewrites.kinds import CARRIES_SPANS, CARRIES_SUMS, SHAPES, Kind
from sj_tac.rewrites.operations import site_layer
from sj_tac.runtime.borders import PLAIN, Span
from sj_tac.runtime.swaps import is_affine, source_class
from sj_tac.verdicts import Reason, Refusal

# What may stand between a neuron and the pool where the mean of its steps is taken.
_BEFORE_MEANS = (*host.MAX_POOLS, host.layer.AvgPool2d, host.layer.Dropout, host.layer.Dropout2d, nn.Identity)


@dataclass(frozen=True)
class DrivePlace:
    """A conv that is converted: the module that is swapped, its neuron, the span of the frames in front of it."""

    site: str
    neuron: str
    span: Span
    settings: Settings
    folded: bool = False
    repeated: bool = False
    batch_first: bool = False

    @property
    def frames(self) -> int:
        """Frames in a whole group."""
        return max(1, self.settings.k // self.span.stretch)

    @property
    def out(self) -> Span:
        """The span of what it drives."""
        if self.settings.mode == "preserve":
            return self.span
        return self.span.collapsed(max(self.settings.k, self.span.stretch), self.settings.spikes)


@dataclass(frozen=True)
class UnitPlace:
    """A neuron of a converted net, as ``runtime.neurons.Unit`` names these."""

    span: Span
    merge: int = 1
    normalize: bool = True
    pools_later: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Layout:
    """What stands where on the time axis, all by qualified name.

    Attributes:
        drives: by conv; units: by neuron; norms: the conv each belongs to, or itself; aggregated: norms that learn from
            aggregated frames, with the span in front of the conv and its k; pools: where the mean over a neuron's steps is
            taken; before: modules between such a neuron and its pool, and Dropouts in a region; ends: modules that need
            ordinary frames. refused: of a conv, why; affine: registered modules that drives may pass.
        stretched: what runs at the rate of a collapse without being converted.
        heads: of the units, the neurons of Linear layers that nobody converts: their steps run as one operator, too.
        early: of a conv, what ends its collapse before it reaches a neuron.
        emits: what a frame of the output stands for, where that keeps T / k frames.
    """

    drives: dict[str, DrivePlace] = field(default_factory=dict)
    units: dict[str, UnitPlace] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    aggregated: dict[str, tuple[Span, int]] = field(default_factory=dict)
    pools: dict[str, Span] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    refused: dict[str, Refusal] = field(default_factory=dict)
    stretched: dict[str, Span] = field(default_factory=dict)
    early: dict[str, str] = field(default_factory=dict)
    emits: Span | None = None
    affine: tuple[str, ...] = ()
    heads: frozenset[str] = frozenset()

    @property
    def emits_groups(self) -> bool:
        """True where the output keeps T / k frames."""
        return self.emits is not None

    @property
    def folds(self) -> bool:
        """True where a converted layer takes folded frames."""
        return any(place.folded for place in self.drives.values())


def lay_out(
    model: nn.Module,
    graph: Graph,
    chains: Mapping[str, Chain | Refusal],
    settings: Mapping[str, Settings],
    entry: Span = PLAIN,
    no_time: Refusal | None = None,
) -> Layout:
    """Places for all chains under ``settings``; what cannot be, in ``refused``. Changes nothing.

    ``entry`` is what a frame of the input stands for; ``no_time``: why no call can tell T of folded frames.

    One value after another gets its span. Where a chain turns out to be impossible the walk begins again without it.
    """
    effective = {name: _effective(chains[name], s) for name, s in settings.items()}
    repeated = {name for name, (_, repeats) in effective.items() if repeats}
    settings = {name: s for name, (s, _) in effective.items()}
    refused: dict[str, Refusal] = {}
    for name, chain in chains.items():
        if not isinstance(chain, Chain) or settings[name].mode == "keep":
            continue
        if chain.max_pool and not settings[name].approximate and name not in repeated:
            refused[name] = Refusal(Reason.POOL_BEFORE_NEURON, f"{chain.max_pool!r} stands between it and the neuron")
        elif chain.folded and no_time is not None:
            refused[name] = no_time
        elif (chain.folded or chain.batch_first) and settings[name].mode == "collapse":
            refused[name] = Refusal(Reason.COLLAPSE_FOLDED)
    while True:
        shared = {name for name, s in settings.items() if name not in refused and (s.k > 1 or name in repeated)}
        walk = _Walk(model, graph, chains, weights.resolved(graph, chains, settings, shared), refused)
        walk.repeated = repeated
        found = walk.run(entry)
        if found is not None:
            return found
        refused = refused | walk.impossible


def _effective(chain: Chain | Refusal, settings: Settings) -> tuple[Settings, bool]:
    """What the settings of a layer come to, and whether it runs once where its frames are one frame T times over."""
    exact = isinstance(chain, Chain) and chain.repeated and settings.exact and settings.normalize
    if not isinstance(chain, Chain) or not exact or settings.mode == "collapse" or settings.weights == "learned":
        return settings, False
    # Frames that turn out to differ after all are single ones, in compiled calls, too, which cannot look.
    return settings.model_copy(update={"mode": "preserve", "k": 1}), True


class _Walk:
    repeated: set[str]

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        chains: Mapping[str, Chain | Refusal],
        settings: Mapping[str, Settings],
        refused: Mapping[str, Refusal],
    ) -> None:
        self.graph, self.settings, self.refused = graph, settings, dict(refused)
        self.modules = dict(model.named_modules())
        known = [c for c in chains.values() if isinstance(c, Chain) and c.conv not in refused]
        self.chains = {c.site: c for c in known if settings[c.conv].mode != "keep"}
        self.kept = {c.site: c.conv for c in known if settings[c.conv].mode == "keep"}
        # What a policy speaks of is left as it says.
        self.spoken_of = set(chains)
        self.heads: set[str] = set()
        self.drives: dict[str, DrivePlace] = {}
        self.units: dict[str, UnitPlace] = {}
        self.norms: dict[str, str] = {}
        self.aggregated: dict[str, tuple[Span, int]] = {}
        self.ends: list[str] = []
        self.stretched: dict[str, Span] = {}
        self.early: dict[str, str] = {}
        self.impossible: dict[str, Refusal] = {}
        self.spans: dict[int, Span] = {}
        # Collapses that a value stands behind and that no neuron has taken up yet.
        self.pending: dict[int, frozenset[str]] = {}
        # MaxPools where the mean over the steps of the neuron before is taken.
        self.means: dict[str, Span] = {}
        self.before: list[str] = []

    def run(self, entry: Span) -> Layout | None:
        """Give every value its span; None where a chain turned out to be impossible."""
        for node in self.graph.nodes:
            inputs = [i for i in node.inputs if i in self.spans]
            pending: frozenset[str] = frozenset().union(*(self.pending[i] for i in inputs))
            spans = {self.spans[i] for i in inputs}
            self.pending[node.index] = pending
            if len(spans) > 1:
                self.end(node, pending, f"{node.label} joins frames at different rates")
            else:
                self.visit(node, next(iter(spans), entry))
            if self.impossible:
                return None
        return Layout(
            self.drives, self.units, self.norms, self.aggregated, self.means, tuple(self.before),
            tuple(self.ends), self.refused, self.stretched, self.early, self.emits(), self.registered_affine(),
            frozenset(self.heads),
        )  # fmt: skip

    def end(self, node: Node, pending: frozenset[str], why: str) -> None:
        """Ordinary frames from here on, because of what ``node`` does."""
        self.spans[node.index], self.pending[node.index] = PLAIN, frozenset()
        for conv in pending:
            if self.drives[conv].settings.spikes == "binary":
                # One step for several cannot be taken by a neuron that has frames.
                detail = f"its drive does not reach its neuron at one rate: {why}"
                self.impossible[conv] = Refusal(Reason.COLLAPSE_BRANCHED, detail)
            self.early[conv] = f"frames come back before its neuron: {why}"
        if node.module is not None and node.module not in self.ends and node.kind is not Kind.OUTPUT:
            self.ends.append(node.module)

    def visit(self, node: Node, span: Span) -> None:
        """The span of one value, from that of what it is made of."""
        self.spans[node.index] = span
        pending = self.pending[node.index]
        if node.kind in (Kind.INPUT, Kind.OUTPUT):
            return
        if node.kind is Kind.SITE and node.module in self.chains:
            self.take(self.chains[node.module], node, span)
        elif node.kind is Kind.NEURON and (node.once or span == PLAIN):
            self.fire(node, span)
        elif span == PLAIN:
            return
        elif node.kind not in CARRIES_SPANS or self.is_refused(node):
            self.end(node, pending, f"{node.label} needs ordinary frames")
        elif node.kind is Kind.NORM and str(node.module) not in self.norms:
            if node.once:
                self.learn({str(node.module)}, span)
            else:
                self.end(node, pending, f"{node.label} is called more than once")
        elif node.module in self.kept or node.kind is Kind.AFFINE:
            self.stretched |= {conv: span for site, conv in self.kept.items() if site == node.module}
            self.learn(self.inner_norms(str(node.module)) if node.module is not None else set(), span)
        elif node.module is not None and source_class(self.modules[node.module]) in host.DROPOUTS:
            self.before.append(node.module)

    def learn(self, norms: set[str], span: Span) -> None:
        """Norms of no converted layer, which see the frames of a collapse before them."""
        for norm in sorted(norms - self.norms.keys()):
            self.norms[norm], self.aggregated[norm] = norm, (span, 1)

    def is_refused(self, node: Node) -> bool:
        """True for a conv that was found to be no chain: a collapsed region ends before it."""
        if node.kind is not Kind.SITE or node.module in self.kept:
            return False
        module = self.modules[str(node.module)]
        return not isinstance(site_layer(module) or module, nn.Linear) and node.module not in self.chains

    def registered_affine(self) -> tuple[str, ...]:
        named = {str(node.module) for node in self.graph.nodes if node.kind is Kind.AFFINE and node.module is not None}
        return tuple(sorted(n for n in named if host.is_registered_affine(self.modules[n]) or is_affine(self.modules[n])))

    def emits(self) -> Span | None:
        outputs = [n for n in self.graph.nodes if n.kind is Kind.OUTPUT]
        opened = [d for d in self.drives.values() if d.settings.mode == "collapse"]
        if not opened or not all(len(n.inputs) == 1 for n in outputs) or opened[-1].settings.emit != "groups":
            return None
        # A call puts out all frames of a value that is folded.
        folded = any(before.folded for node in outputs for before in self.graph.inputs(node))
        return self.spans[outputs[0].index] if outputs and not folded else PLAIN

    def take(self, chain: Chain, node: Node, span: Span) -> None:
        """Convert a chain at this place of the time axis, or refuse it."""
        setting = self.settings[chain.conv]
        if setting.k > span.stretch and setting.k % span.stretch:
            detail = (
                f"k={setting.k} is no multiple of {span.stretch}, the steps that a frame stands for behind the collapse "
                "before it"
            )
            self.impossible[chain.conv] = Refusal(Reason.K_NOT_WHOLE, detail)
            return
        binary = setting.mode == "collapse" and setting.spikes == "binary" and max(setting.k, span.stretch) > 1
        if binary and not chain.direct:
            detail = (
                "a binary collapse makes one step of several, which only a neuron takes with no other reader or input, "
                "behind nothing but norms and pools"
            )
            self.impossible[chain.conv] = Refusal(Reason.COLLAPSE_BRANCHED, detail)
            return
        drive = DrivePlace(
            chain.site, chain.neuron, span, setting, chain.folded, chain.conv in self.repeated, chain.batch_first
        )
        self.drives[chain.conv] = drive
        self.spans[node.index] = drive.out
        if drive.out != span:
            self.pending[node.index] |= {chain.conv}
        for norm in self.norms_of(chain):
            self.norms[norm] = chain.conv
            if setting.k > 1 or span != PLAIN:
                self.aggregated[norm] = (span, setting.k)

    def norms_of(self, chain: Chain) -> list[str]:
        """The norms behind the conv of a chain, and those inside its container and inside registered modules."""
        names: set[str] = set()
        ahead = [self.graph.of(chain.site)]
        while ahead:
            for reader in self.graph.readers(ahead.pop()):
                if reader.kind is Kind.NORM and reader.once:
                    names.add(str(reader.module))
                if reader.kind in (Kind.NORM, Kind.LINEAR, Kind.AFFINE, *SHAPES, Kind.WRITTEN, Kind.SPREAD):
                    ahead.append(reader)
                if reader.kind is Kind.AFFINE and reader.module in self.registered_affine():
                    names |= self.inner_norms(str(reader.module))
        if source_class(self.modules[chain.site]) in host.CONTAINERS:
            names |= self.inner_norms(chain.site)
        return sorted(names)

    def inner_norms(self, name: str) -> set[str]:
        inside = self.modules[name].named_modules()
        return {f"{name}.{n}" for n, m in inside if n and source_class(m) in host.PLAIN_NORMS}

    def fire(self, node: Node, span: Span) -> None:
        """A neuron: of converted chains, stretched, or neither."""
        name = str(node.module)
        opened = self.pending[node.index]
        driving = [c for c in self.chains.values() if name in c.neurons and c.conv in self.drives]
        self.pending[node.index] = frozenset()
        if span == PLAIN and not driving:
            if self.is_head(node):
                self.heads.add(name)
                self.units[name] = UnitPlace(span)
            return
        if host.is_registered_neuron(self.modules[name]):
            self.end(node, frozenset(), "")
            for conv in opened:
                self.impossible[conv] = Refusal(Reason.COLLAPSE_REGISTERED, f"its neuron is {node.label}")
            return
        merged = [c for c in driving if c.conv in opened and self.settings[c.conv].spikes == "binary"]
        path: list[str] = []
        if span.stretch > 1:
            path, problem = self.mean_pool(node)
            if problem:
                self.impossible |= {conv: Refusal(Reason.COLLAPSE_POOL, problem) for conv in opened}
                self.end(node, frozenset(), problem)
                return
        if path:
            self.means[path[-1]] = span
            self.before += path[:-1]
        # A direct chain's drive alone can merge steps, so that there is one to ask.
        merge = span.merged // self.drives[merged[0].conv].span.merged if merged else 1
        normalize = self.settings[merged[0].conv].normalize if merged else True
        self.units[name] = UnitPlace(span, merge, normalize, bool(path), any(c.folded for c in driving))
        if not driving:
            self.stretched[name] = span

    def is_head(self, node: Node) -> bool:
        """True for a neuron of a Linear layer, as heads have them, that is none of the policy's layers."""
        before, name = self.graph.inputs(node), str(node.module)
        if len(before) != 1 or not node.once or node.folded or host.is_registered_neuron(self.modules[name]):
            return False
        site = str(before[0].module)
        linear = before[0].kind is Kind.SITE and host.kind(self.modules[site]) in host.LINEARS
        return linear and site not in self.spoken_of

    def mean_pool(self, neuron: Node) -> tuple[list[str], str]:
        """The last MaxPool behind a neuron, before anything that weighs spikes: there the mean is taken.

        Returns:
            The modules up to it, none where there is none; and why the mean cannot be taken there.
        """
        path: list[str] = []
        upto, node, found = 0, neuron, neuron
        while True:
            readers = self.graph.readers(node)
            module = self.modules.get(str(readers[0].module)) if len(readers) == 1 else None
            if module is None or source_class(module) not in _BEFORE_MEANS:
                break
            node = readers[0]
            path.append(str(node.module))
            if source_class(module) in host.MAX_POOLS:
                problem = pool_problem(node, module)
                if problem:
                    return [], problem
                upto, found = len(path), node
        behind = self.max_pool_behind(found)
        if behind is not None:
            return [], f"its MaxPool {behind.module or behind.label!r} does not stand right behind it, and would pool means"
        return path[:upto], ""

    def max_pool_behind(self, start: Node) -> Node | None:
        """A MaxPool that spikes reach through branches and sums: it would pool means."""
        ahead, seen = [start], {start.index}
        while ahead:
            for reader in self.graph.readers(ahead.pop()):
                pool = self.modules.get(str(reader.module))
                if reader.kind is Kind.MAX_POOL or isinstance(pool, host.ANY_MAX_POOLS):
                    return reader
                if reader.kind in (*CARRIES_SUMS, Kind.ADDED, Kind.AFFINE) and reader.index not in seen:
                    seen.add(reader.index)
                    ahead.append(reader)
        return None
