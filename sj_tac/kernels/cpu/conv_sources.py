"""What the kernels of a first layer's convolution read: frames and weights, laid out for them in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from sj_tac.kernels.cpu.arguments import Convolved, Slid
from sj_tac.kernels.cpu.registers import LANES

if TYPE_CHECKING:
    from sj_tac.kernels.cpu.conv_launches import Convolution


def source_of(
    conv: Convolution, frames: Tensor, filters: Tensor, bias: Tensor | None, map_: Sequence[int]
) -> Convolved | Slid:
    """What the kernel reads; ``map_``: size of the output."""
    map_ = [size + size % 2 for size in map_]  # windows of 2 x 2 at the edge of an odd map are whole
    more = None if bias is None else bias.detach().to(conv.dtype).float()
    return (_convolved if conv.last else _slid)(conv, conv.as_read(frames), conv.as_read(filters.detach()), more, map_)


def _slid(conv: Convolution, frames: Tensor, filters: Tensor, bias: Tensor | None, map_: Sequence[int]) -> Slid:
    """``source_of``, contiguous."""
    rows, columns = map_
    groups, batch, inputs, height, width = frames.shape
    high = max(height + conv.above, rows - 1 + conv.high)
    half = (max(width + conv.before, columns - 1 + conv.wide) + 1) // 2
    # Registers without slots read a whole one, too.
    room = frames.new_zeros(groups * batch * inputs * high * 2 * half + LANES)
    put = room[:-LANES].view(groups, batch, inputs, high, 2, half)
    for odd in (0, 1):
        first = (odd - conv.before) % 2
        some, begin = frames[..., first::2], (first + conv.before) // 2
        put[:, :, :, conv.above : conv.above + height, odd, begin : begin + some.shape[-1]] = some
    more = np.empty(0, np.float32) if bias is None else bias.contiguous().numpy()
    of_input = high * 2 * half
    return Slid(
        room.numpy(), filters.permute(0, 2, 3, 1).contiguous().numpy().reshape(-1), more, conv.high, conv.wide, inputs,
        inputs * of_input, of_input, 4 * half, 2 * half, half,
    )  # fmt: skip


def _convolved(conv: Convolution, frames: Tensor, filters: Tensor, bias: Tensor | None, map_: Sequence[int]) -> Convolved:
    """``source_of``, channels_last."""
    (rows, columns), inputs = map_, frames.shape[2]
    high = max(conv.height + conv.above, (rows - 1) * conv.down + conv.high)
    wide = max(conv.width + conv.before, (columns - 1) * conv.along + conv.wide)
    inside = frames.movedim(2, -1)
    if (high, wide) != (conv.height, conv.width):
        room = frames.new_zeros(*frames.shape[:2], high, wide, inputs)
        room[:, :, conv.above : conv.above + conv.height, conv.before : conv.before + conv.width] = inside
        inside = room
    rows_of = filters.new_zeros(filters.numel() + LANES)
    lines, line, taps, tap = conv.high, wide * inputs, conv.wide * inputs, 1
    order = 2, 3, 1, 0
    if conv.by_columns:
        lines, line, taps, tap, order = conv.wide, 1, conv.high, wide, (3, 2, 1, 0)
    ordered = filters.permute(order)
    rows_of[:-LANES].view(ordered.shape).copy_(ordered)
    return Convolved(
        inside.contiguous().numpy().reshape(-1), rows_of.numpy(), with_room(bias), inputs, high, wide,
        lines, line, taps, tap, conv.down, conv.along,
    )  # fmt: skip


def with_room(x: Tensor | None) -> Any:
    """Numbers of channels, and behind them as many as a register may read."""
    if x is None:
        return np.empty(0, np.float32)
    return np.concatenate([x.detach().float().numpy(), np.zeros(LANES)], dtype=np.float32)
