"""Conversion by a definition, equations on Dynamo's graph, and a gate: the engine that is to take convert's place.

In reach: preserve on Conv1d, Conv2d, Conv3d and Linear that drive LIFNode, IFNode and ParametricLIFNode.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sj_tac.definition import convs, neurons
from sj_tac.definition.convs import SharedConv, Sharing
from sj_tac.errors import ConversionError
from sj_tac.rewrites.chains import Chain
from sj_tac.rewrites.gate import Attach, attach, detach, gate_of
from sj_tac.rewrites.plan import analyse


def convert(model: nn.Module, k: int = 2, *, example_input: Any = None, fuse: bool = True) -> nn.Module:
    """Return a copy of ``model`` whose convolutions run once for k frames, wherever they drive neurons.

    Args:
        model: takes frames [T, N, C, H, W]; every step module in step mode "m".
        k: frames per convolution.
        example_input: frames that the model runs on; without them its forward is traced.
        fuse: False runs the definition eagerly.

    Raises:
        ConversionError: no convolution drives a neuron.
    """
    plan = analyse(model, "preserve", max(2, k), example_input, "auto", True)
    found = {name: chain for name, chain in plan.chains.items() if isinstance(chain, Chain)}
    net = copy.deepcopy(model)
    modules = dict(net.named_modules(remove_duplicate=False))
    sharings = {name: Sharing(k, modules[chain.neuron]) for name, chain in found.items()}
    if not sharings:
        raise ConversionError(f"no convolution of this {type(model).__name__} drives a neuron")
    neurons.swap(net)
    convs.share(net, sharings)
    if fuse:
        net.register_forward_pre_hook(Attach())
        attach(net)
    return net


def set_k(net: nn.Module, k: int) -> None:
    """Give every converted convolution another k. The next call rewrites its graphs and captures nothing."""
    for module in net.modules():
        if isinstance(module, SharedConv):
            module.sharing.k = k


def restore(net: nn.Module) -> nn.Module:
    """Turn a converted net back, in place, into the net that ``convert`` was given."""
    detach(net)
    convs.undo(net)
    neurons.undo(net)
    return net


def graphs(net: nn.Module) -> list[Any]:
    """Return the graphs that were captured of a net so far; each has ``code``, the Python that runs, and ``problem``."""
    gate = gate_of(net)
    return [] if gate is None else gate.capture.graphs
