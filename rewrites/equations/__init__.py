"""Identities that make a captured graph fast. Each is local, holds for any tensors, and is one function.

    mark(x) in front of a convolution = expand(aggregate(x))                         ``marks``   today's k
    f(expand(y)) = expand(f(y))                     f treats all frames alike        ``sink``
    aggregate(expand(y)) = y                        of the same groups               ``sink``
    repeat(y, T) = expand(y, T, T)                  an image T times                 ``repeats``
    neuron(expand(norm(y)) + r) = fire(y, norm, k, r)                                ``fuse``
    pool(fire(..)) = fire(.., pool)                 no other node reads the spikes   ``absorb``
    aggregate(fire(..)) = fire(.., sums)            no other node reads the spikes   ``absorb``
    conv(sums / S) = scale * (w8 * sums) + shift    asked for, no gradients          ``integers``
    fire(conv(x)) = fire(x, conv)                   few channels, no gradients       ``first_layer``
    reshape(reshape(x)) = reshape(x)                and one node for equal ones      ``reshapes``

What matches none of them stays the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from torch.fx import Graph, GraphModule

from sj_tac.rewrites.equations import absorb, first_layer, fuse, integers, marks, repeats, reshapes, sink, writes
from sj_tac.rewrites.equations.nodes import begin, outputs_share


def sink_and_share(graph: Graph) -> None:
    """``sink``, then ``share`` of what it brought in front of aggregates and expands, which may sink in turn."""
    sink.sink(graph)
    while repeats.share(graph):
        sink.sink(graph)


Equation = Callable[[Graph], None]
# In this order: what one writes, the next reads.
ORDER: tuple[Equation, ...] = (
    repeats.repeat, reshapes.merge_equal, sink_and_share, reshapes.tidy, reshapes.merge_equal, fuse.fuse, absorb.absorb,
    reshapes.tidy, integers.in_int8, first_layer.first_layer,
)  # fmt: skip


def run(gm: GraphModule, settings: Mapping[str, Any], in_int8: Container[str] = ()) -> None:
    """Rewrite a captured graph, and the graphs inside its higher-order nodes, in place.

    Args:
        settings: of each layer that may be marked, by name: (k, weights, normalize), as in ``definition.convs.Sharing``.
        in_int8: names of the layers that are to run in int8 where they can.
    """
    for inner in gm.children():
        if isinstance(inner, GraphModule):
            run(inner, settings, in_int8)
    graph = gm.graph
    before = outputs_share(graph)
    begin(graph, marks.replace_marks)
    marks.want_int8(graph, in_int8)
    marks.replace_marks(graph, settings)
    if not writes.switches_modes(graph):
        for equation in (writes.skip_dropouts, writes.functionalize, writes.freeze, *ORDER):
            begin(graph, equation)
            equation(graph)
            if equation in ORDER:
                writes.sweep(graph)
    begin(graph, marks.keep_convolutions_shared)
    marks.keep_convolutions_shared(graph)
    writes.part_outputs(graph, before)
    graph.lint()
    gm.recompile()


def define(gm: GraphModule, settings: Mapping[str, Any]) -> None:
    """Replace marks, in place, and rewrite nothing: what a converted net computes eagerly."""
    for inner in gm.children():
        if isinstance(inner, GraphModule):
            define(inner, settings)
    marks.replace_marks(gm.graph, settings)
    writes.freeze(gm.graph)  # what a checkpointed body writes into is no operand of it (lower.py)
    marks.keep_convolutions_shared(gm.graph)
    gm.graph.lint()
    gm.recompile()
