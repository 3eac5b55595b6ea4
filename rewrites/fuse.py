"""Decide which neurons run fused with what is around them, and which edges carry sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from sj_tac import host
from sj_tac.errors import BackendError
from sj_tac.kernels import backends, fire as kernels
from sj_tac.policy import SOURCE
from sj_tac.rewrites.chains import Chain
from sj_tac.rewrites.graph import Graph, Node
from sj_tac.rewrites.kinds import CARRIES_SUMS, Kind
from sj_tac.rewrites.rates import DrivePlace, Layout
from sj_tac.runtime.swaps import source_class
from sj_tac.verdicts import Refusal


@dataclass(frozen=True)
class FusedUnit:
    """A neuron that runs as one operator: the pool it takes along, the kernel, why that is not the fastest."""

    pool: str | None
    kernel: str
    slower: str


@dataclass(frozen=True)
class Fusion:
    """What runs fused, by name of the neuron; where its sums go.

    Attributes:
        readers: for a neuron, the site that its sums are made for; through: Dropouts on the way.
        direct: likewise the one site that reads what it, or its pool, puts out, where that computes in another dtype.
        unfused: of a conv whose neuron runs the host's own steps, why.
    """

    units: dict[str, FusedUnit] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    direct: dict[str, str] = field(default_factory=dict)
    through: tuple[str, ...] = ()
    unfused: dict[str, str] = field(default_factory=dict)


def fuse(model: nn.Module, graph: Graph, chains: Mapping[str, Chain | Refusal], layout: Layout, backend: str) -> Fusion:
    """What of a layout runs fused. Changes nothing.

    Raises:
        BackendError: ``backend`` is a name, and that kernel cannot run one of the chains.
    """
    return _Fuse(model, graph, chains, layout, backend).run()


class _Fuse:
    def __init__(
        self, model: nn.Module, graph: Graph, chains: Mapping[str, Chain | Refusal], layout: Layout, backend: str
    ) -> None:
        self.layout, self.graph, self.backend = layout, graph, backend
        self.modules = dict(model.named_modules())
        self.chains = {c.site: c for c in chains.values() if isinstance(c, Chain) and c.conv in layout.drives}
        self.units: dict[str, FusedUnit] = {}
        self.unfused: dict[str, str] = {}
        # The neuron, by the index of the value that it makes: its own, or its pool's.
        self.writers: dict[int, str] = {}
        self.parameter = next(model.parameters())

    def run(self) -> Fusion:
        for node in self.graph.nodes:
            if node.kind is Kind.NEURON and node.module in self.layout.units:
                self.neuron(node)
        for chain in self.chains.values():
            self.check_named(chain.conv, chain.neuron)
        readers, through = self.edges()
        return Fusion(self.units, readers, self.direct(), through, self.unfused)

    def neuron(self, node: Node) -> None:
        name = str(node.module)
        if name in self.layout.heads:
            self.head(name)
            return
        chain = next((c for c in self.chains.values() if c.neuron == name), None)
        behind = self.pool(node)
        if self.layout.units[name].pools_later and (behind is None or behind.module not in self.layout.pools):
            return  # the mean is taken at a MaxPool further on
        pool = str(behind.module) if behind is not None else None
        # Any parameter of the conv: its weight is none where it is pruned or weight-normed.
        weight = next(self.modules[chain.conv].parameters()) if chain is not None else self.parameter
        try:
            kernel, slower = kernels.plan(self.backend, self.modules[name], self.modules[pool] if pool else None, weight)
        except BackendError:
            if name in self.layout.stretched:
                return  # no converted layer: the named kernel is not asked of it
            raise
        self.units[name] = FusedUnit(pool, kernel, slower)
        self.writers[(behind or node).index] = name

    def head(self, name: str) -> None:
        """A neuron of a Linear layer, where a compiled kernel runs it; no converted layer, of which a backend is asked."""
        try:
            kernel, slower = kernels.plan(self.backend, self.modules[name], None, self.parameter)
        except BackendError:
            return
        if kernel in backends.COMPILED and not slower:
            self.units[name] = FusedUnit(None, kernel, slower)

    def pool(self, node: Node) -> Node | None:
        """The pool that the neuron's spikes go to, and nothing else, where ``fire`` knows how to pool so."""
        readers = self.graph.readers(node)
        while len(readers) == 1 and _folds_only(node, readers[0]):
            node = readers[0]
            readers = self.graph.readers(node)
        if len(readers) != 1 or readers[0].module is None or not readers[0].once:
            return None
        pool, pools = self.modules[readers[0].module], host.FOLDED_FUSED_POOLS if node.folded else host.FUSED_POOLS
        known = source_class(pool) in pools and readers[0].kind in (Kind.MAX_POOL, Kind.LINEAR)
        return readers[0] if known and host.pool_window(pool) is not None else None

    def check_named(self, name: str, neuron: str) -> None:
        """A converted chain whose neuron stays as it is. Raises BackendError where a compiled kernel was named."""
        if neuron in self.units:
            return
        registered = host.is_registered_neuron(self.modules[neuron])
        own = "its neuron is a registered one, whose own forward runs its steps"
        self.unfused[name] = own if registered else "its MaxPool does not follow the neuron directly"
        if self.backend in backends.COMPILED:
            raise BackendError(
                f"backend={self.backend!r}: layer {name!r} cannot run as one operator: {self.unfused[name]}; use "
                'backend="auto", which runs it unfused, or mode: preserve for this layer'
            )

    def edges(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """The site that each neuron makes sums for, and the Dropouts that these sums pass."""
        readers: dict[str, str] = {}
        through: list[str] = []
        seen: set[int] = set()
        for index in self.writers:
            if index in seen:
                continue
            values, sites, fits = self.connected(index)
            seen |= values
            if not fits or not sites or not self.agree(sites):
                continue
            readers |= {self.writers[i]: sites[0].site for i in sorted(values & self.writers.keys())}
            between = [str(self.graph.nodes[i].module) for i in sorted(values - self.writers.keys())]
            through += [n for n in between if n in self.modules and source_class(self.modules[n]) in host.DROPOUTS]
        return readers, tuple(through)

    def direct(self) -> dict[str, str]:
        """The site of another dtype that alone reads what a neuron, or its pool, puts out."""
        found = {}
        for index, name in self.writers.items():
            readers = self.graph.readers(self.graph.nodes[index])
            chain = self.chains.get(str(readers[0].module)) if len(readers) == 1 else None
            if chain is not None and self.layout.drives[chain.conv].settings.dtype != SOURCE:
                found[name] = chain.site
        return found

    def connected(self, start: int) -> tuple[set[int], list[Chain], bool]:
        """All values that must travel in one form with the one at ``start``, who reads them, and whether all can do sums."""
        ahead, values, sites, fits = [start], {start}, [], True
        while ahead:
            node = self.graph.nodes[ahead.pop()]
            # Among what a sum is made of may be neurons; among the readers are the convs, or further sums.
            beside = [] if node.index in self.writers else self.graph.inputs(node)
            bad = [n for n in beside if n.index not in self.writers and n.kind not in CARRIES_SUMS]
            for reader in self.graph.readers(node):
                if reader.module in self.chains:
                    sites.append(self.chains[reader.module])
                elif reader.kind in CARRIES_SUMS and reader.index not in self.writers:
                    beside.append(reader)
                else:
                    bad.append(reader)
            fits = fits and not bad and (node.index in self.writers or node.once)
            fresh = {n.index for n in beside if n not in bad} - values
            values |= fresh
            ahead += fresh
        return values, sites, fits

    def agree(self, sites: list[Chain]) -> bool:
        """Whether the convs want the same groups with the same weights, and anything but single frames."""
        places = [self.layout.drives[c.conv] for c in sites]
        if all(p.frames == 1 for p in places):
            return False
        if len(places) == 1:
            return True
        first = places[0]
        same = all((_wants(p), p.span) == (_wants(first), first.span) for p in places)
        nodes = [self.modules[p.neuron] for p in places]
        learns = first.settings.weights == "learned" or any(host.decay_source(n) is not None for n in nodes)
        return same and not learns and len({host.decay(n, torch.float64) for n in nodes}) == 1


# Functions that are linear and leave each value where it is: a scale would change what a pool behind it is handed.
_COPIES = ("contiguous", "clone", "detach", "pos")


def _folds_only(before: Node, after: Node) -> bool:
    """True where an operation folds time into the batch and changes nothing else, or copies."""
    if after.kind is Kind.LINEAR and after.module is None:
        return after.label.partition("(")[0] in _COPIES and before.shape == after.shape and before.shape is not None
    return after.kind is Kind.FOLD and after.folded


def _wants(place: DrivePlace) -> tuple[int, str, bool]:
    return place.settings.k, place.settings.weights, place.settings.normalize
