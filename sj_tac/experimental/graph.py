"""Conversion by a definition, equations on Dynamo's graph, and a gate: the engine that is to take convert's place.

In reach: preserve on convolutions of any class that drive neurons of any class. LIFNode, IFNode and ParametricLIFNode run as
one operator each, in kernels; other neurons run as they are written.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from sj_tac.definition import convs, neurons
from sj_tac.definition.convs import SharedConv
from sj_tac.errors import ConversionError
from sj_tac.rewrites.arguments import as_arguments
from sj_tac.rewrites.gate import Attach, attach, detach, gate_of
from sj_tac.rewrites.measure.examples import find_example
from sj_tac.rewrites.measure.left import Left
from sj_tac.rewrites.measure.plan import plan


def convert(model: nn.Module, k: int = 2, *, example_input: Any = None, fuse: bool = True) -> nn.Module:
    """Return a copy of ``model`` whose convolutions run once for k frames, wherever they drive neurons.

    Which convolutions do is measured on an example (``sj_tac.rewrites.measure``), whatever the classes of the model.

    Args:
        model: takes frames, or images that it repeats itself.
        k: frames per convolution.
        example_input: what the model runs on, of two or more samples; a tuple for several arguments. Without it a usual
            shape is looked for.
        fuse: False runs the definition eagerly.

    Raises:
        ConversionError: no convolution drives a neuron, or no usual shape fits and no example was given.
    """
    arguments = (find_example(model),) if example_input is None else as_arguments(example_input)
    found = plan(model, arguments)
    net = copy.deepcopy(model)
    sharings = found.sharings(k, net)
    if not sharings:
        left = "; ".join(f"{n}: {c.why}" for n, c in list(found.convolutions.items())[:3] if isinstance(c, Left))
        raise ConversionError(f"no convolution of this {type(model).__name__} drives a neuron ({left})")
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
            module.fit_logits()


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
