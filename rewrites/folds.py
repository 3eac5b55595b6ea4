"""Whether folded frames are what their shapes say, tried on a sample: which rows of a batch change with its first sample?"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.rewrites.arguments import copied
from sj_tac.rewrites.chains import Chain
from sj_tac.rewrites.layouts import Sample, handed
from sj_tac.runtime.borders import Axes
from sj_tac.verdicts import Reason, Refusal


def misread(
    model: nn.Module, arguments: tuple[Any, ...], axes: Axes | None, sample: Sample | None, chains: Mapping[str, Any]
) -> dict[str, Refusal]:
    """Why convs on folded frames are not handed what the shapes of the sample say, by name. Changes nothing.

    A window of each frame, or a patch, may be a batch of as many. Nothing can be said where all samples look at each other.
    """
    looked = {name: c for name, c in chains.items() if isinstance(c, Chain) and c.folded}
    place = None if sample is None or axes is None else _samples(arguments, axes)
    if not looked or sample is None or axes is None or place is None:
        return {}
    first = "the first sample" if place == axes.batch else f"the first part of the input's dimension {place[1]}"
    before, after = (_look(model, tried, looked, sample) for tried in (arguments, _others(arguments, *place)))
    own = torch.zeros(sample.batch, dtype=torch.bool, device="cpu")
    own[0] = True
    if place != axes.batch:
        if before.frames is None or after.frames is None or before.frames.shape != after.frames.shape:
            return {}
        # What is made of this part, as the neuron has it that shows T and N.
        own = _changed(before.frames.flatten(0, 1), after.frames.flatten(0, 1)).view(sample.steps, -1).any(0).cpu()
    rows = own.repeat(sample.steps, 1)  # [T, N]
    found = {}
    for name, chain in looked.items():
        a, b = before.rows.get(name), after.rows.get(name)
        if a is None or b is None or a.shape != b.shape:
            continue
        changed, may = _changed(a, b).cpu(), (rows.T if chain.batch_first else rows).flatten()
        if len(may) == len(changed) and bool((changed & ~may).any()) and not bool(changed.all()):
            some = ", ".join(map(str, changed.nonzero().flatten().tolist()[:6]))
            found[name] = Refusal(
                Reason.FOLD_AMBIGUOUS,
                f"{chain.site!r} is handed {list(a.shape)}, of which rows {some} change with {first}: "
                f"these are no frames of T={sample.steps} and N={sample.batch}, or samples look at each other",
            )
    return found


def _samples(arguments: tuple[Any, ...], axes: Axes) -> tuple[int, int] | None:
    """The argument and dimension of samples; where no dimension is N, one that some samples are made of."""
    if axes.batch is not None or axes.steps is None:
        return axes.batch
    argument, time = axes.steps
    sizes = enumerate(arguments[argument].shape)
    return next(((argument, dim) for dim, size in sizes if dim != time and size > 1), None)


def _others(arguments: tuple[Any, ...], argument: int, dim: int) -> tuple[Any, ...]:
    """The arguments with another first sample, of all that seem to have it: forward may join them, or fold each."""
    other = list(copied(arguments))
    size = arguments[argument].shape[dim]
    for i, x in enumerate(other):
        is_like = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > dim and x.shape[dim] == size
        if i == argument or (is_like and (x.is_sparse or x.layout is torch.strided)):
            # Of a sparse tensor no part can be written.
            whole = x.to_dense() if x.is_sparse else x
            first = whole.select(dim, 0)
            first.copy_(first == 0)  # of spikes: spikes
            other[i] = whole.to_sparse(x.sparse_dim()) if x.is_sparse else whole
    return tuple(other)


def _changed(a: Tensor, b: Tensor) -> Tensor:
    return (~torch.isclose(a, b, rtol=1e-4, atol=1e-5)).flatten(1).any(1)


@dataclass
class _Look:
    """What each conv is handed, by name; ``frames``: [T, N, ...] as the first neuron is handed them."""

    sample: Sample
    rows: dict[str, Tensor] = field(default_factory=dict)
    frames: Tensor | None = None

    def conv(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = next(iter((*args, *kwargs.values())), None)
            if isinstance(x, Tensor) and x.dim():
                self.rows[name] = x.detach().clone()

        return hook

    def neuron(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given, wanted = handed(module, args, kwargs), (self.sample.steps, self.sample.batch)
        if given is None:
            return None
        x, seen = given
        if seen == wanted:
            if self.frames is None:
                self.frames = (x.transpose(0, 1) if host.is_batch_first(module) else x).detach().clone()
            return None
        # It steps through samples, and would carry each to the next: in this look it passes on what it is handed.
        folded = seen == wanted[::-1] or x.shape[0] == self.sample.steps * self.sample.batch
        return x.to(output.dtype) if folded and isinstance(output, Tensor) and output.shape == x.shape else None


def _look(model: nn.Module, arguments: tuple[Any, ...], chains: Mapping[str, Chain], sample: Sample) -> _Look:
    found = _Look(sample)
    # Random numbers are the same in every look.
    with contextlib.suppress(Exception), host.looked_at(model):
        host.reset_memories(model)
        for name, chain in chains.items():
            model.get_submodule(chain.site).register_forward_pre_hook(found.conv(name), with_kwargs=True)
        for module in model.modules():
            if host.steps_by_itself(module):
                module.register_forward_hook(found.neuron, with_kwargs=True)
        model(*copied(arguments))
    return found
