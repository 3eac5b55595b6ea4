// `aggregate`: weighted sums of groups of frames, out[g] = sum_j weights[g * group + j] x[g * group + j]; and its gradients.
#include "parallel.h"
#include "vectors.h"

// Numbers of a frame that are summed at a time, and over which a weight's gradient is summed by itself.
constexpr i64 PIECE = 1024;

template <class S> static void sum_piece(const S* x, const Wide<S>* weights, S* out, i64 frames, i64 size, i64 group, i64 start) {
    typedef Wide<S> W;
    constexpr int L = LANES<W>;
    const i64 n = std::min(PIECE, size - start);
    for (i64 first = 0; first < frames; first += group, out += size)
        for (i64 i = 0; i < n; i += L) {
            const int lanes = (int)std::min<i64>(L, n - i);
            auto sum = load(x + first * size + start + i, lanes) * weights[first];
            for (i64 t = first + 1; t < std::min(first + group, frames); t++) sum += load(x + t * size + start + i, lanes) * weights[t];
            store(out + start + i, sum, lanes);
        }
}

template <class S>
static void differentiate_piece(
    const S* go, const S* x, const Wide<S>* weights, S* gx, Wide<S>* g_weights, i64 frames, i64 size, i64 group, i64 start
) {
    typedef Wide<S> W;
    constexpr int L = LANES<W>;
    const i64 n = std::min(PIECE, size - start);
    for (i64 t = 0; t < frames; t++) {
        typename Vector<W>::F sum = {};
        const S* given = go + t / group * size + start;
        for (i64 i = 0; i < n; i += L) {
            const int lanes = (int)std::min<i64>(L, n - i);
            const auto g = load(given + i, lanes);
            if (g_weights) sum += g * load(x + t * size + start + i, lanes);
            if (gx) store(gx + t * size + start + i, g * weights[t], lanes);
        }
        if (g_weights) g_weights[t] = sum_of(sum);
    }
}

EXPORT i64 aggregate_pieces(i64 size) { return (size + PIECE - 1) / PIECE; }

template <class S> static void forward(const void* x, const void* weights, void* out, i64 frames, i64 size, i64 group, i64 threads) {
    share(aggregate_pieces(size), threads, [=](i64 p) {
        sum_piece((const S*)x, (const Wide<S>*)weights, (S*)out, frames, size, group, p * PIECE);
    });
}

EXPORT void aggregate_forward(
    const void* x, const void* weights, void* out, i64 frames, i64 size, i64 group, i64 dtype, i64 threads
) {
    const auto run = dtype == FLOAT32 ? forward<float> : dtype == FLOAT64 ? forward<double> : dtype == BFLOAT16 ? forward<bf16>
                     : dtype == FLOAT16 ? forward<f16> : forward<uint8_t>;
    run(x, weights, out, frames, size, group, threads);
}

template <class S>
static void backward(
    const void* go, const void* x, const void* weights, void* gx, void* g_weights, i64 frames, i64 size, i64 group, i64 threads
) {
    typedef Wide<S> W;
    share(aggregate_pieces(size), threads, [=](i64 p) {
        W* sums = g_weights ? (W*)g_weights + p * frames : nullptr;
        differentiate_piece((const S*)go, (const S*)x, (const W*)weights, (S*)gx, sums, frames, size, group, p * PIECE);
    });
}

// g_weights: [pieces, T]. Null for a gradient that nobody wants.
EXPORT void aggregate_backward(
    const void* go, const void* x, const void* weights, void* gx, void* g_weights, i64 frames, i64 size, i64 group, i64 dtype,
    i64 threads
) {
    const auto run = dtype == FLOAT32 ? backward<float> : dtype == FLOAT64 ? backward<double> : dtype == BFLOAT16 ? backward<bf16>
                     : backward<f16>;
    run(go, x, weights, gx, g_weights, frames, size, group, threads);
}
