"""What a group's drive is at each of its steps, where it is not held for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.kernels import reference
from sj_tac.runtime.groups import Sums

PLAIN_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def problem(conv: nn.Module, alone: bool) -> str:
    """Why a layer can have no drive by mass; empty where it can. ``alone``: it is no container with a norm inside."""
    if not alone:
        return "profile: mass scales what a convolution gives, but this one is inside a container, with what follows it"
    if not isinstance(conv, PLAIN_CONVS) or host.is_transposed(conv):
        return f"profile: mass is of what a convolution's filter sees, which a {type(conv).__name__} has none of"
    if conv.groups > 1:
        return f"profile: mass counts all channels under the filter, but of {conv.groups} groups each sees its own"
    return ""


def by_mass(conv: Any, frames: Tensor, y: Tensor, wanted: Sums) -> Tensor:
    """Drives [T, N, ...] of frames [T, N, C, ...]: ``b + (y_g - b) M_t / M_g``.

    ``y_g`` is what the convolution gives for group g, b its bias; ``M_t`` is the sum of a frame's magnitudes under the
    filter, ``M_g`` its mean over the group, by the weights that made ``y_g``. Where a group holds nothing, ``y_g`` is held.
    """
    with torch.autocast(frames.device.type, enabled=False):
        wide = frames.to(reference.accumulation_dtype(frames.dtype))
        mass = wide.abs().sum(2, keepdim=True)
        box = mass.new_ones(1, 1, *conv.kernel_size)
        there = conv._conv_forward(mass.flatten(0, 1), box, None).unflatten(0, mass.shape[:2])
        first, last = wanted.weights()
        means = reference.aggregate(there, first, last)
        lengths = wanted.groups.frames
        of_group = reference.repeat(means, lengths)
        some = of_group > 0
        share = torch.where(some, there / torch.where(some, of_group, 1.0), 1.0).to(y.dtype)
    held = reference.repeat(y, lengths)
    if conv.bias is None:
        return held * share
    bias: Tensor = conv.bias.to(y.dtype).view(-1, *[1] * (y.dim() - 3))
    return (held - bias) * share + bias
