"""One module's change of class, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sj_tac.errors import PolicyError
from sj_tac.policy import Settings
from sj_tac.runtime.drives import LOGITS, SITE_SWAPS, SharedDriveSite
from sj_tac.runtime.places import DrivePlace, FiringPlace, NormPlace, Place
from sj_tac.runtime.spans import Span, Timeline
from sj_tac.runtime.swapped import SWAPS, source_class


@dataclass(frozen=True)
class Swap:
    """One module that changes its class, and the place on the time axis it gets."""

    module: nn.Module
    place: Place


def drive_place(name: str, settings: Settings, span: Span, node: nn.Module, timeline: Timeline) -> DrivePlace:
    """The place of a chain's conv. Raises PolicyError where ``k`` does not fit a collapse before it."""
    k, step = settings.k, span.stretch
    if k > step and k % step:
        raise PolicyError(
            f"layer {name!r}: k={k} source steps are no whole number of frames, because a frame stands for {step} steps "
            f"here; choose a multiple of {step}, or a k up to {step}"
        )
    return DrivePlace(
        timeline,
        span,
        name=name,
        mode=settings.mode,
        k=k,
        weights=settings.weights,
        normalize=settings.normalize,
        spikes=settings.spikes,
        node=node,
    )


def chain_swaps(
    drive: DrivePlace, conv: nn.Module, norm: nn.Module | None, node: nn.Module, mean_pool: nn.Module | None
) -> list[Swap]:
    """The swaps of one chain; ``mean_pool`` is the MaxPool that follows the neuron, if there is one."""
    out = drive.out
    swaps = [Swap(conv, drive)]
    if norm is not None:
        swaps.append(Swap(norm, NormPlace(drive.timeline, out, name=drive.name, aggregated=drive.k > 1)))
    merge = out.merged // drive.span.merged
    pooled = mean_pool is not None and out.stretch > 1
    firing = FiringPlace(drive.timeline, out, emit_mean=not pooled, merge=merge, normalize=drive.normalize)
    swaps.append(Swap(node, firing))
    if pooled and mean_pool is not None:
        swaps.append(Swap(mean_pool, Place(drive.timeline, out)))
    return swaps


def absorb(swap: Swap) -> None:
    """Change the class of one module (source class or swapped already) and put it at its place."""
    module, place = swap.module, swap.place
    if isinstance(place, DrivePlace):
        module.__class__ = SITE_SWAPS[place.mode][source_class(module)]
        module._tac = place  # type: ignore[assignment]
        _fit_logits(module)
        return
    old = module.__dict__.get("_tac")
    if isinstance(place, NormPlace) and isinstance(old, NormPlace):
        place.frozen, place.moved = old.frozen, old.moved
    module.__class__ = SWAPS[source_class(module)]
    module._tac = place  # type: ignore[assignment]


def release(module: nn.Module) -> None:
    """Undo ``absorb``."""
    module.__class__ = source_class(module)
    del module.__dict__["_tac"]
    module._parameters.pop(LOGITS, None)


def _fit_logits(conv: Any) -> None:
    """Give the conv the logits its weights need: as many as frames in a group, none where nothing is aggregated."""
    place = conv._tac
    wanted = place.frames if place.weights == "learned" and place.frames > 1 else 0
    held = conv._parameters.get(LOGITS)
    if held is not None and len(held) == wanted:
        return
    conv._parameters.pop(LOGITS, None)
    if wanted:
        conv.register_parameter(LOGITS, nn.Parameter(conv.initial_logits()))


def has_trained_logits(conv: nn.Module) -> bool:
    """True where learned weights are no longer the decay weights they started at."""
    held = conv._parameters.get(LOGITS)
    return held is not None and isinstance(conv, SharedDriveSite) and not torch.equal(held, conv.initial_logits())
