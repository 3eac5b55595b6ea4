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
#define QUOTIENT(a, b) ((a) / (b))
#else
// For gradients, which need no correctly rounded division: it would be a dozen instructions and a branch.
#define QUOTIENT(a, b) __fdividef(a, b)
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
    unsigned int bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to = (unsigned short)(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#endif

#if WIDE
typedef long long position;
#else
typedef int position;
#endif

template <typename number, int count>
struct alignas(sizeof(number) * count) Pack {
    number x[count];
};

// What does not change in a call: numbers of the neuron and of the frame. One struct by value, in constant memory.
struct Call {
    float tau, decay, gain, rest, threshold, alpha;
    int groups, steps;            // G and T
    int detach;                   // detach_reset
    int width, channels, pixels;  // W, C and H*W of a frame
    long long frame, emitted;     // neurons of a frame of y, and numbers of a frame of the output
};
