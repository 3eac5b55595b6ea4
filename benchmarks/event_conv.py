"""An event-driven 3 x 3 convolution: each spike adds nine rows of weights to the output. On a CPU it needs numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

# One block a spike, one thread an output channel. Outputs of neighbouring spikes overlap, hence the atomic adds.
SOURCE = r"""
extern "C" __global__ void event_conv(
    const long long *events, const float *rows, float *out, const int channels, const int outputs, const int height,
    const int width)
{
    const long long *event = events + 4LL * blockIdx.x;
    const int frame = (int)event[0], channel = (int)event[1], y = (int)event[2], x = (int)event[3];
    for (int tap = 0; tap < 9; ++tap) {
        const int ty = y + 1 - tap / 3, tx = x + 1 - tap % 3;
        if (ty < 0 || ty >= height || tx < 0 || tx >= width) continue;
        float *target = out + (((long long)frame * height + ty) * width + tx) * outputs;
        const float *row = rows + ((long long)tap * channels + channel) * outputs;
        for (int o = threadIdx.x; o < outputs; o += blockDim.x) atomicAdd(target + o, row[o]);
    }
}
"""


@numba.njit(fastmath=True, cache=True)
def _add(plane: Any, rows: Any, channel: int, y: int, x: int) -> None:  # pragma: no cover - compiled
    for dy in range(max(0, y + 2 - plane.shape[0]), min(3, y + 2)):
        for dx in range(max(0, x + 2 - plane.shape[1]), min(3, x + 2)):
            for o in range(rows.shape[3]):
                plane[y + 1 - dy, x + 1 - dx, o] += rows[dy, dx, channel, o]


@numba.njit(parallel=True, fastmath=True, cache=True)
def _on_cpu(frames: Any, rows: Any, out: Any) -> None:  # pragma: no cover - compiled
    count, channels, height, width = frames.shape
    for n in numba.prange(count):
        for c in range(channels):
            for y in range(height):
                for x in range(width):
                    if frames[n, c, y, x] != 0:
                        _add(out[n], rows, c, y, x)


def event_conv(frames: Tensor, weight: Tensor) -> Tensor:
    """Spikes [N, C, H, W] (0 or 1) and weights [C', C, 3, 3] to [N, C', H, W], padding 1. float32, CPU or CUDA."""
    rows = weight.permute(2, 3, 1, 0).contiguous()
    count, channels, height, width = frames.shape
    out = torch.zeros(count, height, width, len(weight), device=frames.device)
    if frames.device.type == "cpu":
        _on_cpu(frames.numpy(), rows.numpy(), out.numpy())
    else:
        import cupy

        events = frames.nonzero().contiguous()  # it comes column by column
        kernel = cupy.RawKernel(SOURCE, "event_conv")
        pointers = [value.data_ptr() for value in (events, rows, out)]
        sizes = [np.int32(value) for value in (channels, len(weight), height, width)]
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((len(events),), (min(256, len(weight)),), (*pointers, *sizes))
    return out.permute(0, 3, 1, 2)
