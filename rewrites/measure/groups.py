"""Which modules take equal frames where the frames that neurons emit are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sj_tac.rewrites.arguments import copied
from sj_tac.rewrites.measure.codes import OUTPUT, replace_outputs
from sj_tac.rewrites.measure.neurons import Layout
from sj_tac.rewrites.measure.runs import TOLERANCE, first, fresh, hooked
from sj_tac.rewrites.measure.survey import Neuron

RATE = 0.3


def _firsts(steps: int, size: int) -> Tensor:
    """Return, for each step, the first step of its group."""
    return torch.arange(steps) // size * size


@torch.no_grad()
def alike(
    net: nn.Module, arguments: tuple[Any, ...], neurons: Mapping[str, Neuron], layouts: Mapping[str, Layout]
) -> set[str]:
    """Return the neurons and convolutions whose input's frames are equal in groups if those of all neurons' spikes are.

    Groups of two and of three are tried: a forward that cuts frames away may cut between groups of one size.

    Args:
        layouts: of the convolutions.
    """
    return _alike(net, arguments, neurons, layouts, 2) & _alike(net, arguments, neurons, layouts, 3)


def _alike(
    net: nn.Module, arguments: tuple[Any, ...], neurons: Mapping[str, Neuron], layouts: Mapping[str, Layout], size: int
) -> set[str]:
    """Return the same for groups of ``size`` steps.

    Each neuron of a copy emits random spikes, and each convolution its own output, equal in groups. What the net's own input
    adds is not; who reads that, directly, is not in the result. OUTPUT is, where the net returns such frames.
    """
    made, generator, found = fresh(net, hooks=False), torch.Generator().manual_seed(7), dict[str, bool]()
    layouts = {**layouts, **{name: neuron.layout for name, neuron in neurons.items()}}

    def look(name: str, x: Tensor | None) -> None:
        layout = layouts[name]
        if x is None or x.shape[layout.dim] != layout.T * (layout.N if layout.folded else 1):
            found[name] = False
            return
        frames = layout.frames.time_first(x, layout.T)
        frames = frames.reshape(layout.T, -1)
        off = (frames - frames[_firsts(layout.T, size)]).abs()
        largest = frames.abs().max().nan_to_num(1.0).clamp_min(1e-12)
        found[name] = found.get(name, True) and bool((off <= TOLERANCE * largest).all())

    def grouped(x: Tensor, layout: Layout) -> Tensor:
        """Return x with each frame the first of its group."""
        if x.shape[layout.dim] != layout.T * (layout.N if layout.folded else 1):
            return x
        first_in_time = layout.frames.time_first(x, layout.T)
        frames = first_in_time.reshape(layout.T, -1)[_firsts(layout.T, size)]
        return layout.frames.back(frames.reshape(first_in_time.shape), layout.T)

    def spikes(x: Any, layout: Layout) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
            return x
        return grouped((torch.rand(x.shape, generator=generator) < RATE).to(x), layout)

    handles = []
    for name, layout in layouts.items():
        module = made.get_submodule(name)
        if name in neurons:
            replace_outputs(module, [tree_map(lambda x, at=layout: spikes(x, at), out) for out in neurons[name].outputs])
        else:
            group = lambda m, a, out, at=layout: grouped(out, at) if isinstance(out, Tensor) else out  # noqa: E731
            handles.append(module.register_forward_hook(group))
        handles.append(
            module.register_forward_pre_hook(lambda m, a, k, name=name: look(name, first((a, k))), with_kwargs=True)
        )
    with hooked(handles):
        out = made(*copied(arguments))
    if neurons and isinstance(out, Tensor):
        layout = next(iter(neurons.values())).layout
        layouts[OUTPUT] = Layout(layout.T, 1)
        look(OUTPUT, out if out.dim() else None)
    return {name for name, is_alike in found.items() if is_alike}
