"""Which modules take equal frames where the frames that neurons emit are equal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sj_tac.rewrites.arguments import copied
from sj_tac.rewrites.measure.codes import OUTPUT
from sj_tac.rewrites.measure.neurons import Layout
from sj_tac.rewrites.measure.runs import TOLERANCE, before_calls, fresh, replace_outputs
from sj_tac.rewrites.measure.survey import Neuron

RATE = 0.3


@torch.no_grad()
def alike(
    net: nn.Module, arguments: tuple[Any, ...], neurons: Mapping[str, Neuron], layouts: Mapping[str, Layout]
) -> set[str]:
    """Return the neurons and convolutions whose input's frames are equal in groups if those of all neurons' spikes are.

    Groups of two and of three are tried: a forward that cuts frames away may cut between groups of one size.

    Args:
        layouts: of the convolutions.
    """
    layouts = {**layouts, **{name: neuron.layout for name, neuron in neurons.items()}}
    return _alike(net, arguments, neurons, layouts, 2) & _alike(net, arguments, neurons, layouts, 3)


def _alike(
    net: nn.Module, arguments: tuple[Any, ...], neurons: Mapping[str, Neuron], layouts: Mapping[str, Layout], size: int
) -> set[str]:
    """Return the same for groups of ``size`` steps.

    Each neuron of a copy emits random spikes, and each convolution its own output, equal in groups. What the net's own input
    adds is not; who reads that, directly, is not in the result. OUTPUT is, where the net returns such frames.
    """
    made, generator, found = fresh(net), torch.Generator().manual_seed(7), dict[str, bool]()

    def firsts(rows: Tensor) -> Tensor:
        """Return frames [T, elements] with each one the first of its group."""
        return rows[torch.arange(len(rows)) // size * size]

    def look(name: str, layout: Layout, x: Tensor | None) -> None:
        if x is None or not layout.counts(x):
            found[name] = False
            return
        rows = layout.by_step(x)
        largest = rows.abs().max().nan_to_num(1.0).clamp_min(1e-12)
        found[name] = found.get(name, True) and bool((rows - firsts(rows)).abs().max() <= TOLERANCE * largest)

    def grouped(x: Tensor, layout: Layout) -> Tensor:
        return layout.like(firsts(layout.by_step(x)), x) if layout.counts(x) else x

    def spikes(x: Any, layout: Layout) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
            return x
        return grouped((torch.rand(x.shape, generator=generator) < RATE).to(x), layout)

    for name, layout in layouts.items():
        module = made.get_submodule(name)
        if name in neurons:
            replace_outputs(module, [tree_map(lambda x, at=layout: spikes(x, at), out) for out in neurons[name].outputs])
        else:
            group = lambda m, a, out, at=layout: grouped(out, at) if isinstance(out, Tensor) else out  # noqa: E731
            module.register_forward_hook(group)
        before_calls(module, partial(look, name, layout))
    out = made(*copied(arguments))
    if neurons and isinstance(out, Tensor):
        T = next(iter(neurons.values())).layout.T
        look(OUTPUT, Layout(T, 1), out if out.dim() else None)
    return {name for name, is_alike in found.items() if is_alike}
