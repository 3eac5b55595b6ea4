// Gradients of `fire` from its drives and first voltages alone: a block's steps are run again, and then walked back.
//
// The gradient of a spike comes from the windows that the neuron lies in. A maximum gives it to the first neuron that fires,
// in the order of rows, or to the very first where none does, as torch's MaxPool2d; a mean gives it to all of them alike.
#include "windows.h"

// Neurons of a unit; with a pool, more, because of the rows above and below that their windows look at.
constexpr i64 UNIT = 4096, POOLED_UNIT = 32768, MOST_PIECES = 64;

static i64 rows_of_unit(const Call& a) {
    return std::min(a.height, std::max<i64>(1, POOLED_UNIT / a.row()));
}

static i64 units_of(const Call& a) {
    if (!a.pool) return (a.frame() + UNIT - 1) / UNIT;
    return a.planes() * ((a.height + rows_of_unit(a) - 1) / rows_of_unit(a));
}

// How many sums of gradients there are: of each piece of the frame one. It does not depend on how many threads there are.
EXPORT i64 backward_pieces(const Call* a) { return std::min(units_of(*a), MOST_PIECES); }

// Sums of gradients over the neurons of a piece, lane by lane.
template <class W> struct Sums {
    typedef typename Vector<W>::F F;
    const Affine<W>& affine;
    const i64 n;
    F scale = {}, shift = {};  // of one channel
    Room<W> scales, shifts;    // of each place of an affine map along the neurons, or of each channel
    Room<F> linear, weights;
    Sums(const Call& a, const Affine<W>& affine, i64 block)
        : affine(affine), n(affine.along ? affine.period + block : a.channels), scales(n), shifts(n), linear(2 * a.drives),
          weights(a.steps) {
        for (i64 i = 0; i < n; i++) scales[i] = shifts[i] = 0;
        for (i64 g = 0; g < 2 * a.drives; g++) linear[g] = F{};
        for (i64 t = 0; t < a.steps; t++) weights[t] = F{};
    }

    void add(i64 c, F by_scale, F by_shift, int lanes) {
        if (!affine.along) {
            scale += by_scale, shift += by_shift;
            return;
        }
        store(scales + c, load(scales + c, lanes) + by_scale, lanes);
        store(shifts + c, load(shifts + c, lanes) + by_shift, lanes);
    }

    void put_channel(i64 c) {
        scales[c] += sum_of(scale), shifts[c] += sum_of(shift);
        scale = shift = F{};
    }

    void put(const Call& a, i64 piece) {
        W *g_scale = (W*)a.g_scale, *g_shift = (W*)a.g_shift, *g_linear = (W*)a.g_linear, *g_weights = (W*)a.g_weights;
        for (i64 i = 0; g_scale && i < n; i++) {
            const i64 c = affine.along ? i % affine.period / affine.map : i;
            g_scale[piece * a.channels + c] += scales[i], g_shift[piece * a.channels + c] += shifts[i];
        }
        for (i64 g = 0; g_linear && g < 2 * a.drives; g++) g_linear[piece * 2 * a.drives + g] = sum_of(linear[g]);
        for (i64 t = 0; g_weights && t < a.steps; t++) g_weights[piece * a.steps + t] = sum_of(weights[t]);
    }
};

// What a block keeps of every step: voltages before the reset, slopes of the spikes, and their gradients.
template <class W> struct Steps {
    typedef typename Vector<W>::F F;
    Room<F> h, slope, given;
    explicit Steps(i64 vectors) : h(vectors), slope(vectors), given(vectors) {}
};

// A block of N vectors, or of n neurons where N is 1.
template <class S, int N> struct Block {
    typedef Wide<S> W;
    typedef typename Vector<W>::F F;
    typedef typename Vector<W>::I I;
    static constexpr int L = LANES<W>, BITS = 8 * sizeof(W);
    const Call& a;
    const Affine<W>& affine;
    const Steps<W>& steps;
    const i64 at, c;
    const int n;

    int lanes() const { return N > 1 ? L : n; }
    F scale(int r) const { return affine.along ? load(affine.scale + c + r * L, lanes()) : F{} + affine.scale[c]; }
    F shift(int r) const { return affine.along ? load(affine.shift + c + r * L, lanes()) : F{} + affine.shift[c]; }
    F y(i64 g, int r) const { return load((const S*)a.y + g * a.frame() + at + r * L, lanes()); }
    F start(int r) const { return a.v0 ? load((const W*)a.v0 + at + r * L, lanes()) : F{} + W(a.rest); }
    F residual(i64 t, int r) const { return load((const S*)a.residual + t * a.frame() + at + r * L, lanes()); }
    void read(i64 g, F (&x)[N]) const {
        for (int r = 0; r < N; r++) x[r] = affine.scale ? y(g, r) * scale(r) + shift(r) : y(g, r);
    }

    template <int MODE> void forward() const {
        Neuron<W, MODE, false> neuron(a);
        F v[N], x[N], *h = steps.h;
        for (int r = 0; r < N; r++) v[r] = start(r);
        i64 t = 0;
        for (i64 g = 0; g < a.drives; g++) {
            neuron.on_drive(a, g);
            read(g, x);
            for (i64 j = a.lengths[g]; j; j--, t++, h += N)
                for (int r = 0; r < N; r++) {
                    h[r] = neuron.charged(a.residual ? x[r] + residual(t, r) : x[r], v[r]);
                    v[r] = neuron.reset(h[r], neuron.fires(h[r]));
                }
        }
    }

    void forward_in_mode() const {
        switch (a.mode) {
            case LIF_DECAY: return forward<LIF_DECAY>();
            case LIF: return forward<LIF>();
            case PLIF_DECAY: return forward<PLIF_DECAY>();
            case PLIF: return forward<PLIF>();
            case IF: return forward<IF>();
            default: return forward<MERGED>();
        }
    }

    // Gradients of the spikes, and where a weight wants its own: that of its step, before it is multiplied.
    template <int POOL> void of_spikes(const Windows<S>& windows, i64 offset, F* by_weight) const {
        const W *weights = (const W*)a.weights, area = W(a.kh * a.kw), threshold = W(a.threshold);
        for (int s = 0; s < windows.n; s++) {
            const auto& window = windows.window[s];
            const auto* takes = POOL == MAX_POOL ? window.takes + offset : nullptr;
            const S* go = window.go + offset;
            F* given = steps.given;
            i64 in_group = 0;
            for (i64 t = 0; t < a.steps; t++, given += N) {
                const W weight = weights ? weights[t] : W(1);
                const auto bit = (typename Vector<W>::Bit)(typename Vector<W>::Word(1) << (t % BITS));
                for (int r = 0; r < N; r++) {
                    F g = load(go + r * L, lanes());
                    if (POOL == MAX_POOL) g = (load_words<W>(takes + r * L, lanes()) & bit) != 0 ? g : F{};
                    if (POOL == AVG_POOL && by_weight) g = g / area;
                    if (by_weight) by_weight[t] += steps.h[t * N + r] >= threshold ? g : F{};
                    g = POOL == AVG_POOL && !by_weight ? g * weight / area : g * weight;
                    given[r] = s ? given[r] + g : g;
                }
                if (POOL == MAX_POOL && (t + 1) % BITS == 0) takes += windows.sheet;
                if (++in_group == a.group) go += windows.row, in_group = 0;
            }
        }
        for (i64 i = 0; windows.n == 0 && i < a.steps * N; i++) steps.given[i] = F{};
    }

    // EXTRA: also gradients to the residual and to the numbers of steps.
    template <bool EXTRA> void backward(Sums<W>& sums) const {
        const W keep = W(a.keep), rest_gain = W(a.rest_gain), h_gain = W(a.h_gain), threshold = W(a.threshold), rest = W(a.rest);
        const W* linear = (const W*)a.linear;
        const bool mapped = affine.scale;
        const F *h = steps.h + a.steps * N, *slope = steps.slope + a.steps * N, *given = steps.given + a.steps * N;
        F carry[N], x[N], by_scale[N], by_shift[N];
        for (int r = 0; r < N; r++) {
            carry[r] = a.gv ? load((const W*)a.gv + at + r * L, lanes()) : F{};
            by_scale[r] = by_shift[r] = F{};
        }
        i64 t = a.steps;
        for (i64 g = a.drives - 1; g >= 0; g--) {
            const W beta = linear ? linear[2 * g] : W(a.decay), gamma = linear ? linear[2 * g + 1] : W(a.gain);
            if (EXTRA) read(g, x);
            F gx[N], by_beta = {}, by_gamma = {};
            for (int r = 0; r < N; r++) gx[r] = F{};
            for (i64 j = a.lengths[g]; j; j--) {
                t--, h -= N, slope -= N, given -= N;
                for (int r = 0; r < N; r++) {
                    const F kept = (h[r] >= threshold ? F{} + keep : F{} + W(1)) + (rest_gain + h_gain * h[r]) * slope[r];
                    carry[r] = given[r] * slope[r] + carry[r] * kept;
                    const F to_drive = carry[r] * gamma;
                    if (EXTRA && a.g_linear) {
                        const F last = h[r - (t ? N : 0)], reset = a.hard ? F{} + rest : last - threshold;
                        const F before = t ? (last >= threshold ? reset : last) : start(r);
                        by_beta += carry[r] * (before - rest);
                        by_gamma += carry[r] * (a.residual ? x[r] + residual(t, r) : x[r]);
                    }
                    if (EXTRA && a.g_residual) store((S*)a.g_residual + t * a.frame() + at + r * L, to_drive, lanes());
                    gx[r] += to_drive, carry[r] *= beta;
                }
            }
            if (EXTRA) sums.linear[2 * g] += by_beta, sums.linear[2 * g + 1] += by_gamma;
            for (int r = 0; r < N; r++) {
                if (mapped) by_shift[r] += gx[r], by_scale[r] += gx[r] * y(g, r), gx[r] *= scale(r);
                store((S*)a.gy + g * a.frame() + at + r * L, gx[r], lanes());
            }
        }
        for (int r = 0; r < N; r++) {
            if (a.gv0) store((W*)a.gv0 + at + r * L, carry[r], lanes());
            if (mapped) sums.add(c + r * L, by_scale[r], by_shift[r], lanes());
        }
    }

    void run(const Windows<S>& windows, i64 offset, Sums<W>& sums) const {
        forward_in_mode();
        F* by_weight = a.g_weights ? (F*)sums.weights : nullptr;
        if (a.pool == MAX_POOL) of_spikes<MAX_POOL>(windows, offset, by_weight);
        else if (a.pool == AVG_POOL) of_spikes<AVG_POOL>(windows, offset, by_weight);
        else of_spikes<NO_POOL>(windows, offset, by_weight);
        slopes(a.surrogate, W(a.alpha), W(a.threshold), (const F*)steps.h, (F*)steps.slope, a.steps * N);
        if (a.g_linear || a.g_residual) backward<true>(sums);
        else backward<false>(sums);
    }
};

constexpr int BACK_VECTORS = 8;

// Gradients of m neurons side by side, from neuron `at` of a frame on; c: its place in the affine map.
template <class S>
static void run_backward(
    const Call& a, const Affine<Wide<S>>& affine, const Steps<Wide<S>>& steps, Sums<Wide<S>>& sums, i64 at, i64 m, i64 c,
    const Windows<S>& windows
) {
    typedef Wide<S> W;
    constexpr int L = LANES<W>, B = BACK_VECTORS * L;
    const auto channel = [&](i64 i) { return affine.along ? (c + i) % affine.period : c; };
    i64 i = 0;
    for (; m - i >= B; i += B) Block<S, BACK_VECTORS>{a, affine, steps, at + i, channel(i), L}.run(windows, i, sums);
    for (; m - i >= 2 * L; i += 2 * L) Block<S, 2>{a, affine, steps, at + i, channel(i), L}.run(windows, i, sums);
    for (; i < m; i += L) {
        const int n = (int)std::min<i64>(L, m - i);
        Block<S, 1>{a, affine, steps, at + i, channel(i), n}.run(windows, i, sums);
    }
    if (affine.scale && !affine.along) sums.put_channel(c);
}

template <class S> static void part(const Call& a, i64 piece, i64 begin, i64 end) {
    typedef Wide<S> W;
    constexpr i64 B = std::max(BACK_VECTORS, VECTORS) * LANES<W>;
    const i64 tall = rows_of_unit(a), strips = (a.height + tall - 1) / tall, row = a.row();
    const Affine<W> affine(a, B);
    const Steps<W> steps(a.steps * BACK_VECTORS);
    Sums<W> sums(a, affine, B);
    Call again = a;  // for the words alone
    again.v = nullptr;
    Words<W> words(again, a.pool == MAX_POOL ? tall + 2 * a.kh : 0);
    Unpooling<S> unpooling(a, words);
    Windows<S> windows(unpooling.down * unpooling.beside);
    if (!a.pool) {
        const i64 all = std::min(end * UNIT, a.frame());
        windows.n = 1, windows.row = a.frame();
        for (i64 at = begin * UNIT, n; at < all; at += n) {
            n = std::min(all - at, affine.run(at));
            windows.window[0] = {(const S*)a.go + at, nullptr};
            run_backward(a, affine, steps, sums, at, n, affine.place(at), windows);
        }
    }
    for (i64 u = begin; a.pool && u < end; u++) {
        const i64 plane = u / strips, r0 = u % strips * tall, r1 = std::min(a.height, r0 + tall);
        if (a.pool == MAX_POOL) {
            const i64 top = std::min(r0, unpooling.first_window(r0) * a.sh - a.ph);
            const i64 bottom = std::max(r1, unpooling.last_window(r1 - 1) * a.sh - a.ph + a.kh);
            words.template step<S>(again, affine, plane, std::max<i64>(0, top), std::min(a.height, bottom));
        }
        unpooling.begin(plane, r0);
        for (i64 r = r0, rows; r < r1; r += rows) {
            rows = std::min(unpooling.together, r1 - r);
            unpooling.look(rows);
            const i64 runs = a.last ? a.width : 1, m = a.last ? a.channels : rows * a.width;
            for (i64 i = 0; i < runs; i++) {
                unpooling.windows_of(i, windows);
                const i64 at = (plane * a.height + r) * row + i * m;
                run_backward(a, affine, steps, sums, at, m, affine.place(at), windows);
            }
        }
    }
    sums.put(a, piece);
}

template <class S> static void shared(const Call& a) {
    const i64 units = units_of(a);
    share(a.pieces, a.threads, [&](i64 p) { part<S>(a, p, units * p / a.pieces, units * (p + 1) / a.pieces); });
}

EXPORT void fire_backward(const Call* a) {
    if (a->dtype == FLOAT32) shared<float>(*a);
    else if (a->dtype == FLOAT64) shared<double>(*a);
    else if (a->dtype == BFLOAT16) shared<bf16>(*a);
    else shared<f16>(*a);
}
