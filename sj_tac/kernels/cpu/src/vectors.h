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

typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef Vector<float>::F Floats;
typedef Vector<float>::I Ints;

// A bfloat16 is the upper half of a float32.
static inline Floats load(const bf16* p, int n) {
    Halves h = {};
    if (n == LANES<float>) memcpy(&h, p, sizeof h);
    else for (int i = 0; i < n; i++) h[i] = p[i].bits;
    return (Floats)(__builtin_convertvector(h, Ints) << 16);
}

// Rounds to the nearest, ties to even, as torch does.
static inline void store(bf16* p, Floats x, int n) {
    const Ints bits = (Ints)x;
    Ints upper = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    upper = x == x ? upper : Ints{} + 0x7fc0;
    const Halves h = __builtin_convertvector(upper, Halves);
    if (n == LANES<float>) memcpy(p, &h, sizeof h);
    else for (int i = 0; i < n; i++) p[i].bits = h[i];
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

// e^x within two units in the last place: 2^n e^r with |r| <= ln 2 / 2, and a polynomial for e^r.
static inline Floats exponential(Floats x) {
    x = x < -87.3f ? Floats{} - 87.3f : x;
    x = x > 88.0f ? Floats{} + 88.0f : x;
    const Floats shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    const Floats n = shifted - 12582912.0f;
    const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Floats p = Floats{} + 1.0f / 5040;
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
    const Ints power = ((Ints)shifted - 0x4b400000 + 127) << 23;
    return p * (Floats)power;
}

static inline Vector<double>::F exponential(Vector<double>::F x) {
    for (int i = 0; i < LANES<double>; i++) x[i] = std::exp(x[i]);
    return x;
}
