"""Whether folded frames are what their shapes say, tried on a sample: which rows of a batch change with its first sample?"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rewrites.arguments import copied
from rewrites.chains import Chain
from rewrites.layouts import Sample
from sj_tac import host
from sj_tac.runtime.borders import Axes
from sj_tac.verdicts import Reason, Refusal


def misread(
    model: nn.Module, arguments: tuple[Any, ...], axes: Axes | None, sample: Sample | None, chains: Mapping[str, Any]
) -> dict[str, Refusal]:
    """Why convs on folded frames are not handed what the shapes of the sample say, by name. Changes nothing.

    A window of each frame, or a patch, may be a batch of as many. Nothing can be said where samples look at each other.
    """
    looked = {name: c for name, c in chains.items() if isinstance(c, Chain) and c.folded}
    if not looked or sample is None or axes is None or axes.batch is None:
        return {}
    argument, dim = axes.batch
    other = list(copied(arguments))
    given = other[argument]
    # Of a sparse tensor no part can be written.
    whole = given.to_dense() if given.is_sparse else given
    first = whole.select(dim, 0)
    first.copy_(first == 0)  # of spikes: spikes
    other[argument] = whole.to_sparse(given.sparse_dim()) if given.is_sparse else whole
    before, after = (_rows(model, tried, looked) for tried in (arguments, tuple(other)))
    found = {}
    for name, chain in looked.items():
        if name not in before or name not in after or before[name].shape != after[name].shape:
            continue
        changed = (~torch.isclose(before[name], after[name], rtol=1e-4, atol=1e-5)).flatten(1).any(1)
        own = torch.zeros(sample.batch, sample.steps, dtype=torch.bool, device=changed.device)
        own[0] = True
        own = (own if chain.batch_first else own.T).flatten()
        if len(own) == len(changed) and bool((changed & ~own).any()) and not bool(changed.all()):
            rows = ", ".join(map(str, changed.nonzero().flatten().tolist()[:6]))
            found[name] = Refusal(
                Reason.FOLD_AMBIGUOUS,
                f"{chain.site!r} is handed {list(before[name].shape)}, of which rows {rows} change with the first sample: "
                f"these are no frames of T={sample.steps} and N={sample.batch}",
            )
    return found


def _rows(model: nn.Module, arguments: tuple[Any, ...], chains: Mapping[str, Chain]) -> dict[str, Tensor]:
    """What each conv is handed."""
    found: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = next(iter((*args, *kwargs.values())), None)
            if isinstance(x, Tensor) and x.dim():
                found[name] = x.detach().clone()

        return hook

    # Random numbers are the same in every look.
    with contextlib.suppress(Exception), host.looked_at(model):
        host.reset_memories(model)
        for name, chain in chains.items():
            model.get_submodule(chain.site).register_forward_pre_hook(look(name), with_kwargs=True)
        model(*copied(arguments))
    return found
