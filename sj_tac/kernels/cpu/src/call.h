// What Python asks a kernel for. Fields and their order are those of `Call` in ../call.py.
#pragma once
#include <cstdint>

typedef int64_t i64;

#define EXPORT extern "C" __attribute__((visibility("default")))

enum Dtype { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, UINT8 };
enum Pool { NO_POOL, MAX_POOL, AVG_POOL };
enum Charge { LIF_DECAY, LIF, PLIF_DECAY, PLIF, IF, MERGED };  // as ChargeMode in host/neurons.py

constexpr i64 BLOCK_OF_CHANNELS = 16;

// A convolution that is computed as its drives are stepped, in float32: of frames [G, N, channels, height, width], in which
// the padding is, by weights [channels * kh * kw, C], with C filled up to a whole number of BLOCK_OF_CHANNELS.
struct Convolution {
    const float *x, *weights, *bias;  // bias [C] or null
    i64 channels, height, width, kh, kw, sh, sw, dh, dw;
};

// Frames y, residual and their gradients are of `dtype`, out, joined and their gradients of `emits`; all else is of the wide
// dtype of these, float32 or float64.
// A null pointer stands for what there is not. Frames lie in memory as [N, C, H, W], or as [N, H, W, C] (channels_last).
struct Call {
    const void *y, *residual, *scale, *shift, *v0, *linear, *weights;  // [G, frame], [T, frame], [C], [C], frame, [G, 2], [T]
    const void* joined;                                                // [rows, pooled frame], added to out
    const Convolution* convolution;                                    // in the place of y, in channels_last
    void *out, *v;                                                     // [rows, pooled frame], frame
    const void *go, *gv;                                               // gradients of out and v
    void *gy, *g_residual, *gv0;                                       // gradients to y, residual and v0
    void *g_scale, *g_shift, *g_linear, *g_weights;                    // [pieces, C], [pieces, C], [pieces, G, 2], [pieces, T]
    const i64* lengths;                                                // [G] steps on each drive
    i64 drives, steps, group, samples, channels, height, width, last;
    i64 pool, kh, kw, sh, sw, ph, pw, out_height, out_width;
    i64 dtype, emits, mode, hard, surrogate, threads, pieces;
    double tau, rest, threshold, decay, gain;  // decay and gain: of each step's gradient where linear is null
    double keep, rest_gain, h_gain, alpha;     // d v / d h = (fired ? keep : 1) + (rest_gain + h_gain * h) * surrogate'(h)

    i64 frame() const { return samples * channels * height * width; }
    i64 emitted() const { return samples * channels * out_height * out_width; }
    // Planes are a sample's channels, or in channels_last whole samples, whose pixels hold `across` neurons side by side.
    i64 across() const { return last ? channels : 1; }
    i64 planes() const { return last ? samples : samples * channels; }
    i64 row() const { return width * across(); }
    i64 out_row() const { return out_width * across(); }
};
