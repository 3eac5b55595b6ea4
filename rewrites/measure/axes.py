"""Which dimension of a net's only input is time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sj_tac.rewrites.measure.runs import is_convolution, undisturbed
from sj_tac.rewrites.measure.survey import survey


def time_axis(net: nn.Module, x: Tensor) -> int | None:
    """Return the dimension of ``x`` that is time: made longer by one, it gives the first neuron one step more.

    None if neither of the first two is, as of images that the net repeats, or if no neuron steps by itself. The net is left
    as it was.
    """
    if (steps := _steps(net, x)) is None:
        return None
    dims = range(min(2, x.dim()))
    return next((dim for dim in dims if _steps(net, torch.cat([x, x.narrow(dim, 0, 1)], dim)) == steps + 1), None)


def _steps(net: nn.Module, x: Tensor) -> int | None:
    """Return T of the first neuron; None if there is no neuron, or the net does not run."""
    try:
        with undisturbed(net):
            neurons = survey(net, (x,), _has_weights, to_first_neuron=True).neurons
    except Exception:  # what fails has its reasons, and no steps
        return None
    return next((neuron.layout.T for neuron in neurons.values()), None)


def _has_weights(module: nn.Module) -> bool:
    return is_convolution(module) or isinstance(module, nn.Linear)
