// The steps of neurons that lie side by side in memory.
#pragma once
#include "neuron.h"
#include "parallel.h"
#include <type_traits>

// Vectors of a block: as many as keep voltages, drives and sums in the processor's registers.
#if defined(__AVX512F__)
constexpr int VECTORS = 8;
#else
constexpr int VECTORS = 4;
#endif
template <class W> constexpr int BLOCK = VECTORS * LANES<W>;

// How many neurons ahead frames are asked for: the drives of a block lie far from each other, and no processor foresees that.
constexpr i64 AHEAD = 256;

template <int WRITE, class T> static inline void ask_for(const T* p, unsigned numbers) {
    for (unsigned k = 0; k < numbers * sizeof(T); k += 64) __builtin_prefetch((const char*)p + k, WRITE, 3);
}

// Neurons that step together, and their state between some drives and the next. Frames lie far from each other, often by a
// power of two, so that their lines push each other out of the nearest cache where many frames are read or written in turn.
constexpr i64 TILE = 512, DRIVES = 4;
template <class W> struct Tile {
    W v[TILE], sum[TILE];
};

// Drives of a neuron: where they lie, and how far apart.
template <class S> struct Drives {
    const S* at;
    i64 stride;
};

// Steps on the drives [g, until) of N vectors, or of n neurons where N is 1: neuron i of the tile, `at` of the frame, c of the
// affine map. t: the first step; summed: how many steps the sums have.
// DIRECT: writes weighted sums of spikes, or the spikes; else writes bits of words, `sheet` apart for every BITS steps.
template <class S, class O, int MODE, bool ZERO, bool DIRECT, int N>
static inline void step_block(
    const Call& a, const Affine<Wide<S>>& affine, Tile<Wide<S>>& tile, Drives<S> drives, i64 g, i64 until, i64 t, i64 summed, O* out,
    i64 i, i64 at, i64 c, int n, typename Vector<Wide<S>>::Word* words, i64 sheet
) {
    typedef Wide<S> W;
    typedef typename Vector<W>::F F;
    typedef typename Vector<W>::I I;
    constexpr int L = LANES<W>, BITS = 8 * sizeof(W);
    const i64 frame = a.frame(), group = a.group, steps = a.steps, *lengths = a.lengths;
    const S *y = drives.at + i, *residual = (const S*)a.residual;
    const O* joined = (const O*)a.joined;
    const W* weights = (const W*)a.weights;
    Neuron<W, MODE, ZERO> neuron(a);
    out += at;
    const int lanes = N > 1 ? L : n;
    F v[N], x[N], sum[N];
    I word[N];
    for (int r = 0; r < N; r++) {
        v[r] = load(tile.v + i + r * L, lanes), word[r] = I{};
        sum[r] = DIRECT && summed ? load(tile.sum + i + r * L, lanes) : F{};
    }
    for (; g < until; g++, y += drives.stride) {
        ask_for<0>(y + AHEAD, N * L);
        neuron.on_drive(a, g);
        for (int r = 0; r < N; r++) {
            x[r] = load(y + r * L, lanes);
            if (!affine.scale) continue;
            if (affine.along) x[r] = x[r] * load(affine.scale + c + r * L, lanes) + load(affine.shift + c + r * L, lanes);
            else x[r] = x[r] * affine.scale[c] + affine.shift[c];
        }
        for (i64 j = lengths[g]; j; j--, t++) {
            const W weight = DIRECT && weights ? weights[t] : W(1);
            const auto bit = (typename Vector<W>::Bit)(typename Vector<W>::Word(1) << (t % BITS));
            const S* more = residual ? residual + t * frame + at : nullptr;
            for (int r = 0; r < N; r++) {
                const F h = neuron.charged(more ? x[r] + load(more + r * L, lanes) : x[r], v[r]);
                const I fired = neuron.fires(h);
                v[r] = neuron.reset(h, fired);
                if (DIRECT) sum[r] = fired ? sum[r] + weight : sum[r];
                else word[r] |= fired & bit;
            }
            if (DIRECT && (++summed == group || t + 1 == steps)) {
                ask_for<1>(out + AHEAD, N * L);
                const O* more = joined ? joined + (out - (O*)a.out) : nullptr;
                for (int r = 0; r < N; r++) {
                    store(out + r * L, more ? sum[r] + load(more + r * L, lanes) : sum[r], lanes);
                    sum[r] = F{};
                }
                out += frame, summed = 0;
            }
            if (!DIRECT && ((t + 1) % BITS == 0 || t + 1 == steps)) {
                for (int r = 0; r < N; r++) store_words<W>(words + r * L, word[r], lanes), word[r] = I{};
                words += sheet;
            }
        }
    }
    for (int r = 0; r < N; r++) {
        store(tile.v + i + r * L, v[r], lanes);
        if (DIRECT && summed) store(tile.sum + i + r * L, sum[r], lanes);
    }
}

// Computes the drives [g, until) of n neurons, from neuron `at` of a frame on: y[(g' - g) * n + i]. In convolve.cpp.
extern void convolve(const Call& a, i64 g, i64 until, i64 at, i64 n, float* y);

// All steps of m neurons side by side, from neuron `at` of a frame on; c: its place in the affine map.
template <class S, class O, int MODE, bool ZERO, bool DIRECT>
static void run_forward(
    const Call& a, const Affine<Wide<S>>& affine, i64 at, i64 m, i64 c, typename Vector<Wide<S>>::Word* words, i64 sheet
) {
    typedef Wide<S> W;
    constexpr int L = LANES<W>, B = BLOCK<W>;
    Tile<W> tile;
    // Whole pixels, where their drives are computed here.
    const i64 whole = a.convolution ? TILE / a.channels * a.channels : TILE;
    const Room<S> computed(a.convolution ? whole * (DIRECT ? DRIVES : a.drives) : 0);
    for (i64 begin = 0; begin < m; begin += whole, c = affine.along ? (c + whole) % affine.period : c) {
        const i64 n = std::min(whole, m - begin), start = at + begin;
        if (a.v0) memcpy(tile.v, (const W*)a.v0 + start, n * sizeof(W));
        else for (i64 i = 0; i < n; i++) tile.v[i] = W(a.rest);
        for (i64 g = 0, t = 0, until; g < a.drives; g = until) {
            until = DIRECT ? std::min(a.drives, g + DRIVES) : a.drives;
            O* out = DIRECT ? (O*)a.out + t / a.group * a.frame() : nullptr;
            Drives<S> drives{(const S*)a.y + g * a.frame() + start, a.frame()};
            if constexpr (std::is_same_v<S, float>)
                if (a.convolution) convolve(a, g, until, start, n, computed), drives = {computed, n};
            const i64 summed = t % a.group;
            i64 i = 0, channel = c;
            const auto step = [&](auto vectors, int lanes) {
                constexpr int N = decltype(vectors)::value;
                step_block<S, O, MODE, ZERO, DIRECT, N>(
                    a, affine, tile, drives, g, until, t, summed, out, i, start + i, channel, lanes, DIRECT ? nullptr : words + begin + i, sheet);
                i += N * L;
                if (affine.along && (channel += N * L) >= affine.period) channel %= affine.period;
            };
            while (n - i >= B) step(std::integral_constant<int, VECTORS>{}, L);
            while (n - i >= L) step(std::integral_constant<int, 1>{}, L);
            if (i < n) step(std::integral_constant<int, 1>{}, int(n - i));
            for (i64 d = g; d < until; d++) t += a.lengths[d];
        }
        if (a.v) memcpy((W*)a.v + start, tile.v, n * sizeof(W));
    }
}

template <class S, class O, bool DIRECT, int MODE>
static void step_with_reset(
    const Call& a, const Affine<Wide<S>>& affine, i64 at, i64 m, i64 c, typename Vector<Wide<S>>::Word* words, i64 sheet
) {
    if (a.hard && a.rest == 0 && !std::signbit(a.rest)) run_forward<S, O, MODE, true, DIRECT>(a, affine, at, m, c, words, sheet);
    else run_forward<S, O, MODE, false, DIRECT>(a, affine, at, m, c, words, sheet);
}

// run_forward of the call's neuron.
template <class S, class O, bool DIRECT>
static void step_in_mode(
    const Call& a, const Affine<Wide<S>>& affine, i64 at, i64 m, i64 c, typename Vector<Wide<S>>::Word* words, i64 sheet
) {
    switch (a.mode) {
        case LIF_DECAY: return step_with_reset<S, O, DIRECT, LIF_DECAY>(a, affine, at, m, c, words, sheet);
        case LIF: return step_with_reset<S, O, DIRECT, LIF>(a, affine, at, m, c, words, sheet);
        case PLIF_DECAY: return step_with_reset<S, O, DIRECT, PLIF_DECAY>(a, affine, at, m, c, words, sheet);
        case PLIF: return step_with_reset<S, O, DIRECT, PLIF>(a, affine, at, m, c, words, sheet);
        case IF: return step_with_reset<S, O, DIRECT, IF>(a, affine, at, m, c, words, sheet);
        default: return step_with_reset<S, O, DIRECT, MERGED>(a, affine, at, m, c, words, sheet);
    }
}
