"""``aggregate`` and its backward on the CPU, by the compiled kernels of src/."""

from __future__ import annotations

from torch import Tensor

from sj_tac.kernels.cpu.call import DTYPES, library, pointer, threads
from sj_tac.kernels.layout import empty, is_channels_last, laid

# Nanoseconds of a number, about: in the sums, and in their gradients.
SUMMED, SUMMED_BACK = 0.2, 0.5


def _is_last(x: Tensor) -> bool:
    return x.dim() > 3 and is_channels_last(x)


def _lying(x: Tensor, last: bool) -> Tensor:
    return laid(x, True) if last else x.contiguous()


def forward(x: Tensor, weights: Tensor, group: int) -> Tensor:
    """Sums of groups of frames, in the memory format of x."""
    last, frames = _is_last(x), x.shape[0]
    out = empty(x, [-(-frames // group), *x.shape[1:]], last)
    size = x.numel() // frames
    if size:
        x, weights = _lying(x, last), weights.contiguous()
        share = threads(x.numel() * SUMMED)
        library().aggregate_forward(
            pointer(x), pointer(weights), out.data_ptr(), frames, size, group, DTYPES[x.dtype], share
        )
    return out


def backward(
    go: Tensor, x: Tensor, weights: Tensor, group: int, need_x: bool, need_weights: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients to x and weights; None for what is not needed."""
    last, frames = _is_last(x), x.shape[0]
    gx = empty(x, list(x.shape), last) if need_x else None
    size, kernels = x.numel() // frames, library()
    # A weight's gradient is summed piece by piece, so that it does not depend on how many threads share the pieces.
    sums = weights.new_zeros(kernels.aggregate_pieces(size), frames) if need_weights else None
    if size:
        go, x, weights = _lying(go, last), _lying(x, last), weights.contiguous()
        share = threads(x.numel() * SUMMED_BACK)
        kernels.aggregate_backward(
            pointer(go), pointer(x), pointer(weights), pointer(gx), pointer(sums), frames, size, group,
            DTYPES[x.dtype], share,
        )  # fmt: skip
    return gx, None if sums is None else sums.sum(0)
