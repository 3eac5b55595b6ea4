"""What the kernels of a first layer's convolution read: frames and weights, laid out for them in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sj_tac.kernels.cpu import costs, laying
from sj_tac.kernels.cpu.arguments import Convolved, Slid
from sj_tac.kernels.cpu.registers import LANES
from sj_tac.kernels.cpu.threads import share

if TYPE_CHECKING:
    from sj_tac.kernels.cpu.conv_launches import Convolution


def source_of(
    conv: Convolution, frames: Tensor, filters: Tensor, bias: Tensor | None, map_: Sequence[int]
) -> Convolved | Slid:
    """What the kernel reads; ``map_``: size of the output."""
    map_ = [size + size % 2 for size in map_]  # windows of 2 x 2 at the edge of an odd map are whole
    more = None if bias is None else bias.detach().to(conv.dtype).float()
    return (_convolved if conv.last else _slid)(conv, frames, _multiplied(conv, filters), more, map_)


def _multiplied(conv: Convolution, filters: Tensor) -> Any:
    """Filters [C, C_in, high, wide] as the kernel multiplies them: pairs of channels as one, zeros beside an odd one."""
    filters = filters.detach()
    if not conv.narrow:
        return filters.numpy()
    pairs = filters.new_zeros([len(filters), *filters.shape[2:], conv.inputs + conv.inputs % 2], dtype=torch.bfloat16)
    pairs[..., : conv.inputs] = filters.movedim(1, -1)
    return pairs.view(torch.int32).movedim(-1, 1).numpy()


def with_border(conv: Convolution, frames: Tensor, high: int, wide: int, spare: int = 0) -> Any:
    """All numbers of frames [G, N, C_in, H, W] with zeros around them and ``spare`` of them behind."""
    last = not frames.is_contiguous()
    if last and not frames.movedim(2, -1).is_contiguous():
        frames, last = frames.contiguous(), False
    numbers = _numbers(frames.movedim(2, -1) if last else frames)
    if conv.last and not conv.narrow and (last or conv.inputs == 1) and (high, wide) == (conv.height, conv.width):
        return numbers
    kind, together = (np.int16, 2) if conv.narrow else (np.float32, 1)
    channels = conv.inputs + conv.inputs % together
    of = laying.Border(last, conv.inputs, conv.height, conv.width, conv.above, conv.before, high, wide, together, channels)
    count = frames.shape[0] * frames.shape[1]
    size = count * channels * high * wide
    out = np.empty(size + spare * together, kind)
    out[size:] = 0
    lays, units = (laying.pixels, count * high) if conv.last else (laying.columns, count * (channels // together) * high)
    share(lays, units, int(size * costs.LAID), numbers, of, kind(0), out)
    return out.view(np.int32) if conv.narrow else out


def _numbers(x: Tensor) -> Any:
    """As they lie; the bits of bfloat16 as int16."""
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).detach().numpy().reshape(-1)


def _slid(conv: Convolution, frames: Tensor, filters: Any, bias: Tensor | None, map_: Sequence[int]) -> Slid:
    """``source_of``, contiguous."""
    rows, columns = map_
    high = max(conv.height + conv.above, rows - 1 + conv.high)
    half = (max(conv.width + conv.before, columns - 1 + conv.wide) + 1) // 2
    # Registers without slots read a whole one, too.
    laid = with_border(conv, frames, high, 2 * half, LANES)
    more = np.empty(0, np.float32) if bias is None else bias.contiguous().numpy()
    inputs, of_input = filters.shape[1], high * 2 * half
    return Slid(
        laid, np.ascontiguousarray(filters.transpose(0, 2, 3, 1)).reshape(-1), more, conv.high, conv.wide, inputs,
        inputs * of_input, of_input, 4 * half, 2 * half, half,
    )  # fmt: skip


def _convolved(conv: Convolution, frames: Tensor, filters: Any, bias: Tensor | None, map_: Sequence[int]) -> Convolved:
    """``source_of``, channels_last."""
    (rows, columns), inputs = map_, filters.shape[1]
    high = max(conv.height + conv.above, (rows - 1) * conv.down + conv.high)
    wide = max(conv.width + conv.before, (columns - 1) * conv.along + conv.wide)
    lines, line, taps, tap = conv.high, wide * inputs, conv.wide * inputs, 1
    order = 2, 3, 1, 0
    if conv.by_columns:
        lines, line, taps, tap, order = conv.wide, 1, conv.high, wide, (3, 2, 1, 0)
    ordered = filters.transpose(order)
    rows_of = np.zeros(ordered.size + LANES, ordered.dtype)
    rows_of[:-LANES].reshape(ordered.shape)[...] = ordered
    return Convolved(
        with_border(conv, frames, high, wide), rows_of, with_room(bias), inputs, high, wide,
        lines, line, taps, tap, conv.down, conv.along,
    )  # fmt: skip


def with_room(x: Tensor | None) -> Any:
    """Numbers of channels, and behind them as many as a register may read."""
    if x is None:
        return np.empty(0, np.float32)
    return np.concatenate([x.detach().float().numpy(), np.zeros(LANES)], dtype=np.float32)
