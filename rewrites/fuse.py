"""Which neurons run as one operator with what is around them, and between which of them and which convs sums travel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rewrites.chains import Chain
from rewrites.graph import CARRIES_SUMS, Flow, Kind, Node
from rewrites.rates import Layout
from sj_tac import host
from sj_tac.errors import BackendError
from sj_tac.kernels import backends
from sj_tac.kernels import fire as kernels
from sj_tac.runtime.fusion import Fusion, Junction
from sj_tac.runtime.places import FiringPlace, Place
from sj_tac.runtime.swapped import source_class
from sj_tac.runtime.swaps import Swap
from sj_tac.verdicts import Refusal


def fuse(model: nn.Module, layout: Layout, flow: Flow, chains: Mapping[str, Chain | Refusal], backend: str) -> None:
    """Give every placed neuron of the layout its Fusion, and the pools it absorbs their place. Does not change the model.

    Raises:
        BackendError: ``backend`` is a name, and that kernel cannot run one of the chains.
    """
    _Fuse(model, layout, flow, chains, backend).run()


class _Fuse:
    def __init__(
        self, model: nn.Module, layout: Layout, flow: Flow, chains: Mapping[str, Chain | Refusal], backend: str
    ) -> None:
        self.layout, self.flow, self.backend = layout, flow, backend
        self.modules = dict(model.named_modules())
        self.places = {swap.module: swap.place for swap in layout.swaps}
        self.exits = {module for module, _ in layout.exits}
        self.chains = {c.site: c for c in chains.values() if isinstance(c, Chain) and c.conv in layout.drives}
        # By the index of the value that a fusion makes: the neuron's, or its pool's.
        self.writers: dict[int, Fusion] = {}
        self.parameter = next(model.parameters())

    def run(self) -> None:
        for node in self.flow.nodes:
            place = self.places.get(self.modules[node.module]) if node.module is not None else None
            if isinstance(place, FiringPlace):
                self.neuron(node, place)
        for chain in self.chains.values():
            drive = self.layout.drives[chain.conv]
            drive.backend, drive.shares = self.backend, drive.span.is_plain
            self.check_named(chain.conv, chain.neuron)
        self.junctions()

    def neuron(self, node: Node, place: FiringPlace) -> None:
        name = str(node.module)
        module = self.modules[name]
        chain = next((c for c in self.chains.values() if c.neuron == name and self.is_direct(c)), None)
        behind = self.pool(node)
        pool = self.modules[str(behind.module)] if behind is not None else None
        if not place.emit_mean and (pool is None or pool not in self.places):
            # The mean is taken at a MaxPool further on: this neuron stays as it is.
            return
        # Any parameter of the conv: its weight is none where it is pruned or weight-normed.
        weight = next(self.modules[chain.conv].parameters()) if chain is not None else self.parameter
        try:
            planned, slower = kernels.plan(self.backend, module, pool, weight)
        except BackendError:
            if name in self.layout.stretched:
                return  # no converted layer: the named kernel is not asked of it
            raise
        fusion = Fusion(place.timeline, module, pool, backend=self.backend, planned=planned, slower=slower)
        if chain is not None:
            fusion.site, fusion.norm = self.modules[chain.site], self.modules[chain.norm] if chain.norm else None
            fusion.between = tuple(self.modules[n] for n in chain.between)
        fusion.alone = len(self.flow.inputs(node)) == 1 and len(self.flow.inputs(node)[0].readers) == 1
        if pool is not None and pool not in self.places:
            self.places[pool] = Place(place.timeline, place.span)
            self.layout.swaps.append(Swap(pool, self.places[pool]))
        for part in fusion.modules():
            if part in self.places:
                self.places[part].fusion = fusion
        self.writers[(behind or node).index] = fusion
        self.layout.fusions[name] = fusion

    def is_direct(self, chain: Chain) -> bool:
        """Whether the drives of a chain come to its neuron as they are: not where frames come back on the way."""
        before = [chain.site, *([chain.norm] if chain.norm else []), *chain.between]
        return chain.direct and not any(self.modules[name] in self.exits for name in before)

    def pool(self, node: Node) -> Node | None:
        """The pool that the neuron's spikes go to, and nothing else, where ``fire`` knows how to pool so."""
        readers = self.flow.readers(node)
        if (
            len(readers) != 1
            or readers[0].module is None
            or not readers[0].once
            or self.modules[str(node.module)] in self.exits
        ):
            return None
        pool = self.modules[readers[0].module]
        known = source_class(pool) in host.FUSED_POOLS and readers[0].kind in (Kind.MAX_POOL, Kind.LINEAR)
        return readers[0] if known and host.pool_window(pool) is not None else None

    def check_named(self, name: str, neuron: str) -> None:
        """A converted chain whose neuron stays as it is. Raises BackendError where a compiled kernel was named."""
        if neuron in self.layout.fusions:
            return
        self.layout.unfused[name] = "its MaxPool does not follow the neuron directly"
        if self.backend in backends.COMPILED:
            raise BackendError(
                f"backend={self.backend!r}: layer {name!r} cannot run as one operator: {self.layout.unfused[name]}; use "
                'backend="auto", which runs it unfused, or mode: preserve for this layer'
            )

    def junctions(self) -> None:
        seen: set[int] = set()
        for index in self.writers:
            if index not in seen:
                junction = self.junction(index, seen)
                if junction is not None:
                    self.layout.timeline.junctions.append(junction)

    def junction(self, start: int, seen: set[int]) -> Junction | None:
        """All values that must travel in one form with the one at ``start``, as a junction where that may be sums."""
        ahead, values, sites, fits = [start], {start}, [], True
        while ahead:
            node = self.flow.nodes[ahead.pop()]
            # Among what a sum is made of may be neurons; among the readers are the convs, or further sums.
            beside = [] if node.index in self.writers else self.flow.inputs(node)
            bad = [n for n in beside if n.index not in self.writers and n.kind not in CARRIES_SUMS]
            for reader in self.flow.readers(node):
                if reader.module in self.chains:
                    sites.append(self.chains[reader.module])
                elif reader.kind in CARRIES_SUMS and reader.index not in self.writers:
                    beside.append(reader)
                else:
                    bad.append(reader)
            fits = fits and not bad and self.may_carry(node)
            fresh = {n.index for n in beside if n not in bad} - values
            values |= fresh
            ahead += fresh
        seen |= values
        if not fits or not sites or not self.agree(sites):
            return None
        writers = [self.writers[i] for i in sorted(values & self.writers.keys())]
        between = [self.flow.nodes[i].module for i in sorted(values - self.writers.keys())]
        via = tuple(self.modules[name] for name in between if name is not None)
        junction = Junction(writers, [self.modules[c.site] for c in sites], via)
        for writer in writers:
            writer.junction = junction
        for chain in sites:
            self.layout.drives[chain.conv].junction = junction
        return junction

    def may_carry(self, node: Node) -> bool:
        """False where frames come back behind this value, or where its module has no single place."""
        if node.index in self.writers:
            return not self.exits.intersection(self.writers[node.index].modules())
        return node.once and (node.module is None or self.modules[node.module] not in self.exits)

    def agree(self, sites: list[Chain]) -> bool:
        """Whether the convs want the same groups with the same weights, and anything but single frames."""
        drives = [self.layout.drives[c.conv] for c in sites]
        first = drives[0]
        if first.frames == 1:
            return False
        if len(drives) == 1:
            return True
        same = all(
            (d.k, d.weights, d.normalize, d.span) == (first.k, first.weights, first.normalize, first.span) for d in drives
        )
        learns = first.weights == "learned" or any(isinstance(d.node, host.neuron.ParametricLIFNode) for d in drives)
        return same and not learns and len({host.decay(d.node, torch.float64) for d in drives}) == 1
