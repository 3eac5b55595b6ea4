"""Which converted chains run as one operator, and to which chain each may hand groups instead of frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx, nn

from rewrites.chains import Chain, data_users, module_calls
from rewrites.timeaxis import Layout
from sj_tac import host
from sj_tac.errors import BackendError
from sj_tac.fusion import Fusion
from sj_tac.kernels import fire as kernels
from sj_tac.kernels import registry
from sj_tac.operators import Swap
from sj_tac.report import Refusal
from sj_tac.swapped import FiringPlace, Place


@dataclass(frozen=True)
class Link:
    """What follows a chain's neuron: a pool to absorb, modules that an aggregate may pass, and the chain that reads it."""

    pool: str | None
    via: tuple[str, ...]
    next: str | None
    why: str


def find_links(model: nn.Module, graph: fx.Graph, chains: Mapping[str, Chain | Refusal]) -> dict[str, Link]:
    """The link of every chain, by the name of its conv. Looks only; the pass itself is ``fuse``."""
    calls = module_calls(model, graph)
    names = {module: name for name, module in model.named_modules()}
    nodes = {model.get_submodule(str(n.target)): n for n in graph.nodes if n.op == "call_module"}
    return {
        name: _link(model, nodes[model.get_submodule(chain.neuron)], calls, names, chains)
        for name, chain in chains.items()
        if isinstance(chain, Chain)
    }


def _link(
    model: nn.Module,
    node: fx.Node,
    calls: Mapping[nn.Module, int],
    names: Mapping[nn.Module, str],
    chains: Mapping[str, Chain | Refusal],
) -> Link:
    pool: str | None = None
    via: list[str] = []
    while True:
        users = data_users(node)
        if len(users) != 1 or users[0].op != "call_module":
            return Link(pool, tuple(via), None, "its spikes have several readers, or go to a function")
        node = users[0]
        module = model.get_submodule(str(node.target))
        name = names[module]
        if isinstance(chains.get(name), Chain):
            return Link(pool, tuple(via), name, "")
        if calls[module] > 1 or not host.is_multi_step(module):
            return Link(pool, tuple(via), None, f"its spikes go to {name!r}")
        if type(module) in host.FUSED_POOLS and pool is None and not via and host.pool_window(module) is not None:
            pool = name
        elif type(module) in host.LINEAR_IN_TIME:
            via.append(name)
        else:
            return Link(pool, tuple(via), None, f"its spikes go to {name!r}")


def fuse(
    model: nn.Module, layout: Layout, chains: Mapping[str, Chain | Refusal], links: Mapping[str, Link], backend: str
) -> None:
    """Give every chain of the layout its Fusion, and the pools it absorbs their place. Changes the layout, not the model.

    Raises:
        BackendError: ``backend`` is a name, and that kernel cannot run one of the chains.
    """
    places = {swap.module: swap.place for swap in layout.swaps}
    fusions: dict[str, Fusion] = {}
    for name, drive in layout.drives.items():
        chain, link = chains[name], links[name]
        if not isinstance(chain, Chain):
            continue
        conv, node = model.get_submodule(name), model.get_submodule(chain.neuron)
        norm = model.get_submodule(chain.norm) if chain.norm else None
        pool = model.get_submodule(link.pool) if link.pool else None
        place = places[node]
        if isinstance(place, FiringPlace) and not place.emit_mean and (pool is None or pool not in places):
            # The mean is taken at a MaxPool further on: this chain stays as it is.
            layout.unfused[name] = "its MaxPool does not follow the neuron directly"
            if backend in registry.COMPILED:
                raise BackendError(
                    f"backend={backend!r}: layer {name!r} cannot run as one operator: {layout.unfused[name]}; use "
                    'backend="auto", which runs it unfused, or mode: preserve for this layer'
                )
            continue
        kernel, problem = kernels.plan(backend, node, pool, next(conv.parameters()))
        layout.kernels[name], layout.unfused[name] = kernel, problem
        fusions[name] = Fusion(drive.timeline, conv, norm, node, pool, backend=backend)
        if pool is not None and pool not in places:
            places[pool] = Place(drive.timeline, drive.out)
            layout.swaps.append(Swap(pool, places[pool]))
        for module in fusions[name].modules():
            places[module].fusion = fusions[name]
    layout.timeline.fusions = list(fusions.values())
    exits = {module for module, _ in layout.exits}
    for name, fusion in fusions.items():
        link = links[name]
        passed = [fusion.node, fusion.pool, *(model.get_submodule(v) for v in link.via)]
        if link.next in fusions and not exits.intersection(m for m in passed if m is not None):
            fusion.via = tuple(model.get_submodule(v) for v in link.via)
            fusion.next = fusions[link.next]
