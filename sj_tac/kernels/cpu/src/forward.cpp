// `fire`: BatchNorm's affine map -> steps of neurons -> pool -> weighted sums of groups of steps.
//
// Without a pool a neuron's sums are written as it steps. With one, its steps become bits of a word: the maximum over a
// window is the OR of its neurons' words, whatever the window, and the sums are taken from that.
#include "words.h"

Parallel gomp_parallel = nullptr;
EXPORT void use_threads(Parallel p) { gomp_parallel = p; }

// Neurons without a pool, or pooled cells, that a thread takes at a time.
constexpr i64 UNIT = 4096, CELLS = 1024;

// Whole pixels, where their drives are computed as they are stepped.
static i64 neurons_of_unit(const Call& a) { return a.convolution ? UNIT / a.channels * a.channels : UNIT; }
static i64 rows_of_unit(const Call& a) { return std::min(a.out_height, std::max<i64>(1, CELLS / a.out_row())); }

static i64 units_of(const Call& a) {
    if (!a.pool) return (a.frame() + neurons_of_unit(a) - 1) / neurons_of_unit(a);
    return a.planes() * ((a.out_height + rows_of_unit(a) - 1) / rows_of_unit(a));
}

// Weighted sums of the steps in words of pooled cells, `sheet` apart for every BITS steps; N vectors of cells, or n cells.
template <class W, class O, int N>
static inline void emit_block(const Call& a, const typename Vector<W>::Word* words, i64 sheet, i64 to, int n) {
    typedef typename Vector<W>::F F;
    constexpr int L = LANES<W>, BITS = 8 * sizeof(W);
    const W* weights = (const W*)a.weights;
    const int lanes = N > 1 ? L : n;
    O* out = (O*)a.out + to;
    const O* joined = a.joined ? (const O*)a.joined + to : nullptr;
    F sum[N] = {};
    typename Vector<W>::I word[N];
    i64 summed = 0;
    for (i64 t = 0; t < a.steps; t++) {
        if (t % BITS == 0)
            for (int r = 0; r < N; r++) word[r] = load_words<W>(words + t / BITS * sheet + r * L, lanes);
        const W weight = weights ? weights[t] : W(1);
        const auto bit = (typename Vector<W>::Bit)(typename Vector<W>::Word(1) << (t % BITS));
        for (int r = 0; r < N; r++) sum[r] = (word[r] & bit) != 0 ? sum[r] + weight : sum[r];
        if (++summed == a.group || t + 1 == a.steps) {
            for (int r = 0; r < N; r++) {
                store(out + r * L, joined ? sum[r] + load(joined + r * L, lanes) : sum[r], lanes);
                sum[r] = F{};
            }
            out += a.emitted(), summed = 0;
            if (joined) joined += a.emitted();
        }
    }
}

template <class W, class O> static void emit(const Call& a, const typename Vector<W>::Word* words, i64 sheet, i64 m, i64 to) {
    constexpr int L = LANES<W>, B = BLOCK<W>;
    i64 i = 0;
    for (; m - i >= B; i += B) emit_block<W, O, VECTORS>(a, words + i, sheet, to + i, L);
    for (; i < m; i += L) emit_block<W, O, 1>(a, words + i, sheet, to + i, (int)std::min<i64>(L, m - i));
}

// Output rows [o0, o1) of a plane, from the words of the input rows that they look at.
template <class W, class O> struct Pooling {
    typedef typename Vector<W>::Word Word;
    const Call& a;
    const Words<W>& words;
    const i64 sheet;
    Room<Word> pooled;
    Room<W> counts, sums;

    Pooling(const Call& a, const Words<W>& words)
        : a(a), words(words), sheet((rows_of_unit(a) * a.out_row() + 15) / 16 * 16), pooled(sheet * words.sheets),
          counts(a.pool == AVG_POOL ? a.out_row() : 0), sums(a.pool == AVG_POOL ? a.out_row() : 0) {}

    // each(cells, inputs, n, stride): n cells side by side from `cells` on, which look at n inputs `stride` apart.
    template <class Each> void over_window(i64 o, Each each) const {
        const i64 r0 = std::max<i64>(0, o * a.sh - a.ph), r1 = std::min(a.height, o * a.sh - a.ph + a.kh), across = a.across();
        for (i64 r = r0; r < r1; r++)
            for (i64 b = 0; b < a.kw; b++) {
                const i64 q0 = std::max<i64>(0, (a.pw - b + a.sw - 1) / a.sw);
                const i64 q1 = std::min(a.out_width, a.width - 1 + a.pw < b ? 0 : (a.width - 1 + a.pw - b) / a.sw + 1);
                if (q0 >= q1) continue;
                const i64 c = q0 * a.sw - a.pw + b;
                if (across == 1) each(r, q0, c, q1 - q0, a.sw);
                else if (a.sw == 1) each(r, q0 * across, c * across, (q1 - q0) * across, 1);
                else for (i64 q = q0; q < q1; q++) each(r, q * across, (q * a.sw - a.pw + b) * across, across, 1);
            }
    }

    void largest(i64 plane, i64 o0, i64 o1) {
        const i64 cells = (o1 - o0) * a.out_row();
        for (i64 s = 0; s < words.sheets; s++) {
            memset(pooled + s * sheet, 0, cells * sizeof(Word));
            for (i64 o = o0; o < o1; o++)
                over_window(o, [&](i64 r, i64 cell, i64 input, i64 n, i64 stride) {
                    Word* to = pooled + s * sheet + (o - o0) * a.out_row() + cell;
                    const Word* from = words.at(r, s) + input;
                    if (stride == 1) for (i64 i = 0; i < n; i++) to[i] |= from[i];
                    else if (stride == 2) for (i64 i = 0; i < n; i++) to[i] |= from[2 * i];
                    else for (i64 i = 0; i < n; i++) to[i] |= from[stride * i];
                });
        }
        emit<W, O>(a, pooled, sheet, cells, (plane * a.out_height + o0) * a.out_row());
    }

    void mean(i64 plane, i64 o) {
        const i64 cells = a.out_row();
        // Whole numbers stay whole: who reads them divides.
        const W area = std::is_same_v<O, uint8_t> ? W(1) : W(a.kh * a.kw), *weights = (const W*)a.weights;
        const i64 to = (plane * a.out_height + o) * cells;
        O* out = (O*)a.out + to;
        const O* joined = a.joined ? (const O*)a.joined + to : nullptr;
        for (i64 t = 0; t < a.steps; t++) {
            memset(counts, 0, cells * sizeof(W));
            if (t % a.group == 0) memset(sums, 0, cells * sizeof(W));
            const int shift = int(t % words.BITS);
            over_window(o, [&](i64 r, i64 cell, i64 input, i64 n, i64 stride) {
                W* to = counts + cell;
                const Word* from = words.at(r, t / words.BITS) + input;
                if (stride == 1) for (i64 i = 0; i < n; i++) to[i] += W(int(from[i] >> shift & 1));
                else for (i64 i = 0; i < n; i++) to[i] += W(int(from[stride * i] >> shift & 1));
            });
            const W weight = weights ? weights[t] : W(1);
            for (i64 i = 0; i < cells; i++) sums[i] += counts[i] / area * weight;
            if ((t + 1) % a.group && t + 1 != a.steps) continue;
            for (i64 i = 0; i < cells; i += LANES<W>) {
                const int n = (int)std::min<i64>(LANES<W>, cells - i);
                const auto sum = load(sums + i, n);
                store(out + i, joined ? sum + load(joined + i, n) : sum, n);
            }
            out += a.emitted();
            if (joined) joined += a.emitted();
        }
    }
};

// Units [begin, end): of neurons_of_unit neurons, or of rows_of_unit output rows.
template <class S, class O> static void part(const Call& a, i64 begin, i64 end) {
    typedef Wide<S> W;
    const Affine<W> affine(a, BLOCK<W>);
    if (!a.pool) {
        const i64 unit = neurons_of_unit(a), all = std::min(end * unit, a.frame());
        for (i64 at = begin * unit, n; at < all; at += n) {
            n = std::min(all - at, affine.run(at));
            step_in_mode<S, O, true>(a, affine, at, n, affine.place(at), nullptr, 0);
        }
        return;
    }
    const i64 tall = rows_of_unit(a), strips = (a.out_height + tall - 1) / tall;
    Words<W> words(a, (tall - 1) * a.sh + std::max(a.kh, a.sh) + a.sh);
    Pooling<W, O> pooling(a, words);
    for (i64 u = begin; u < end; u++) {
        const i64 plane = u / strips, o0 = u % strips * tall, o1 = std::min(a.out_height, o0 + tall);
        // Rows that no window looks at are stepped, too, for their voltages.
        const i64 r0 = std::max<i64>(0, o0 * a.sh - a.ph), behind = std::max((o1 - 1) * a.sh + a.kh, o1 * a.sh) - a.ph;
        words.template step<S>(a, affine, plane, r0, o1 == a.out_height ? a.height : std::min(a.height, behind));
        if (a.pool == MAX_POOL) pooling.largest(plane, o0, o1);
        else for (i64 o = o0; o < o1; o++) pooling.mean(plane, o);
    }
}

template <class S, class O> static void shared(const Call& a) {
    const i64 units = units_of(a), pieces = std::min(units, a.threads);
    share(pieces, a.threads, [&](i64 p) { part<S, O>(a, units * p / pieces, units * (p + 1) / pieces); });
}

EXPORT void fire_forward(const Call* a) {
    if (a->emits == UINT8) shared<float, uint8_t>(*a);
    else if (a->dtype == FLOAT32) shared<float, float>(*a);
    else if (a->dtype == FLOAT64) shared<double, double>(*a);
    else if (a->dtype == BFLOAT16) shared<bf16, bf16>(*a);
    else shared<f16, f16>(*a);
}
