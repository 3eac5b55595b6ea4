"""Distil a source into the BatchNorms of its converted net: a few steps of gradient descent, without labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.errors import BatchError
from sj_tac.rewrites.corrections import held, put
from sj_tac.rewrites.gate import as_defined
from sj_tac.tuning.batches import Batch
from sj_tac.tuning.comparing import all_tensors
from sj_tac.tuning.fitting import Places, shift_and_scale
from sj_tac.tuning.measure import Decode, decoded, described, run_batch

# Three times as much overfits 16 samples: outputs come nearer there, and farther on others.
RATE = 0.003
CHUNK = 16  # samples a step
# How far a scale may go, as a logarithm.
LIMIT = 1.5


def distil(
    converted: nn.Module,
    source: nn.Module,
    places: Places,
    batch: Batch,
    *,
    steps: int,
    seed: int,
    decode: Decode | None = None,
    tick: Callable[[str], None] = lambda what: None,
) -> None:
    """Move scale and shift of every norm towards the source's outputs, as running statistics, in place.

    ``I' = exp(g) a (y - mu) + b + d`` per channel, for BatchNorm's ``I = a (y - mu) + b``; Adam on g and d, for the mean
    squared difference of the outputs over the variance of the source's. All weights stay as they are, BatchNorm's own, too.

    Raises BatchError where the loss is not finite, or no gradient comes to any norm, as under ``torch.no_grad``.
    """
    norms: dict[str, Any] = {name: converted.get_submodule(name) for name in places.norms}
    norms = {name: norm for name, norm in norms.items() if norm.weight is not None and norm.bias is not None}
    if not norms:
        return
    starts = range(0, batch.samples, CHUNK)
    chunks = [Batch(batch.frames[:, i : i + CHUNK], None, batch.batch_first) for i in starts]
    wanted = _wanted(source, chunks, decode, seed)
    spread = torch.cat(wanted).var().clamp_min(1e-12)
    moves = {name: (torch.zeros_like(norm.weight), torch.zeros_like(norm.bias)) for name, norm in norms.items()}
    first = {name: held(norm, ("weight", "bias")) for name, norm in norms.items()}
    flags = {parameter: parameter.requires_grad for parameter in converted.parameters()}
    optimizer = torch.optim.Adam([x for pair in moves.values() for x in pair], RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    try:
        with host.looked_at(converted, trains=True), as_defined(), torch.enable_grad():
            for parameter in flags:
                parameter.requires_grad_(False)
            for norm in norms.values():
                norm.weight.requires_grad_(True)
                norm.bias.requires_grad_(True)
            for step in range(steps):
                number = step % len(chunks)
                torch.manual_seed(seed + number)
                got = _flat(converted, chunks[number], number, decode)
                loss = (got - wanted[number]).square().mean() / spread
                if not torch.isfinite(loss) or not loss.requires_grad:
                    what = "has no gradient" if torch.isfinite(loss) else f"is {loss.item()}"
                    raise BatchError(
                        f"distilling: the loss of {type(converted).__name__} {what} in step {step}; drop steps="
                    )
                learned = [p for norm in norms.values() for p in (norm.weight, norm.bias)]
                grads = torch.autograd.grad(loss, learned, allow_unused=True)
                _move(norms, moves, first, grads, optimizer)
                schedule.step()
                tick("distil")
    finally:
        for name, norm in norms.items():
            put(norm, first[name])
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    for name, norm in norms.items():
        scale, shift = (x.double() for x in moves[name])
        own = norm.weight.detach().double() / (norm.running_var.double() + norm.eps).sqrt()
        shift_and_scale(norm, scale.exp(), own, shift)


def _wanted(source: nn.Module, chunks: list[Batch], decode: Decode | None, seed: int) -> list[Tensor]:
    found = []
    with host.looked_at(source), as_defined():
        for number, chunk in enumerate(chunks):
            torch.manual_seed(seed + number)
            found.append(_flat(source, chunk, number, decode))
    return found


def _flat(net: nn.Module, batch: Batch, number: int, decode: Decode | None) -> Tensor:
    """A net's class scores in one row; or all numbers of another output that may have a gradient."""
    output = run_batch(net, batch, number)
    try:
        return decoded(output, batch, decode, described(batch, number)).float().flatten()
    except BatchError:
        if decode is not None:
            raise
    parts = [x.float().flatten() for x in all_tensors(net, output, batch) if x.is_floating_point()]
    if not parts:
        raise BatchError("distilling: the output has no floating point numbers; drop steps=")
    return torch.cat(parts)


def _move(
    norms: dict[str, Any],
    moves: dict[str, tuple[Tensor, Tensor]],
    first: dict[str, dict[str, Tensor]],
    grads: tuple[Tensor | None, ...],
    optimizer: torch.optim.Optimizer,
) -> None:
    """One step of g and d, and BatchNorm's weight and bias by them."""
    each = iter(grads)
    for name, norm in norms.items():
        by_weight, by_bias = next(each), next(each)
        scale, shift = moves[name]
        scale.grad = None if by_weight is None else by_weight * norm.weight.detach()
        shift.grad = by_bias
    optimizer.step()
    for name, norm in norms.items():
        scale, shift = moves[name]
        scale.clamp_(-LIMIT, LIMIT)
        put(norm, {"weight": first[name]["weight"] * scale.exp(), "bias": first[name]["bias"] + shift})
