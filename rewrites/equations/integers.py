"""``conv(sums / S) = scale * (w8 * sums) + shift``: convolutions of whole numbers run in int8, without gradients.

Spikes are 0 or 1, so sums of them by whole weights are whole numbers, and a uint8 holds them. What is rounded is the weight
of the convolution alone (kernels/cpu/int8.py). Whole numbers stay whole through

    fire(.., sums), AvgPool inside of it           numbers up to S, and S times the pool's area
    reshapes, expand, cat                          the same numbers
    adaptive AvgPool to more places                each several times
    a + b                                          of the same S: as many spikes deep as both
    aggregate(a + b) = aggregate(a) + aggregate(b)
    fire(..) + b = fire(.., joined=b)              no other node reads the spikes

and what reads them as frames gets ``sums / S`` in float32.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from sj_tac import host
from sj_tac.kernels.cpu import aggregate as on_cpu, int8
from sj_tac.kernels.cpu.int8 import LEAST_MULTIPLICATIONS, MOST, whole_sums, whole_weights
from sj_tac.kernels.pools import AVG_POOL
from sj_tac.rewrites.equations import absorb
from sj_tac.rewrites.equations.fuse import fire
from sj_tac.rewrites.equations.nodes import (
    ADDS,
    AGGREGATE,
    EXPAND,
    RESHAPES,
    WANTED_IN_INT8,
    argument,
    dtype,
    each,
    emit,
    is_frozen,
    is_tensor,
    only_reader,
    replace,
    same,
    shape,
    through_reshapes,
)  # fmt: skip

# By how much a frame's share of a sum may be off before a layer stays in float32.
OFF = 0.02


class Whole(NamedTuple):
    """What a node's numbers are: whole ones, over S and the area of a pool.

    Attributes:
        depth: the most spikes that one of them adds up at a step. area: of the AvgPools behind them.
        sums: (weights, by, steps) of the aggregate that summed them over groups; None for frames.
    """

    depth: int
    area: int = 1
    sums: tuple[Any, ...] | None = None

    def fits(self, other: Whole | None) -> bool:
        """Return whether numbers may be added, or stand beside each other."""
        return other is not None and self.area == other.area and same(self.sums or (), other.sums or ())


def in_int8(graph: Graph) -> None:
    """Run in int8 the layers that were asked to, where what they read is known to be whole numbers.

    ``graph.sj_tac_int8`` (``marks.want_int8``): by layer, why it is not run so; empty where it is.
    """
    wanted = {node: node.meta[WANTED_IN_INT8] for node in graph.nodes if WANTED_IN_INT8 in node.meta and is_layer(node)}
    found: dict[str, str] = graph.sj_tac_int8  # type: ignore[attr-defined]
    layers: dict[Node, Whole] = {}
    for node, layer in wanted.items():
        whole = _whole(node.args[0])
        found[layer] = _problem(node, whole)
        if whole is not None and not found[layer]:
            layers[node] = whole
    top = _agreed(layers, found, wanted)
    if not layers:
        return
    for node in each(graph):  # what was contiguous may be in channels_last behind a convolution in int8
        if node.target == "view" and not is_frozen(node) and not any(isinstance(a, torch.dtype) for a in node.args):
            node.target = "reshape"
    weights = [argument(node, 1, "weight").meta["example_value"] for node in layers]
    _Rewriting(graph, top).run(layers)
    if all(weight.is_contiguous() for weight in weights):
        _leave_contiguous(graph)


def _leave_contiguous(graph: Graph) -> None:
    """Copy maps that leave a contiguous net into contiguous memory: a user may take views of them. Voltages stay."""
    output = next(node for node in graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        voltage = node.target is operator.getitem and node.args[1] == 1
        if is_tensor(node) and node.op != "placeholder" and len(shape(node)) > 3 and not voltage:
            output.replace_input_with(node, emit(output, "contiguous", (node,)))


def is_layer(node: Node) -> bool:
    """Return whether a node is a convolution or a Linear."""
    return node.target in (torch.conv1d, torch.conv2d, torch.conv3d, F.linear)


def _problem(node: Node, whole: Whole | None) -> str:
    """Return why a layer does not run in int8; empty if it does."""
    weight, inputs = argument(node, 1, "weight"), node.args[0]
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if node.meta["example_value"].device.type != "cpu":
        return "int8 runs on a CPU alone"
    if is_frozen(node, inputs) or not dtype(node) is dtype(weight) is torch.float32:
        return f"it computes in {dtype(node)}, or its memory is written into"
    if node.target not in (torch.conv2d, F.linear) or isinstance(argument(node, 4, "padding", 0), str):
        return "only Conv2d and Linear with a padding in numbers run in int8"
    if node.target is torch.conv2d and argument(node, 6, "groups", 1) != 1:
        return "a convolution in groups is no faster in int8"
    if weight.op not in ("placeholder", "get_attr"):
        return "its weight is computed in each call"  # and is no parameter whose changes could be told
    if whole is None:
        return "what it reads is not known to be spikes, or sums of them"
    count = math.prod(map(_about, shape(node))) * math.prod(shape(weight)[1:])
    if count < LEAST_MULTIPLICATIONS:
        return f"its {count:,} multiplications a call are too few for int8 to be faster"
    return ""


def _about(size: Any) -> int:
    """Return a size, or what it was when the net was captured."""
    return size if isinstance(size, int) else size.node.hint or 1


def _whole(node: Any) -> Whole | None:
    """Return what is known of a node's numbers; None if they need not be whole."""
    if not is_tensor(node) or is_frozen(node) or dtype(node) is not torch.float32:
        return None
    if node.target is operator.getitem and node.args[0].target is fire and node.args[1] == 0:
        return _of_fire(node.args[0])
    if node.target in RESHAPES or node.target is EXPAND or _times(node):
        return _whole(node.args[0])
    if node.target is torch.cat:
        first, *rest = map(_whole, node.args[0])
        if first is None or not all(first.fits(one) for one in rest):
            return None
        return first._replace(depth=max(one.depth for one in (first, *rest) if one is not None))
    if node.target in ADDS and not node.kwargs and all(is_tensor(a) and _alike(a, node) for a in node.args):
        a, b = map(_whole, node.args)
        return None if a is None or b is None or not a.fits(b) else a._replace(depth=a.depth + b.depth)
    if node.target is AGGREGATE and node.args[4] == "normalized":
        x, weights, by, steps, _ = node.args
        of = _whole(x)
        return None if of is None or of.sums is not None else of._replace(sums=(tuple(weights), by, steps))
    return None


def _times(node: Node) -> tuple[int, int] | None:
    """Return how often an adaptive AvgPool gives each row and each column; None for what is none, or takes means."""
    if node.target is not F.adaptive_avg_pool2d or not is_tensor(node.args[0]):
        return None
    before, after = shape(node.args[0])[-2:], shape(node)[-2:]
    if not all(type(size) is int for size in (*before, *after)) or any(b % a for a, b in zip(before, after, strict=True)):
        return None
    return after[0] // before[0], after[1] // before[1]


def _alike(a: Node, b: Node) -> bool:
    """Return whether two nodes' shapes are the same, whatever sizes vary."""
    return same(tuple(shape(a)), tuple(shape(b)))


def _of_fire(node: Node) -> Whole | None:
    o = node.kwargs
    if is_frozen(node) or node.meta["example_value"][0].device.type != "cpu":
        return None
    kind, *window = o["pool"] or (0,)
    area = window[0] * window[1] if kind == AVG_POOL else 1
    if o["sums"] is None:
        return Whole(1, area)
    _, weights, by, form = o["sums"]
    return Whole(1, area, (weights, by, o["steps"])) if form == "normalized" else None


def _agreed(layers: dict[Node, Whole], found: dict[str, str], wanted: dict[Node, str]) -> int:
    """Return the largest S for all layers, and leave out those whose sums would not fit into eight bits with it."""
    while layers:
        deepest = max(layers, key=lambda node: layers[node].depth * layers[node].area)
        top = MOST // (layers[deepest].depth * layers[deepest].area)
        off = [node for node, whole in layers.items() if top < 1 or _off(whole, top) > OFF]
        if not off:
            return top
        left = deepest if layers[deepest].depth * layers[deepest].area > 1 else off[0]
        whole = layers.pop(left)
        found[wanted[left]] = f"its sums, of up to {whole.depth * whole.area} spikes a step, would not fit into eight bits"
    return 1


def _off(whole: Whole, top: int) -> float:
    """Return by how much frames' shares are off at most, whatever a call brings that is not known yet."""
    if whole.sums is None:
        return 0.0
    weights, by, steps = whole.sums
    if by is not None:
        return 1 / top  # rounding to a sum of ``top``
    if type(steps) is int:
        return whole_sums(weights, None, steps, top)[2]
    return max(whole_weights((weights, weights[-tail:]), top)[2] for tail in range(1, len(weights) + 1))


def _scale(sums: tuple[Any, ...] | None, area: int, top: int) -> int:
    if sums is None:
        return area
    weights, by, steps = sums
    return area * whole_sums(weights, by, steps, top)[1]


def real(x: Tensor, sums: tuple[Any, ...] | None, area: int, top: int) -> Tensor:
    """Return frames in float32 of whole numbers."""
    scale = _scale(sums, area, top)
    return x.float() if scale == 1 else x.float() / scale


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of whole numbers."""
    return a + b


def spread(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return whole numbers with each row and each column so many times."""
    return x.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def aggregate(x: Tensor, weights: tuple[float, ...], by: Tensor | None, steps: int, top: int) -> Tensor:
    """Return whole sums of groups of frames of whole numbers."""
    k = len(weights) if by is None else by.shape[0]
    frames = x if x.shape[0] == steps else x.unflatten(0, (steps, -1))
    out = on_cpu.forward(frames, whole_sums(weights, by, steps, top)[0], k)
    return out if frames is x else out.flatten(0, 1)


def _layer(node: Node, top: int) -> Callable[..., Tensor]:
    """Return what runs a layer in int8."""

    def pair(x: Any) -> tuple[int, int]:
        return (x, x) if isinstance(x, int) else tuple(x)

    norms = host.Affine()
    if node.target is F.linear:
        run = int8.linear()
    else:
        given = (argument(node, 3, "stride", 1), argument(node, 4, "padding", 0), argument(node, 5, "dilation", 1))
        run = int8.convolution(*map(pair, given))

    def layer_in_int8(x: Tensor, weight: Tensor, bias: Any, norm: Any, sums: tuple[Any, ...] | None, area: int) -> Tensor:
        pair = None if norm is None else norms.of(norm[-1], *norm[:-1])
        return run(x, weight, bias, _scale(sums, area, top), pair)

    return layer_in_int8


class _Rewriting:
    """Builds the whole numbers that layers read, beside frames in float32, and erases the nodes that have no reader then."""

    def __init__(self, graph: Graph, top: int) -> None:
        self.graph, self.top = graph, top
        self._made: dict[Any, Node] = {}
        self._roots: list[Node] = []  # spikes of each fire that writes whole numbers

    def run(self, layers: dict[Node, Whole]) -> None:
        for node, whole in layers.items():
            x = self.numbers(node.args[0])
            reader, norm = only_reader(node), None
            if reader is not None and reader.target is fire and through_reshapes(reader.kwargs["y"]) is node:
                norm, reader.kwargs = reader.kwargs["norm"], {**reader.kwargs, "norm": None}
            given = (x, argument(node, 1, "weight"), argument(node, 2, "bias"), norm, whole.sums, whole.area)
            fake = node.meta["example_value"]
            replace(node, emit(node, _layer(node, self.top), given, made=lambda fake=fake: fake.new_empty(fake.shape)))
        _sweep(self.graph)
        absorb.absorb(self.graph)
        for spikes in self._roots:
            self._join(spikes)
        for node in each(self.graph):
            if node.target is AGGREGATE and dtype(node.args[0]) is torch.uint8:
                frames, weights, by, steps, _ = node.args
                replace(node, self._like(node, aggregate, (frames, tuple(weights), by, steps, self.top)))

    def numbers(self, node: Node) -> Node:
        """Return the node of a node's whole numbers."""
        if node not in self._made:
            self._made[node] = self._build(node)
        return self._made[node]

    def _build(self, node: Node) -> Node:
        if node.target is operator.getitem:
            return self._root(node)
        if node.target is AGGREGATE:
            return self._aggregate(node, node.args[0], tuple(node.args[1]), *node.args[2:4])
        if node.target in ADDS:
            return self._like(node, add, tuple(map(self.numbers, node.args)))
        if node.target is torch.cat:
            return self._like(node, torch.cat, ([self.numbers(one) for one in node.args[0]], *node.args[1:]))
        if times := _times(node):
            return self._like(node, spread, (self.numbers(node.args[0]), *times))
        target = "reshape" if node.target == "view" else node.target
        return self._like(node, target, (self.numbers(node.args[0]), *node.args[1:]))

    def _like(self, node: Node, target: Any, args: tuple[Any, ...]) -> Node:
        """Emit what gives whole numbers of a node's shape."""
        fake, kwargs = node.meta["example_value"], dict(node.kwargs) if target == node.target else {}
        return emit(node, target, args, kwargs, made=lambda: fake.new_empty(fake.shape, dtype=torch.uint8))

    def _root(self, spikes: Node) -> Node:
        """Let a fire write whole numbers, and who reads its frames read them over S."""
        node, whole = spikes.args[0], _whole(spikes)
        assert whole is not None
        node.kwargs = {**node.kwargs, "top": self.top}
        readers, fake = list(spikes.users), spikes.meta["example_value"]
        frames = emit(spikes.next, real, (spikes, whole.sums, whole.area, self.top), made=lambda: fake.new_empty(fake.shape))
        for reader in readers:
            reader.replace_input_with(spikes, frames)
        with fake.fake_mode:
            spikes.meta["example_value"] = fake.new_empty(fake.shape, dtype=torch.uint8)
        self._roots.append(spikes)
        self._made[frames] = spikes
        return spikes

    def _aggregate(self, node: Node, x: Node, weights: tuple[float, ...], by: Any, steps: Any) -> Node:
        """aggregate(a + b) = aggregate(a) + aggregate(b)."""
        key = (x, weights, by, steps)
        if key not in self._made:
            rows = through_reshapes(x)
            if rows.target in ADDS and _alike(rows, x):
                parts = tuple(self._aggregate(node, part, weights, by, steps) for part in rows.args)
                self._made[key] = self._like(node, add, parts)
            else:
                self._made[key] = self._like(node, AGGREGATE, (self.numbers(x), list(weights), by, steps, "normalized"))
        return self._made[key]

    def _join(self, spikes: Node) -> None:
        """fire(..) + b = fire(.., joined=b), where no other node reads the spikes."""
        reader, node = only_reader(spikes), spikes.args[0]
        if reader is None or reader.target is not add:
            return
        part, other = reader.args if through_reshapes(reader.args[0]) is spikes else reversed(reader.args)
        if through_reshapes(other) is spikes:
            return
        if not absorb.moves(node, spikes, reader):
            return
        node.kwargs = {**node.kwargs, "joined": other}
        reshapes = [part]
        while reshapes[0] is not spikes:
            reshapes.insert(0, reshapes[0].args[0])
        for moved in reshapes[1:]:
            reader.prepend(moved)
        replace(reader, part)


def _sweep(graph: Graph) -> None:
    """Erase nodes without a reader, of whole numbers and of the frames beside them."""
    own: Iterable[Any] = (
        {add, aggregate, real, spread, AGGREGATE, EXPAND, torch.cat, F.adaptive_avg_pool2d} | ADDS | RESHAPES
    )
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in own and not is_frozen(node):
            graph.erase_node(node)
