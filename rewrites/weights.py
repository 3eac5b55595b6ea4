"""Which weights the frames of a group get where the policy says ``mixed``."""

from __future__ import annotations

from collections.abc import Mapping, Set

from sj_tac.policy import Settings
from sj_tac.rewrites.chains import Chain
from sj_tac.rewrites.graph import Graph, Node
from sj_tac.rewrites.kinds import CARRIES_DRIVES, Kind
from sj_tac.verdicts import Refusal

MIXED, DECAY, UNIFORM = "mixed", "decay", "uniform"


def resolved(
    graph: Graph, chains: Mapping[str, Chain | Refusal], settings: Mapping[str, Settings], shared: Set[str]
) -> Mapping[str, Settings]:
    """Settings without ``mixed``: uniform for a layer that reads the spikes of neurons with shared drives, else decay.

    Within a group such a neuron's spikes come when its voltage has risen, which says nothing of when anything happened: they
    want to be counted. Frames from outside are the newer, the more they say of the group's end.

    ``shared``: convs whose drives are for several steps, if they are converted.
    """
    if all(s.weights != MIXED for s in settings.values()):
        return settings
    found = [c for name, c in chains.items() if isinstance(c, Chain) and name in shared and settings[name].mode != "keep"]
    neurons = {neuron for chain in found for neuron in chain.neurons}
    made = dict(settings)
    for name, s in settings.items():
        chain = chains[name]
        if s.weights == MIXED:
            counts = isinstance(chain, Chain) and _reads_neurons(graph, chain.site, neurons)
            made[name] = s.model_copy(update={"weights": UNIFORM if counts else DECAY})
    return made


# What lies between spikes and their reader leaves them in their frames.
_FRAME_BY_FRAME = CARRIES_DRIVES | {Kind.MAX_POOL}


def _reads_neurons(graph: Graph, site: str, neurons: set[str]) -> bool:
    """True where all that a layer reads is made, frame by frame, of the spikes of these neurons."""
    waiting = [index for node in graph.nodes if node.module == site for index in node.inputs]
    seen: set[int] = set()
    found = False
    while waiting:
        index = waiting.pop()
        if index in seen:
            continue
        seen.add(index)
        node: Node = graph.nodes[index]
        if node.module in neurons:
            found = True
        elif node.kind in _FRAME_BY_FRAME:
            waiting += node.inputs
        else:
            return False
    return found
