"""Groups of frames and the weights of the frames in them. Equations: docs/equations.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sj_tac import host
from sj_tac.host import dispatch
from sj_tac.kernels import reference


def group_lengths(total: int, size: int) -> list[int]:
    """``total`` frames in groups of ``size``; the last group holds what is left: (10, 4) -> [4, 4, 2]."""
    total = reference.as_number(total)
    # No divmod: torch.compile has none of a size that is dynamic.
    return [size] * (total // size) + ([total % size] if total % size else [])


def temporal_sum(beta: float | Tensor, steps: int) -> float | Tensor:
    """``S_K = sum_{j<K} beta^j``: what a neuron with decay ``beta`` gathers from ``steps`` equal drives."""
    total: float | Tensor = beta**0
    for j in range(1, steps):
        total = total + beta**j
    return total


def decay_weights(beta: float | Tensor, lengths: Sequence[int], normalize: bool = True) -> list[float | Tensor]:
    """Weights of the frames of one group, each frame standing for ``lengths[j]`` steps.

    Frame j is worth what its steps still weigh in the membrane when the group ends: ``beta^(steps after it) * S_len``,
    over ``S_K`` of the whole group where ``normalize``. With all lengths 1 that is ``w_j = beta^(K-1-j) / S_K``.

    Args:
        beta: decay per step, in (0, 1]; a 0-dim tensor keeps its gradient.
        lengths: steps per frame; ``[1] * K`` for plain frames.
        normalize: weights that sum to 1, so that bias and BatchNorm of a pretrained layer stay right. False is the form
            of the paper, for nets trained with it.
    """
    if isinstance(beta, Tensor) and beta.device.type != "cpu" and dispatch.is_plain(beta):
        lengths = tuple(lengths)
        if len(set(lengths)) == 1 and not dispatch.differentiates(beta):
            return list(_at_once(beta, lengths, normalize).unbind())
    weights: list[float | Tensor] = []
    for j, length in enumerate(lengths):
        weights.append(beta ** sum(lengths[j + 1 :]) * temporal_sum(beta, length))
    if normalize:
        total = temporal_sum(beta, sum(lengths))
        weights = [w / total for w in weights]
    return weights


def _at_once(beta: Tensor, lengths: tuple[int, ...], normalize: bool) -> Tensor:
    """``decay_weights`` of frames of one length, without gradients: 4 launches on a device instead of 6 for each frame."""
    steps = sum(lengths)
    powers = beta ** reference.constant(range(steps - 1, -1, -1), beta.dtype, beta.device)
    weights = powers.view(len(lengths), -1).sum(1)
    return weights / powers.sum() if normalize else weights


def merged_steps(
    node: nn.Module, lengths: Sequence[int], normalize: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """beta^K and gamma S_K (gamma where not normalised) of one step that stands for ``lengths[g]``: [G, 2]."""
    beta, gamma = host.decay(node, dtype), host.input_gain(node, dtype)
    rows = [[beta**n, gamma * temporal_sum(beta, n) if normalize else gamma] for n in lengths]
    flat = [value for row in rows for value in row]
    numbers = [value for value in flat if not isinstance(value, Tensor)]
    if len(numbers) == len(flat):
        return reference.constant(numbers, dtype, device).view(-1, 2)
    return torch.stack([reference.tensor_of(value, dtype, device) for value in flat]).view(-1, 2)
