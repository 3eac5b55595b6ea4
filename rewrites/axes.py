"""Where T and N stand among the arguments of a model's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rewrites.arguments import copied, signature_of
from rewrites.layouts import Sample
from sj_tac import host
from sj_tac.runtime.borders import Axes


def find_axes(model: nn.Module, arguments: tuple[Any, ...], sample: Sample | None) -> Axes | None:
    """By trial: the dimension of an argument which, made longer by one, gives the neurons one step, or one sample, more.

    Args:
        sample: T and N that the neurons see for ``arguments``; None where no neuron was seen.
    """
    if sample is None:
        return None
    names = tuple(signature_of(model).parameters)
    ranks = tuple(x.dim() if isinstance(x, Tensor) else -1 for x in arguments)
    places = [(i, d) for i, x in enumerate(arguments) if isinstance(x, Tensor) for d in range(min(2, x.dim()))]
    found: list[tuple[int, int] | None] = [None, None]
    if _seen(model, arguments) == (sample.steps, sample.batch):
        for which, size in enumerate((sample.steps, sample.batch)):
            more = [sample.steps, sample.batch]
            more[which] += 1
            for at in places:
                if arguments[at[0]].shape[at[1]] == size and _seen_longer(model, arguments, *at) == tuple(more):
                    found[which] = at
                    break
    return Axes(names, ranks, found[0], found[1])


def time_axis(model: nn.Module, x: Tensor) -> int | None:
    """The dimension of a model's only input that is time: made longer by one, it gives the neurons one step more.

    None where neither of the first two is, as for images that the model repeats, or where no neuron runs.
    """
    before = _seen(model, (x,))
    for dim in range(min(2, x.dim())) if before is not None else ():
        after = _seen_longer(model, (x,), 0, dim)
        if before is not None and after is not None and after[0] == before[0] + 1:
            return dim
    return None


def _seen_longer(model: nn.Module, arguments: tuple[Any, ...], argument: int, dim: int) -> tuple[int, ...] | None:
    """``_seen`` of a call with an argument that is longer by one; None, too, where torch cannot make it so."""
    x = arguments[argument]
    try:
        # A copy: of a sparse tensor there is no view.
        longer = torch.cat([x, torch.narrow_copy(x, dim, 0, 1)], dim)
    except RuntimeError:  # compressed rows and the like are neither cut nor joined
        return None
    return _seen(model, (*arguments[:argument], longer, *arguments[argument + 1 :]))


class _Enough(Exception):
    pass


def _seen(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[int, ...] | None:
    """T and N of a call as its first neuron sees them; None where the call fails before."""
    seen: list[tuple[int, ...]] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.append(host.steps_and_batch(module, args[0].shape))
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
