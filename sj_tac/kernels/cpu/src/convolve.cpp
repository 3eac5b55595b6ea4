// A convolution of few channels, as those of events and images are, for the drives that a tile of neurons steps on next: they
// never come to memory. Alone among the sources this one is compiled with fused multiplication and addition, as convolutions are.
#include "call.h"
#include "vectors.h"
#include <algorithm>

#if defined(__AVX512F__)
constexpr int SIDE = 4;  // most vectors of channels side by side: with PIXELS as many sums as fit into the registers
#else
constexpr int SIDE = 2;
#endif
constexpr int PIXELS = 4;

// Sums of P pixels of a row and n channels, which N vectors hold, from channel q on.
template <int P, int N>
static inline void sum_pixels(const Convolution& o, const float* x, i64 channels, i64 padded, i64 q, i64 n, float* y) {
    constexpr int L = LANES<float>;
    const auto lanes = [n](int r) { return r + 1 < N ? L : int(n - (N - 1) * L); };
    Floats sum[P][N];
    for (int r = 0; r < N; r++) {
        const Floats first = o.bias ? load(o.bias + q + r * L, lanes(r)) : Floats{};
        for (int p = 0; p < P; p++) sum[p][r] = first;
    }
    const float* w = o.weights + q;
    for (i64 i = 0; i < o.channels; i++)
        for (i64 u = 0; u < o.kh; u++)
            for (i64 v = 0; v < o.kw; v++, w += padded) {
                const float* at = x + (i * o.height + u * o.dh) * o.width + v * o.dw;
                Floats by[N];
                for (int r = 0; r < N; r++) by[r] = load(w + r * L, L);
                for (int p = 0; p < P; p++)
                    for (int r = 0; r < N; r++) sum[p][r] += at[p * o.sw] * by[r];
            }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < N; r++) store(y + p * channels + q + r * L, sum[p][r], lanes(r));
}

template <int P> static inline void sum_channels(const Convolution& o, const float* x, i64 channels, i64 padded, float* y) {
    constexpr int L = LANES<float>;
    for (i64 q = 0, n; q < channels; q += n) {
        n = std::min<i64>(SIDE * L, channels - q);
        if (n > 3 * L) sum_pixels<P, 4>(o, x, channels, padded, q, n, y);
        else if (n > 2 * L) sum_pixels<P, 3>(o, x, channels, padded, q, n, y);
        else if (n > L) sum_pixels<P, 2>(o, x, channels, padded, q, n, y);
        else sum_pixels<P, 1>(o, x, channels, padded, q, n, y);
    }
}

// The drives [g, until) of n neurons, from neuron `at` of a frame on, which are whole pixels: y[(g' - g) * n + i].
void convolve(const Call& a, i64 g, i64 until, i64 at, i64 n, float* y) {
    const Convolution& o = *a.convolution;
    const i64 channels = a.channels, padded = (channels + BLOCK_OF_CHANNELS - 1) / BLOCK_OF_CHANNELS * BLOCK_OF_CHANNELS;
    for (; g < until; g++)
        for (i64 pixel = at / channels, end = (at + n) / channels, run; pixel < end; pixel += run) {
            const i64 column = pixel % a.width, row = pixel / a.width % a.height, sample = pixel / a.width / a.height;
            const float* x = o.x + ((g * a.samples + sample) * o.channels * o.height + row * o.sh) * o.width + column * o.sw;
            run = std::min(a.width - column, end - pixel);
            i64 p = 0;
            for (; run - p >= PIXELS; p += PIXELS, y += PIXELS * channels) sum_channels<PIXELS>(o, x + p * o.sw, channels, padded, y);
            for (; p < run; p++, y += channels) sum_channels<1>(o, x + p * o.sw, channels, padded, y);
        }
}
