// Number formats and positions, for all kernels. Fixed at compile time by macros, as everything here:
//   IO            0 float, 1 half, 2 bfloat16: frames and their gradients. Arithmetic and state are float.
//   WIDE          positions need 64 bits
//   BLOCK         threads of a block
//   WIDTH_V       numbers side by side that a thread takes at once
//
// No header of the toolkit is included, so that any NVRTC compiles this alone. Compile with --fmad=false: the host rounds
// after every operation, and spikes are to be the same.

#ifdef SHIM  // The same source on a CPU, behind tests/kernels/shim.h.
#define HALF_TO_FLOAT(bits) shim_half_to_float(bits)
#define FLOAT_TO_HALF(value) shim_float_to_half(value)
#define RECIPROCAL(x) (1.0f / (x))
#define ANEW(place)
template <typename pack>
static inline pack fetch(const pack* from) { return *from; }
static inline float first_of_four(const float* h, int stride, float bound, bool* first, bool& any) {
    int at = 0;
    while (at < 4 && !(h[at * stride] >= bound)) at++;
    any = at < 4;
    for (int c = 0; c < 4; c++) first[c] = c == at % 4;
    return h[at % 4 * stride];
}
static inline float plus_below(float h, float bound, float a, float b, float c) { return h >= bound ? c : fmaf(a, b, c); }
#else
// For gradients, which need no correctly rounded division: it would be a dozen instructions and a branch. One instruction,
// to one unit in the last place; 0 where the quotient is below 2^-126.
__device__ __forceinline__ float RECIPROCAL(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
// What is computed of a place is computed behind this, however often it has been before.
#if WIDE
#define ANEW(place) asm volatile("" : "+l"(place))
#else
#define ANEW(place) asm volatile("" : "+r"(place))
#endif
// Side by side in memory that nobody writes while the kernel runs: such loads may go before any store.
template <typename pack>
__device__ __forceinline__ pack fetch(const pack* from) {
    union {
        pack whole;
        unsigned short half;
        unsigned int words[(sizeof(pack) + 3) / 4];
    } it;
    if constexpr (sizeof(pack) == 2) {
        asm("ld.global.nc.u16 %0, [%1];" : "=h"(it.half) : "l"(from));
    } else if constexpr (sizeof(pack) == 4) {
        asm("ld.global.nc.u32 %0, [%1];" : "=r"(it.words[0]) : "l"(from));
    } else if constexpr (sizeof(pack) == 8) {
        asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(it.words[0]), "=r"(it.words[1]) : "l"(from));
    } else {
        static_assert(sizeof(pack) == 16, "no such vector");
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(it.words[0]), "=r"(it.words[1]), "=r"(it.words[2]), "=r"(it.words[3])
            : "l"(from));
    }
    return it.whole;
}
// The first of four numbers that reaches the bound, or the very first where none does; which one; whether any. Each comparison
// gives two predicates: that this number is the first to reach it, and that none has so far.
__device__ __forceinline__ float first_of_four(const float* h, int stride, float bound, bool* first, bool& any) {
    float found;
    unsigned int at[4], none;
    asm("{ .reg .pred p0, p1, p2, p3, n0, n1, n2, n3;\n"
        "setp.ge.f32 p0|n0, %6, %10;\n"
        "setp.ge.and.f32 p1|n1, %7, %10, n0;\n"
        "setp.ge.and.f32 p2|n2, %8, %10, n1;\n"
        "setp.ge.and.f32 p3|n3, %9, %10, n2;\n"
        "or.pred p0, p0, n3;\n"
        "selp.f32 %0, %7, %6, p1;\n"
        "selp.f32 %0, %8, %0, p2;\n"
        "selp.f32 %0, %9, %0, p3;\n"
        "selp.u32 %1, 1, 0, p0;\n"
        "selp.u32 %2, 1, 0, p1;\n"
        "selp.u32 %3, 1, 0, p2;\n"
        "selp.u32 %4, 1, 0, p3;\n"
        "selp.u32 %5, 1, 0, n3; }"
        : "=&f"(found), "=r"(at[0]), "=r"(at[1]), "=r"(at[2]), "=r"(at[3]), "=r"(none)
        : "f"(h[0]), "f"(h[stride]), "f"(h[2 * stride]), "f"(h[3 * stride]), "f"(bound));
#pragma unroll
    for (int c = 0; c < 4; c++) first[c] = at[c];
    any = !none;
    return found;
}
// c + a * b where h is below the bound, or no number; else c. One comparison and one instruction that it guards.
__device__ __forceinline__ float plus_below(float h, float bound, float a, float b, float c) {
    asm("{ .reg .pred below; setp.ltu.f32 below, %1, %2; @below fma.rn.f32 %0, %3, %4, %0; }"
        : "+f"(c)
        : "f"(h), "f"(bound), "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float HALF_TO_FLOAT(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ unsigned short FLOAT_TO_HALF(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

#if IO == 0
typedef float io;
#else
typedef unsigned short io;
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ void put(float& to, float x) { to = x; }
#if IO == 1
__device__ __forceinline__ float to_float(unsigned short x) { return HALF_TO_FLOAT(x); }
__device__ __forceinline__ void put(unsigned short& to, float x) { to = FLOAT_TO_HALF(x); }
#elif IO == 2
__device__ __forceinline__ float to_float(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }
__device__ __forceinline__ void put(unsigned short& to, float x) {  // to nearest, ties to even; a NaN stays one
    // From 9.0 on one instruction, for two numbers where they lie side by side. 8.x has it, but spills more with it.
#if !defined(SHIM) && __CUDA_ARCH__ >= 900
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to) : "f"(x));
#else
    unsigned int bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to = (unsigned short)(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}
#endif

#if WIDE
typedef long long position;
typedef unsigned long long unsigned_position;  // a division without a sign is half the instructions
#else
typedef int position;
typedef unsigned int unsigned_position;
#endif

template <typename number, int length>
struct alignas(sizeof(number) * length) Pack {
    number x[length];
};

// The numbers of a pack. Two of bfloat16 in a word are its halves, each with zeros behind.
template <typename number, int length>
__device__ __forceinline__ void to_floats(const Pack<number, length>& pack, float* x) {
    if constexpr (IO == 2 && sizeof(number) == 2 && length % 2 == 0) {
        union {
            Pack<number, length> whole;
            unsigned int words[(length + 1) / 2];
        } it = {pack};
#pragma unroll
        for (int j = 0; j < length; j++) x[j] = __uint_as_float(j % 2 ? it.words[j / 2] & 0xffff0000u : it.words[j / 2] << 16);
    } else {
#pragma unroll
        for (int j = 0; j < length; j++) x[j] = to_float(pack.x[j]);
    }
}

// What does not change in a call: numbers of the neuron and of the frame. One struct by value, in constant memory.
struct Call {
    float tau, decay, gain, rest, threshold, alpha;
    float threshold_again;        // the same: what is compared with it is compared anew, and not kept
    int groups, steps;            // G and T
    int width, channels, pixels;  // W, C and H*W of a frame
    long long frame, emitted;     // neurons of a frame of y, and numbers of a frame of the output
};
