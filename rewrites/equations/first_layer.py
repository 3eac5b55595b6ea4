"""``fire(conv(x)) = fire(x, conv)``: a convolution of few channels is computed as its neurons step, without gradients.

Its output would be many times its input, and is read once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from sj_tac.rewrites.equations.fuse import fire
from sj_tac.rewrites.equations.nodes import argument, dtype, each, is_frozen, only_reader, same, shape, through_reshapes

# Multiplications of a drive up to which the kernel is no slower than a convolution and ``fire`` (benchmarks/first_layer.py),
# and the channels that a tile of neurons has room for.
MOST_TERMS, MOST_CHANNELS = 150, 512


def first_layer(graph: Graph) -> None:
    """fire(conv(x)) = fire(x, conv) where the kernel for it is no slower: torch's convolution runs where it cannot."""
    if torch.is_grad_enabled():
        return
    for node in each(graph):
        if node.target is not fire or is_frozen(node) or node.kwargs["places"] != 3:
            continue
        conv = through_reshapes(node.kwargs["y"])
        operands = _operands(conv) if conv.target is torch.conv2d and only_reader(conv) is node else None
        if operands and same(tuple(shape(conv)[1:]), tuple(shape(node.kwargs["y"])[-3:])):
            x, *how = operands
            gone: Any = node.kwargs["y"]
            node.kwargs = {**node.kwargs, "y": x, "convolution": tuple(how)}
            while gone is not x:  # the reshapes behind the convolution, and it
                ahead = gone.args[0]
                graph.erase_node(gone)
                gone = ahead


def _operands(conv: Node) -> tuple[Any, ...] | None:
    """Return x, weight, bias, stride, padding and dilation of a convolution that the kernel computes."""

    def pair(x: Any) -> Any:
        return (x, x) if isinstance(x, int) else tuple(x)

    x, weight = argument(conv, 0, "input"), argument(conv, 1, "weight")
    padding, fake = argument(conv, 4, "padding", 0), x.meta["example_value"]
    if is_frozen(conv, x) or fake.device.type != "cpu" or not dtype(x) is dtype(conv) is dtype(weight) is torch.float32:
        return None
    channels, *terms = shape(weight)
    if argument(conv, 6, "groups", 1) != 1 or isinstance(padding, str) or len(shape(x)) != 4:
        return None
    if math.prod(terms) > MOST_TERMS or channels > MOST_CHANNELS or not isinstance(shape(x)[1], int):
        return None
    stride, dilation = argument(conv, 3, "stride", 1), argument(conv, 5, "dilation", 1)
    return x, weight, argument(conv, 2, "bias"), pair(stride), pair(padding), pair(dilation)
