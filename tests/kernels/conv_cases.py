"""What the tests of convolution and ``fire`` in one kernel share: the convolution in plain C, in the promised order."""

import ctypes
import hashlib

import shim
import torch
import torch.nn.functional as F

from sj_tac.kernels import fire as kernels
from sj_tac.kernels.gpu import conv_fire

# Loops and nothing else: what conv.cuh says of its order of additions, for frames that have been padded already.
PLAIN = """
#include <math.h>
extern "C" void convolve(const float* x, const float* w, float* y, const int* n) {
    const int maps = n[0], inputs = n[1], height = n[2], width = n[3], outputs = n[4], kernel = n[5], stride = n[6];
    const int high = (height - kernel) / stride + 1, wide = (width - kernel) / stride + 1;
    for (int m = 0; m < maps; m++)
        for (int o = 0; o < outputs; o++)
            for (int r = 0; r < high; r++)
                for (int c = 0; c < wide; c++) {
                    float sum = 0.0f;
                    for (int i = 0; i < inputs; i++)
                        for (int a = 0; a < kernel; a++)
                            for (int b = 0; b < kernel; b++)
                                sum = fmaf(x[((m * inputs + i) * height + r * stride + a) * width + c * stride + b],
                                           w[((o * inputs + i) * kernel + a) * kernel + b], sum);
                    y[((m * outputs + o) * high + r) * wide + c] = sum;
                }
}
// The order of the CPU's kernel: frames [maps, height, width, inputs], weights [outputs, inputs, tall, broad]; where
// wanted, columns before rows.
extern "C" void convolve_rows(const float* x, const float* w, float* y, const int* n) {
    const int maps = n[0], inputs = n[1], height = n[2], width = n[3], outputs = n[4], tall = n[5], broad = n[6];
    const int down = n[7], along = n[8], high = (height - tall) / down + 1, wide = (width - broad) / along + 1;
    for (int m = 0; m < maps; m++)
        for (int o = 0; o < outputs; o++)
            for (int r = 0; r < high; r++)
                for (int c = 0; c < wide; c++) {
                    float sum = 0.0f;
                    for (int j = 0; j < tall * broad; j++) {
                        const int a = n[9] ? j % tall : j / broad, b = n[9] ? j / tall : j % broad;
                        for (int i = 0; i < inputs; i++)
                            sum = fmaf(x[((m * height + r * down + a) * width + c * along + b) * inputs + i],
                                       w[((o * inputs + i) * tall + a) * broad + b], sum);
                    }
                    y[((m * outputs + o) * high + r) * wide + c] = sum;
                }
}
"""


def plain():
    """The compiled loops."""
    name = hashlib.sha256(PLAIN.encode()).hexdigest()[:16]
    source, binary = shim.folder() / f"plain_{name}.cpp", shim.folder() / f"plain_{name}.so"
    shim.whole(source, lambda part: part.write_text(PLAIN))
    shim.whole(binary, lambda part: shim.compiled(source, "-o", part))
    return ctypes.CDLL(str(binary))


def last(x):
    """The same numbers in channels_last."""
    return x.movedim(-3, -1).contiguous().movedim(-1, -3)


def drives_of(frames, weight, bias, stride, padding):
    """The drives [G, N, C, H, W] of frames [G, N, C_in, H, W], to the last bit what the kernel promises."""
    x = F.pad(frames.float().flatten(0, 1), [padding] * 4).contiguous()
    w = weight.float().contiguous()
    kernel = w.shape[2]
    map_ = [(size - kernel) // stride + 1 for size in x.shape[2:]]
    y = torch.empty(x.shape[0], w.shape[0], *map_)
    numbers = (ctypes.c_int * 7)(x.shape[0], x.shape[1], x.shape[2], x.shape[3], w.shape[0], kernel, stride)
    plain().convolve(*(ctypes.c_void_p(t.data_ptr()) for t in (x, w, y)), numbers)
    if bias is not None:
        y += bias.float().view(-1, 1, 1)
    return y.to(frames.dtype).view(*frames.shape[:2], *y.shape[1:])


def drives_in_rows(frames, weight, bias, stride, padding, by_columns=False):
    """The drives [G, N, C, H, W] of frames [G, N, C_in, H, W], to the last bit what the CPU's kernel promises.

    Of bfloat16 the second of two channels is added before the first; products are exact in float32.
    """
    (down, along), (above, before) = stride, padding
    dtype, inputs = frames.dtype, frames.shape[2]
    if dtype is torch.bfloat16:
        order = [at ^ 1 if at ^ 1 < inputs else at for at in range(inputs)]
        frames, weight = frames[:, :, order].float(), weight[:, order].float()
        bias = None if bias is None else bias.float()
    x = F.pad(frames.flatten(0, 1), [before, before, above, above]).movedim(1, -1).contiguous()
    maps, height, width, inputs = x.shape
    outputs, _, tall, broad = weight.shape
    y = torch.empty(maps, outputs, (height - tall) // down + 1, (width - broad) // along + 1)
    numbers = (ctypes.c_int * 10)(maps, inputs, height, width, outputs, tall, broad, down, along, by_columns)
    plain().convolve_rows(*(ctypes.c_void_p(t.data_ptr()) for t in (x, weight.contiguous(), y)), numbers)
    if bias is not None:
        y += bias.view(-1, 1, 1)
    return y.to(dtype).view(*frames.shape[:2], *y.shape[1:])


def launch_of(call, of, stride, padding, launcher="cupy"):
    """The launch for a ``kernels.Call`` whose drives are convolved of these."""
    options = ((stride, stride), (padding, padding), (1, 1), 1)
    one = conv_fire.convolution(of, options, call.y.shape)
    assert one is not None
    return conv_fire.ConvLaunch(kernels.operands(call, None), launcher, one)
