"""Where T and N stand among the arguments of a model's forward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rewrites.layouts import Sample
from rewrites.trace import copied
from sj_tac import host
from sj_tac.runtime.borders import Axes


def find_axes(model: nn.Module, arguments: tuple[Any, ...], sample: Sample | None) -> Axes | None:
    """By trial: the dimension of an argument which, made longer by one, gives the neurons one step more.

    A model that T is built into cannot be tried so. There the first dimension is time where it has the size T, and samples
    where it has the size N; T then follows from what is folded.

    Args:
        sample: T and N that the neurons see for ``arguments``; None where no neuron was seen.
    """
    if sample is None:
        return None
    names = tuple(inspect.signature(model.forward).parameters)
    ranks = tuple(x.dim() if isinstance(x, Tensor) else -1 for x in arguments)
    places = [(i, d) for i, x in enumerate(arguments) if isinstance(x, Tensor) for d in range(min(2, x.dim()))]
    sizes = {at: arguments[at[0]].shape[at[1]] for at in places}
    steps = [at for at in places if sizes[at] == sample.steps]
    first = next((at for at in steps if _steps_of(model, _longer(arguments, *at)) == sample.steps + 1), None)
    if first is None and sample.tells_folds:
        first = next((at for at in steps if at[1] == 0), None)
    # Where time is known the batch is the other of the first two dimensions; else it is in front.
    if first is not None:
        beside = (first[0], 1 - first[1])
        batch = beside if sizes.get(beside) == sample.batch else None
    else:
        batch = next((at for at in places if at[1] == 0 and sizes[at] == sample.batch), None)
    return Axes(names, ranks, first, batch)


def time_axis(model: nn.Module, x: Tensor) -> int | None:
    """The dimension of a model's only input that is time: made longer by one, it gives the neurons one step more.

    None where neither of the first two is, as for images that the model repeats, or where no neuron runs.
    """
    before = _steps_of(model, (x,))
    if before is None:
        return None
    return next((dim for dim in range(min(2, x.dim())) if _steps_of(model, _longer((x,), 0, dim)) == before + 1), None)


def _longer(arguments: tuple[Any, ...], argument: int, dim: int) -> tuple[Any, ...]:
    x = arguments[argument]
    return (*arguments[:argument], torch.cat([x, x.narrow(dim, 0, 1)], dim), *arguments[argument + 1 :])


class _Enough(Exception):
    pass


def _steps_of(model: nn.Module, arguments: tuple[Any, ...]) -> int | None:
    """T of a call as its first neuron sees it; None where the call fails before."""
    seen: list[int] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.append(args[0].shape[0])
        raise _Enough

    with host.looked_at(model):
        host.reset_memories(model)
        for module in model.modules():
            if host.steps_by_itself(module):
                module.register_forward_pre_hook(look)
        try:
            model(*copied(arguments))
        except Exception:  # what fails has its reasons, and no steps
            return seen[0] if seen else None
    return None
