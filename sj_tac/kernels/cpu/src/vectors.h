// Vectors of neurons: GCC's and Clang's vector types, as wide as the processor that this is compiled for.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

template <class W> struct Vector;
template <> struct Vector<float> {
    typedef float F __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint32_t Word;
    typedef int32_t Bit;
};
template <> struct Vector<double> {
    typedef double F __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint64_t Word;
    typedef int64_t Bit;
};

// Dtype of the arithmetic on numbers that are stored as S.
template <class S> struct WideOf { typedef S type; };
template <> struct WideOf<bf16> { typedef float type; };
template <> struct WideOf<f16> { typedef float type; };
template <> struct WideOf<uint8_t> { typedef float type; };
template <class S> using Wide = typename WideOf<S>::type;
template <class S> using FloatsOf = typename Vector<Wide<S>>::F;

template <class W> constexpr int LANES = VECTOR_BYTES / sizeof(W);

// The first n of the numbers at p, zeros behind them.
template <class W> static inline typename Vector<W>::F load(const W* p, int n) {
    typename Vector<W>::F x = {};
    if (n == LANES<W>) memcpy(&x, p, sizeof x);
    else for (int i = 0; i < n; i++) x[i] = p[i];
    return x;
}

template <class W> static inline void store(W* p, typename Vector<W>::F x, int n) {
    if (n == LANES<W>) memcpy(p, &x, sizeof x);
    else for (int i = 0; i < n; i++) p[i] = x[i];
}

typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 4)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef Vector<float>::F Floats;
typedef Vector<float>::I Ints;

// The bits of n numbers of 16 bits, zeros behind them; and back.
template <class S> static inline Ints load_bits(const S* p, int n) {
    Halves h = {};
    if (n == LANES<float>) memcpy(&h, p, sizeof h);
    else for (int i = 0; i < n; i++) h[i] = p[i].bits;
    return __builtin_convertvector(h, Ints);
}

template <class S> static inline void store_bits(S* p, Ints bits, int n) {
    const Halves h = __builtin_convertvector(bits, Halves);
    if (n == LANES<float>) memcpy(p, &h, sizeof h);
    else for (int i = 0; i < n; i++) p[i].bits = h[i];
}

// A bfloat16 is the upper half of a float32.
static inline Floats load(const bf16* p, int n) { return (Floats)(load_bits(p, n) << 16); }

// Rounds to the nearest, ties to even, as torch does.
static inline void store(bf16* p, Floats x, int n) {
    const Ints bits = (Ints)x;
    Ints upper = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    store_bits(p, x == x ? upper : Ints{} + 0x7fc0, n);
}

// A float16 has 5 bits of exponent, biased by 15, and 10 of mantissa. Not all processors have instructions for it.
static inline Floats load(const f16* p, int n) {
    const Ints bits = load_bits(p, n), rest = (bits & 0x7fff) << 13;
    Ints number = rest + (112 << 23);
    number = rest < 1 << 23 ? (Ints)((Floats)(number + (1 << 23)) - 0x1p-14f) : number;
    return (Floats)((rest >= 0x1f << 23 ? number | 0x7f800000 : number) | (bits & 0x8000) << 16);
}

// Rounds to the nearest, ties to even: a subnormal one where a float32 of a fixed exponent has its last bit.
static inline void store(f16* p, Floats x, int n) {
    const Ints all = (Ints)x, sign = all >> 16 & 0x8000, rest = all & 0x7fffffff;
    const Ints subnormal = (Ints)((Floats)rest + 0.5f) - 0x3f000000;
    const Ints normal = (rest - (112 << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    Ints bits = rest < 113 << 23 ? subnormal : normal;
    bits = rest >= 143 << 23 ? Ints{} + 0x7c00 : bits;
    store_bits(p, (x == x ? bits : Ints{} + 0x7e00) | sign, n);
}

// Whole numbers from 0 to 255: sums of spikes by integer weights.
static inline Floats load(const uint8_t* p, int n) {
    Bytes b = {};
    if (n == LANES<float>) memcpy(&b, p, sizeof b);
    else for (int i = 0; i < n; i++) b[i] = p[i];
    return __builtin_convertvector(__builtin_convertvector(b, Ints), Floats);
}

static inline void store(uint8_t* p, Floats x, int n) {
    const Bytes b = __builtin_convertvector(__builtin_convertvector(x, Ints), Bytes);
    if (n == LANES<float>) memcpy(p, &b, sizeof b);
    else for (int i = 0; i < n; i++) p[i] = b[i];
}

// Words of bits travel as vectors of whole numbers.
template <class W> static inline typename Vector<W>::I load_words(const typename Vector<W>::Word* p, int n) {
    return (typename Vector<W>::I)load((const W*)p, n);
}

template <class W> static inline void store_words(typename Vector<W>::Word* p, typename Vector<W>::I x, int n) {
    store((W*)p, (typename Vector<W>::F)x, n);
}

template <class F> static inline auto sum_of(F x) {
    auto total = x[0];
    for (unsigned i = 1; i < sizeof(F) / sizeof x[0]; i++) total += x[i];
    return total;
}

template <class F> static inline F magnitude(F x) { return x < 0 ? -x : x; }

// What e^x takes of each dtype. A number added to ROUND is rounded to a whole one, which lies in the lowest bits of the sum.
template <class W> struct Exponential;
template <> struct Exponential<float> {
    static constexpr float LEAST = -87, MOST = 88, ROUND = 12582912, LN2_HIGH = 0.693145752f, LN2_LOW = 1.42860677e-6f;
    static constexpr int32_t ROUND_BITS = 0x4b400000, BIAS = 127, MANTISSA = 23, TERMS = 7;
};
template <> struct Exponential<double> {
    static constexpr double LEAST = -708, MOST = 709, ROUND = 6755399441055744.0;
    static constexpr double LN2_HIGH = 0.693147180369123816490, LN2_LOW = 1.90821492927058770002e-10;
    static constexpr int64_t ROUND_BITS = 0x4338000000000000, BIAS = 1023, MANTISSA = 52, TERMS = 13;
};

// e^x within two units in the last place: 2^n e^r with |r| <= ln 2 / 2, and Taylor's series for e^r. It needs no library.
template <class W> static inline typename Vector<W>::F exponential_of(typename Vector<W>::F x) {
    typedef typename Vector<W>::F F;
    typedef typename Vector<W>::I I;
    typedef Exponential<W> E;
    x = x < E::LEAST ? F{} + E::LEAST : x;
    x = x > E::MOST ? F{} + E::MOST : x;
    const F shifted = x * W(1.4426950408889634074) + E::ROUND, n = shifted - E::ROUND;
    const F r = (x - n * E::LN2_HIGH) - n * E::LN2_LOW;
    F p = F{} + W(1);
    for (int k = E::TERMS; k > 0; k--) p = p * r * (W(1) / W(k)) + W(1);
    const I power = ((I)shifted - E::ROUND_BITS + E::BIAS) << E::MANTISSA;
    return p * (F)power;
}

static inline Floats exponential(Floats x) { return exponential_of<float>(x); }
static inline Vector<double>::F exponential(Vector<double>::F x) { return exponential_of<double>(x); }
