"""How far the drives of shared convolutions are from the source's, where it matters: in a group's weighted sum."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.definition import convs, ops
from sj_tac.rewrites.arguments import copied
from sj_tac.rewrites.measure.runs import before_calls, fresh, replace_outputs
from sj_tac.rewrites.measure.survey import Neuron


@torch.no_grad()
def compare(
    net: nn.Module, arguments: tuple[Any, ...], plan: Mapping[str, convs.Sharing], neurons: Mapping[str, Neuron]
) -> dict[str, float]:
    """Return, of each neuron, how far the weighted sums of its drives are off under ``plan``, as a part of their norm.

    Each neuron emits what it does in the source, so no difference is handed on. Where the convolution, and whatever stands
    between it and the neuron, is affine, the sums are the source's: ``sum_j w_j f(x_j) = f(sum_j w_j x_j)``.
    """
    made, off = fresh(net), dict[str, float]()
    convs.share(made, plan)
    k = max([sharing.k for sharing in plan.values()], default=2)
    # Frames are weighed for one neuron, whatever the decay of others behind the same convolution.
    betas = {float(sharing.decay(torch.float64)) for sharing in plan.values()}

    def look(name: str, u: Tensor | None) -> None:
        neuron = neurons[name]
        if u is None or u.shape != neuron.drives.shape or name in off:
            return
        beta = next(iter(betas)) if len(betas) == 1 else _decay(net.get_submodule(name), neuron)
        weights = [beta ** (k - 1 - j) for j in range(k)]
        own, shared = (
            ops.aggregated(neuron.layout.by_step(x).double(), weights, None, neuron.layout.T, "plain")
            for x in (neuron.drives, u)
        )
        off[name] = float((own - shared).norm() / own.norm().clamp_min(1e-12))

    for name, neuron in neurons.items():
        replace_outputs(made.get_submodule(name), neuron.outputs)
        before_calls(made.get_submodule(name), partial(look, name))
    made(*copied(arguments))
    return off


def _decay(module: nn.Module, neuron: Neuron) -> float:
    if neuron.decay is not None:
        return neuron.decay
    has_one = neuron.is_known and not host.many_numbers(module)
    return float(host.decay(module, torch.float64)) if has_one else 1.0
