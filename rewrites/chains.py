"""Which convs drive neurons, and why the others do not.

A *drive* is what a conv hands to the neurons behind it. Several frames may share it where everything between is affine and
treats all frames alike: a norm, an average pool, a sum with other frames (a residual), another conv. Then the neuron
gathers from the shared drive what it would have gathered from the frames' own (docs/equations.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.utils import parametrize

from sj_tac import host
from sj_tac.rewrites.graph import Graph, Node
from sj_tac.rewrites.kinds import CARRIES_DRIVES, SHAPES, SUMS, Kind
from sj_tac.rewrites.layouts import Layout
from sj_tac.rewrites.operations import site_layer
from sj_tac.runtime.swaps import clash
from sj_tac.verdicts import Reason, Refusal


@dataclass(frozen=True)
class Chain:
    """Qualified names of the modules of one chain.

    Attributes:
        conv: the conv or Linear; site: the module that is swapped, the conv itself or the container that begins with it.
        norm: the norm behind it, where the site does not hold it.
        between: modules between the norm and the neuron of a direct chain (average pools).
        neurons: every neuron that the drive reaches, in the order of the forward; the first one's decay gives the weights.
        direct: nothing but the neuron reads the drive, and nothing is added to it.
        max_pool: a MaxPool between conv and neuron, where the shared drive is only an approximation.
        folded: its conv is torch's own, on frames [T * N, ...]. repeated: its frames are one frame T times over.
        readout: its drive is also read by a mean or sum over time, where a group's weights are not all alike.
        batch_first: its frames are [N, T, ...], or [N * T, ...] where they are folded.
    """

    conv: str
    site: str
    norm: str | None
    between: tuple[str, ...]
    neurons: tuple[str, ...]
    direct: bool
    max_pool: str | None = None
    folded: bool = False
    repeated: bool = False
    readout: bool = False
    batch_first: bool = False

    @property
    def neuron(self) -> str:
        return self.neurons[0]


def find_chains(
    model: nn.Module,
    graph: Graph,
    closed: Mapping[str, str],
    linears: bool = False,
    broken: Mapping[str, Refusal] | None = None,
    example: bool = False,
    own: Mapping[str, Refusal] | None = None,
) -> dict[str, Chain | Refusal]:
    """A chain or the reason for none, for every conv among ``model.named_modules()``, in their order.

    Args:
        closed: modules that tracing could not look into, and why; linears: look at Linear layers too.
        broken: registered modules that cannot be relied on, and why. example: there was a sample.
        own: convs and Linears with a forward of their own that may not stand for the known ones, and why.
    """
    finder = _Finder(model, graph, closed)
    finder.broken, finder.example, finder.own = broken or {}, example, own or {}
    wanted = [n for n, m in model.named_modules() if host.is_conv(m) or (linears and isinstance(m, nn.Linear))]
    return {name: finder.look(name) for name in wanted}


# What makes spikes of a membrane where a neuron is written out.
_COMPARISONS = ("gt", "ge", "lt", "le", "greater", "heaviside", "sign")

# What is in the way behind a sum is told as the sum's; other reasons are the same with and without it.
_OF_SUMS = (Reason.NO_NEURON, Reason.NOT_LINEAR, Reason.FAN_OUT)
# What is said to be between a conv and its neuron, if it has one.
_BETWEEN = (Reason.NOT_LINEAR, Reason.FAN_OUT, Reason.ADD_BEFORE_NEURON, Reason.POOL_BEFORE_NEURON)


@dataclass(frozen=True)
class _Reach:
    """What a value leads to: neurons by index, a MaxPool or a mean over time on the way, or what is in the way."""

    neurons: tuple[int, ...] = ()
    max_pool: str | None = None
    readout: bool = False
    problem: Refusal | None = None


class _Finder:
    broken: Mapping[str, Refusal]
    example: bool
    own: Mapping[str, Refusal]

    def __init__(self, model: nn.Module, graph: Graph, closed: Mapping[str, str]) -> None:
        self.graph, self.closed = graph, closed
        self.modules = dict(model.named_modules())
        self.calls = graph.calls()
        self.known: dict[int, _Reach] = {}

    def look(self, name: str) -> Chain | Refusal:
        conv = self.modules[name]
        site = self.site(name)
        if isinstance(site, Refusal):
            # A forward of its own was looked into.
            return self.own.get(name, site) if site.reason is Reason.NEVER_CALLED else site
        refusal = self.reject(name, conv, site)
        if refusal is None:
            found = self.follow(name, self.graph.of(site))
            if isinstance(found, Chain):
                return found
            told = self.without_neuron(found, self.graph.of(site)) if found.reason in _BETWEEN else None
            return told or self.hinted(found, self.graph.of(site))
        within = any(host.is_neuron(m) for m in conv.modules())
        if refusal.reason in (Reason.UNSUPPORTED_CONV, Reason.FOLD_UNSEEN) and not within:
            return self.without_neuron(refusal, self.graph.of(site), True) or refusal
        return refusal

    def without_neuron(self, refusal: Refusal, site: Node, own: bool = False) -> Refusal | None:
        """In place of ``refusal``, where nothing behind the conv is a neuron; ``own``: nor one that the user wrote out."""
        behind = self.behind(site)
        inside = [m for n in behind if n.module for m in self.modules[n.module].modules()]
        compares = next((n.label for n in behind if n.label.partition("(")[0] in _COMPARISONS), None)
        if any(n.kind is Kind.NEURON for n in behind) or any(host.is_neuron(m) for m in inside) or (compares and not own):
            return None
        detail = "nothing behind it is a neuron of a known class"
        detail += f"; {compares} compares, as one's own neuron would" if compares else ""
        return Refusal(Reason.NO_NEURON, detail, (refusal.detail,))

    def hinted(self, refusal: Refusal, site: Node) -> Refusal:
        """With what looks like a neuron of the user's own, where one stands in front of all that are known."""
        if refusal.reason is not Reason.NOT_LINEAR:
            return refusal
        for node in self.behind(site):
            if node.kind is Kind.NEURON:
                break
            if node.label.partition("(")[0] in _COMPARISONS:
                return replace(refusal, more=(f"{node.label} compares, as one's own neuron would", *refusal.more))
        return refusal

    def behind(self, start: Node) -> list[Node]:
        """All that can be reached from a value, through whatever there is, in the order of the forward."""
        ahead, seen = [start], {start.index}
        while ahead:
            fresh = [reader for reader in self.graph.readers(ahead.pop()) if reader.index not in seen]
            seen.update(reader.index for reader in fresh)
            ahead += fresh
        return [self.graph.nodes[i] for i in sorted(seen - {start.index})]

    def site(self, name: str) -> str | Refusal:
        """The module that the graph calls for this conv."""
        if self.calls[name]:
            return name
        parts = name.split(".")
        for i in range(len(parts) - 1, 0, -1):
            around = ".".join(parts[:i])
            if not self.calls[around]:
                continue
            if site_layer(self.modules[around]) is self.modules[name]:
                return around
            label = f"it sits inside {around!r} ({type(self.modules[around]).__name__})"
            if around in self.closed:
                label += f", where tracing stopped ({self.closed[around]})"
                label += "" if self.example else "; pass example_input="
            return Refusal(Reason.INSIDE_LEAF, label)
        return Refusal(Reason.NEVER_CALLED)

    def reject(self, name: str, conv: nn.Module, site: str) -> Refusal | None:
        """What is wrong with the conv itself."""
        loop = self.loop()
        if self.calls[site] > 1:
            detail = f"one forward calls it {self.calls[site]} times"
            return Refusal(Reason.TIME_LOOP, f"{detail}, {loop}") if loop else Refusal(Reason.CALLED_TWICE, detail)
        if parametrize.is_parametrized(conv) and host.kind(conv) is type(conv):
            return self.own.get(name) or Refusal(Reason.PARAMETRIZED)
        if clash(conv):
            return Refusal(
                Reason.UNSUPPORTED_CONV, f"its attribute {clash(conv)!r} has a name that a converted layer needs itself"
            )
        if self.is_once_already(self.graph.of(site)):
            return Refusal(Reason.ONCE_ALREADY)
        # What a container holds was looked at where it was found to be a site.
        problem = self.reject_class(name, conv, self.graph.of(site)) if self.modules[site] is conv else None
        if problem is not None:
            return problem
        if not host.is_multi_step(self.modules[site]):
            folds = ", on folded frames, where torch's own layer converts" if self.graph.of(site).folded else ""
            return Refusal(Reason.NOT_MULTI_STEP, f"it is in step_mode 's'{folds}")
        if self.graph.of(site).kind is not Kind.SITE:
            return Refusal(Reason.NOT_LINEAR, "it is called with other than one tensor of frames")
        return None

    def loop(self) -> str:
        """How often a neuron in step_mode 's' is called, where that is more than once."""
        for name, calls in self.calls.items():
            if calls > 1 and host.is_neuron(self.modules[name]) and not host.is_multi_step(self.modules[name]):
                return f"and {name!r}, in step_mode 's', {calls} times"
        return ""

    def is_once_already(self, node: Node) -> bool:
        """True for what is computed on single images, which are repeated T times further on."""
        sample, ahead, seen, shape = self.graph.sample, [node], {node.index}, node.shape or ()
        if sample is None or sample.steps == 1 or node.repeated:
            return False
        if (sample.batch,) != shape[:1] and (1, sample.batch) != shape[:2]:  # images, or frames of one step
            return False
        while ahead:
            for reader in self.graph.readers(ahead.pop()):
                if reader.repeated:
                    return True
                if (
                    reader.layout in (Layout.OTHER, Layout.BATCH)
                    and reader.index not in seen
                    and reader.kind is not Kind.NEURON
                ):
                    seen.add(reader.index)
                    ahead.append(reader)
        return False

    def reject_class(self, name: str, conv: nn.Module, node: Node) -> Refusal | None:
        """What is wrong with the conv's class, on the frames that it is handed."""
        kind, named = host.kind(conv), f"it is a {type(conv).__module__}.{type(conv).__qualname__}"
        if kind in (*host.CONVS, *host.LINEARS) or (node.folded and node.kind is Kind.SITE):
            return None
        if kind is host.Unknown:
            return Refusal(Reason.UNSUPPORTED_CONV, f"{named}, one of whose methods was replaced on the instance")
        if kind not in (*host.FOLDED_CONVS, *host.FOLDED_LINEARS):
            return self.own.get(name) or Refusal(Reason.UNSUPPORTED_CONV, named)
        if node.folded:
            return Refusal(Reason.NOT_LINEAR, "it is called with other than one tensor of frames")
        sample = self.graph.sample
        if sample is None:
            return self.reject_unseen(named)
        if node.ambiguous:
            return Refusal(Reason.FOLD_AMBIGUOUS, f"{named}; the sample has T={sample.steps} and N={sample.batch}")
        given = [i.shape for i in self.graph.nodes if i.kind is Kind.INPUT and i.shape is not None and len(i.shape) > 2]
        folded = [shape for shape in given if shape[0] * shape[1] == sample.steps == (node.shape or (0,))[0]]
        if folded:
            detail = f"{named}; of an input {list(folded[0])} neurons are handed {sample.steps} frames, and take all for T"
            return Refusal(Reason.NEURON_FOLDED, detail)
        shape = next((n.shape for n in self.graph.inputs(node)), None)
        takes = f"no folded frames [T * N, ...]; SpikingJelly's layer.{kind.__name__} takes frames [T, N, ...]"
        handed = f"{named}, on {list(shape) if shape else 'a value of unknown shape'}"
        return Refusal(Reason.UNSUPPORTED_CONV, f"{handed} and {takes}")

    def reject_unseen(self, named: str) -> Refusal:
        """Why one of torch's own convs is refused where nothing says what T and N are."""
        single = next((n for n, m in self.modules.items() if host.is_neuron(m) and not host.is_multi_step(m)), None)
        if single is not None and self.loop():
            return Refusal(Reason.TIME_LOOP, f"one forward calls it once, {self.loop()}")
        if single is not None:
            detail = f"its neurons step one frame at a time: {single!r} is in step_mode 's'"
            return Refusal(Reason.NOT_MULTI_STEP, detail, (f"{named}, which then takes all frames folded, [T * N, ...]",))
        if self.example:
            unknown = "the sample shows no neuron of a known or registered class, which would say what T is"
            return Refusal(Reason.UNSUPPORTED_CONV, f"{named}; {unknown}")
        return Refusal(Reason.FOLD_UNSEEN, f"{named}; no sample was run")

    def follow(self, name: str, site: Node) -> Chain | Refusal:
        """Along the readers of the conv to its neurons."""
        first = self.refuse_norm(site)
        if first is not None:
            return first
        reach = self.reach(site)
        if reach.problem is not None:
            return reach.problem
        if not reach.neurons:
            return Refusal(Reason.NO_NEURON, f"nothing behind {site.label} is a neuron")
        norm: str | None = None
        between: list[str] = []
        direct, node = True, site
        while True:
            readers = self.graph.readers(node)
            if len(readers) != 1 or readers[0].kind in (*SUMS, Kind.SITE, *SHAPES) or readers[0].module is None:
                direct = False
                break
            node = readers[0]
            if node.kind is Kind.NEURON:
                break
            if node.kind is Kind.NORM and norm is None and not between:
                norm = node.module
            elif host.kind(self.modules[node.module or ""]) is not nn.Identity:
                between.append(node.module or "")
        neurons = tuple(str(self.graph.nodes[i].module) for i in reach.neurons)
        max_pool = reach.max_pool or self.inner_max_pool(site)
        repeated = all(n.repeated for n in self.graph.inputs(site))
        return Chain(
            name, str(site.module), norm, tuple(between), neurons, direct and not site.folded, max_pool, site.folded,
            repeated, reach.readout, any(n.layout.batch_first for n in self.graph.inputs(site)),
        )  # fmt: skip

    def inner_max_pool(self, site: Node) -> str | None:
        """The MaxPool of a container."""
        inside = (
            self.modules[str(site.module)].named_children()
            if host.kind(self.modules[str(site.module)]) in host.CONTAINERS
            else ()
        )
        return next((f"{site.module}.{n}" for n, m in inside if isinstance(m, host.ANY_MAX_POOLS)), None)

    def refuse_norm(self, site: Node) -> Refusal | None:
        """What is wrong with the norm that follows, if one does."""
        readers = [r for r in self.graph.readers(site) if r.module and host.is_norm(self.modules[r.module])]
        for reader in readers:
            module = self.modules[str(reader.module)]
            if not host.is_multi_step(module):
                return Refusal(Reason.NOT_MULTI_STEP, f"{reader.label} is in step_mode 's'")
            if host.is_registered_affine(module):
                continue
            known = host.PLAIN_NORMS if site.folded else host.NORMS
            if parametrize.is_parametrized(module) or host.kind(module) not in known:
                return Refusal(Reason.UNSUPPORTED_NORM, f"its norm is {reader.label}")
            if host.uses_batch_statistics(module):
                return Refusal(Reason.BATCH_STATS, f"its norm {reader.label} has track_running_stats=False")
            if not reader.once:
                return self.twice(reader)
        return None

    def twice(self, node: Node) -> Refusal:
        return Refusal(Reason.CALLED_TWICE, f"one forward calls {node.label} {self.calls[str(node.module)]} times")

    def reach(self, node: Node) -> _Reach:
        """Where the drive goes from ``node`` on, if it may; by the readers' own results, each found once."""
        if node.index in self.known:
            return self.known[node.index]
        # Deep nets: from the back to the front, so that nothing recurses further than one value.
        for behind in reversed(self.graph.nodes[node.index :]):
            if behind.index not in self.known:
                self.known[behind.index] = self.combine(behind)
        return self.known[node.index]

    def combine(self, node: Node) -> _Reach:
        readers = self.graph.readers(node)
        found = [self.through(node, reader) for reader in readers]
        problems = [r.problem for r in found if r.problem is not None]
        if problems:
            first = problems[0]
            others = dict.fromkeys(d for p in problems for d in (p.detail, *p.more) if d != first.detail)
            if len(problems) < len(found):
                named = ", ".join(reader.label for reader in readers)
                first = Refusal(Reason.FAN_OUT, f"{node.label} is read by {named}; {first.detail}")
            return _Reach(problem=replace(first, more=tuple(others)))
        neurons = tuple(sorted({i for r in found for i in r.neurons}))
        pool = next((r.max_pool for r in found if r.max_pool), None)
        return _Reach(neurons, pool, any(r.readout for r in found))

    def through(self, node: Node, reader: Node) -> _Reach:
        """What one reader makes of the drive."""
        if reader.module in self.broken:
            return _Reach(problem=self.broken[str(reader.module)])
        if reader.kind is Kind.NEURON:
            # A registered one stays what it is, however often a forward calls it.
            may = reader.once or host.is_registered_neuron(self.modules[str(reader.module)])
            return _Reach((reader.index,)) if may else _Reach(problem=self.twice(reader))
        if reader.kind in CARRIES_DRIVES:
            reach = self.known[reader.index]
            if reader.kind in SUMS and reach.problem is not None and reach.problem.reason in _OF_SUMS:
                detail = f"{reader.label} adds it to other frames, and of the sum: {reach.problem.detail}"
                return _Reach(problem=Refusal(Reason.ADD_BEFORE_NEURON, detail, reach.problem.more))
            if reader.module and host.kind(self.modules[reader.module]) in host.CONTAINERS and self.inner_max_pool(reader):
                return replace(reach, max_pool=self.inner_max_pool(reader))
            return reach
        if reader.kind is Kind.READOUT:
            return _Reach(readout=True)
        if reader.kind is Kind.MAX_POOL:
            return replace(self.known[reader.index], max_pool=reader.module or reader.label)
        return _Reach(problem=self.obstacle(reader))

    def obstacle(self, reader: Node) -> Refusal:
        module = self.modules[reader.module] if reader.module is not None else None
        if reader.kind is Kind.OUTPUT:
            return Refusal(Reason.NO_NEURON, "it reaches the model's output without a neuron")
        if module is not None and (how := host.single_steps(module)):
            return Refusal(Reason.NOT_MULTI_STEP, f"{reader.label} {how}")
        if module is not None and (host.kind(module) in host.NEURONS or host.is_registered_neuron(module)):
            given = self.graph.inputs(reader)
            wrong = Layout.TIME if host.is_batch_first(module) else Layout.BATCH
            if any(n.layout.folded or n.layout is wrong for n in given):
                return Refusal(Reason.NEURON_FOLDED, f"its neuron is {reader.label}, on {list(given[0].shape or ())}")
        if module is not None and host.is_neuron(module):
            known = host.kind(module) in host.NEURONS or host.is_registered_neuron(module)
            many = host.many_numbers(module) if known else ""
            what = f"whose {many}" if many else "of a type with dynamics of its own"
            return Refusal(Reason.UNSUPPORTED_NEURON, f"its neuron is {reader.label}, {what}")
        if isinstance(module, host.ANY_MAX_POOLS):
            return Refusal(Reason.POOL_BEFORE_NEURON, f"{reader.label} stands between it and the neuron")
        between, given = f"{reader.label} stands between it and the neuron", self.graph.inputs(reader)
        if module is None and any(n.layout.folded and n.layout.batch_first is not reader.layout.batch_first for n in given):
            between += ", and unfolds in another order than time and samples were folded in"
        return Refusal(Reason.NOT_LINEAR, between)
