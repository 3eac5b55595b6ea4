"""How far the drives of shared convolutions are from the source's, where it matters: in a group's weighted sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sj_tac import host
from sj_tac.definition import convs
from sj_tac.rewrites.arguments import copied
from sj_tac.rewrites.measure.codes import replace_outputs
from sj_tac.rewrites.measure.runs import first, fresh, hooked
from sj_tac.rewrites.measure.survey import Neuron


@torch.no_grad()
def compare(
    net: nn.Module, arguments: tuple[Any, ...], plan: Mapping[str, convs.Sharing], neurons: Mapping[str, Neuron]
) -> dict[str, float]:
    """Return, of each neuron, how far the weighted sums of its drives are off under ``plan``, as a part of their norm.

    Each neuron emits what it does in the source, so no difference is handed on. Where the convolution, and whatever stands
    between it and the neuron, is affine, the sums are the source's: ``sum_j w_j f(x_j) = f(sum_j w_j x_j)``.
    """
    made, off = fresh(net, hooks=False), {}
    convs.share(made, plan)
    k = max([sharing.k for sharing in plan.values()], default=2)
    # Frames are weighed for one neuron, whatever the decay of others behind the same convolution.
    betas = {float(sharing.decay(torch.float64)) for sharing in plan.values()}

    def sums(u: Tensor, neuron: Neuron, beta: float) -> Tensor:
        frames = neuron.layout.frames.time_first(u.double(), neuron.layout.T)
        groups = torch.split(frames.reshape(neuron.layout.T, -1), k)
        return torch.stack([sum(beta ** (len(g) - 1 - j) * row for j, row in enumerate(g)) for g in groups])

    def look(name: str, u: Tensor | None) -> None:
        neuron = neurons[name]
        if u is None or u.shape != neuron.drives.shape or name in off:
            return
        beta = next(iter(betas)) if len(betas) == 1 else _decay(net.get_submodule(name), neuron)
        own = sums(neuron.drives, neuron, beta)
        off[name] = float((own - sums(u, neuron, beta)).norm() / own.norm().clamp_min(1e-12))

    handles: list[RemovableHandle] = []
    for name, neuron in neurons.items():
        module = made.get_submodule(name)
        replace_outputs(module, neuron.outputs)
        handles.append(
            module.register_forward_pre_hook(lambda m, a, k, name=name: look(name, first((a, k))), with_kwargs=True)
        )
    with hooked(handles):
        made(*copied(arguments))
    return off


def _decay(module: nn.Module, neuron: Neuron) -> float:
    if neuron.decay is not None:
        return neuron.decay
    has_one = neuron.is_known and not host.many_numbers(module)
    return float(host.decay(module, torch.float64)) if has_one else 1.0
