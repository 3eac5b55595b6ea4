"""The operators as functions. Equations: docs/equations.md; source: J. Qin, arXiv 2603.13810, sections on TAC and TAC-TP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from torch import Tensor, nn

from sj_tac.errors import refuse_unknown
from sj_tac.kernels import aggregate as aggregation, fire as kernels, reference
from sj_tac.kernels.weights import decay_weights, group_lengths, temporal_sum

__all__ = ["aggregate", "decay_weights", "expand", "fire", "temporal_sum"]


def aggregate(
    x: Tensor,
    weights: Sequence[float | Tensor] | Tensor,
    k: int,
    tail: Sequence[float | Tensor] = (),
    backend: str = "auto",
) -> Tensor:
    """``sum_j w_j x_j`` over each group of ``k`` frames: the input of the one convolution that serves them all.

    Args:
        x: frames [T, N, C, H, W] (any trailing shape), floating point.
        weights: ``k`` numbers, or a tensor [k]; gradients flow to it.
        k: frames per group, at least 1.
        tail: weights of the last ``T % k`` frames; by default the last ones of ``weights``, renormalised to the same sum.
        backend: "auto", or the kernel that must run.

    Returns:
        [ceil(T / k), N, C, H, W], dtype and memory format of ``x``; half inputs are summed in float32.

    Raises:
        ValueError: no frames, or weights that do not fit ``k`` and T.
        BackendError: a named backend that cannot run this.
    """
    if isinstance(weights, Tensor) and weights.dim() != 1:
        raise ValueError(f"aggregate got weights {list(weights.shape)}; it takes [k], one weight per frame of a group")
    chosen = list(weights.unbind() if isinstance(weights, Tensor) else weights)
    steps = reference.as_number(x.shape[0]) if x.dim() else 0
    if not x.is_floating_point():
        raise ValueError(f"aggregate got frames of {x.dtype}; it sums floating point numbers: convert them, x.float()")
    if any(isinstance(w, Tensor) and w.dim() for w in (*chosen, *tail)):
        raise ValueError("aggregate got a weight that is a tensor of a shape; give a number, or a tensor [], for each frame")
    if steps == 0:
        raise ValueError(f"aggregate needs frames [T, ...] with T >= 1, got shape {list(x.shape)}")
    if k < 1 or len(chosen) != k:
        raise ValueError(f"aggregate got {len(chosen)} weights for k={k}; give one weight per frame of a group")
    rest = steps % k
    if rest and not len(tail):
        scale = sum(chosen) / sum(chosen[-rest:])
        tail = [w * scale for w in chosen[-rest:]]
    if len(tail) != rest:
        raise ValueError(f"aggregate got {len(tail)} tail weights, but T={steps} and k={k} leave {rest} frames")
    return aggregation.run(aggregation.choose(backend, x.device, x.dtype), x, chosen, tail)


def expand(y: Tensor, k: int, steps: int) -> Tensor:
    """Each of the frames [G, ...] repeated ``k`` times, the last one as often as needed to make ``steps`` frames.

    Args:
        y: frames [G, ...], one for each group.
        k: frames per group.
        steps: T, frames in all.

    Returns:
        [steps, ...], dtype of ``y``.

    Raises:
        ValueError: ``steps`` frames in groups of ``k`` are not as many groups as ``y`` has.
    """
    lengths = group_lengths(steps, k)
    if len(lengths) != y.shape[0]:
        raise ValueError(f"expand got {y.shape[0]} frames, but {steps} steps in groups of {k} make {len(lengths)}")
    return reference.repeat(y, lengths)


class FireOptions(TypedDict, total=False):
    """What ``fire`` takes by keyword beside the drives and the neuron."""

    v: Tensor | None
    residual: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    weights: Tensor | None
    group: int
    merge: bool
    normalize: bool


def fire(
    y: Tensor,
    node: nn.Module,
    k: int = 1,
    *,
    steps: int | None = None,
    pool: nn.Module | None = None,
    backend: str = "auto",
    **options: Unpack[FireOptions],
) -> tuple[Tensor, Tensor]:
    """BatchNorm affine -> ``k`` neuron steps on each drive -> pool -> weighted sums, in one pass over ``y``.

    Args:
        y: drives [G, N, C, H, W], before the BatchNorm. Half inputs are computed in float32, and spikes come back in half.
        node: a LIFNode, IFNode or ParametricLIFNode; its state is neither read nor written.
        k: steps on each drive.
        steps: steps in all, default G * k; the last drive gets what is left.
        pool: MaxPool2d or AvgPool2d, or None.
        backend: "auto", or the kernel that must run.

    Keyword Args:
        v: voltages [N, C, H, W]; default: at rest.
        residual: frames [steps, N, C, H, W] of y's dtype, added to the drives behind the affine map, step by step.
        scale: [C], of a BatchNorm in eval mode.
        shift: [C], of the same.
        weights: one weight for each step [T]; default: no sums, the frames themselves.
        group: how many of them are summed.
        merge: one step on each drive that stands for k of them, as TAC's binary collapse.
        normalize: as in TAC's binary collapse, default True.

    Returns:
        Frames [T, N, C, H', W'], or [ceil(T / group), ...]; and the voltages afterwards. Gradients flow to y, residual,
        scale, shift, v, weights and a PLIF's w; nothing of T frames is saved for them by the fused kernels.

    Raises:
        ValueError: shapes or numbers that do not fit.
        BackendError: a named backend that cannot run this.
    """
    refuse_unknown("fire", options, FireOptions.__annotations__)
    drives = reference.as_number(y.shape[0]) if y.dim() else 0
    total = drives * k if steps is None else steps
    lengths = group_lengths(total, k) if k >= 1 and total >= 1 else []
    if y.dim() != 5 or not lengths or len(lengths) != drives:
        raise ValueError(
            f"fire got drives {list(y.shape)} with k={k} and {total} steps; it takes "
            "[ceil(steps / k), N, C, H, W] and at least one step"
        )
    kernel, _ = kernels.choose(backend, node, pool, y.device, y.dtype)
    return kernels.run(kernel, kernels.Call(y, node, lengths, pool=pool, **options))
