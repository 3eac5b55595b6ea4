// CUDA on a CPU, as far as this project's kernels need it: blocks one after another, a block's threads as fibers that take
// turns between barriers. The kernel source itself is compiled unchanged.
#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define SHIM 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct shim_index { unsigned int x, y, z; };
static shim_index blockIdx, threadIdx;
static float* shim_shared;

static inline float __uint_as_float(unsigned int bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline unsigned int __float_as_uint(float x) { unsigned int bits; memcpy(&bits, &x, 4); return bits; }
static inline float shim_half_to_float(unsigned short bits) { _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
static inline unsigned short shim_float_to_half(float x) { _Float16 h = (_Float16)x; unsigned short bits; memcpy(&bits, &h, 2); return bits; }

struct shim_fiber { ucontext_t context; bool done; };
static const size_t SHIM_STACK = 256 * 1024;
static std::vector<shim_fiber> shim_fibers;
static ucontext_t shim_scheduler;
static unsigned int shim_current;
static void (*shim_kernel)(void**);
static void** shim_arguments;

static inline void __syncthreads() { swapcontext(&shim_fibers[shim_current].context, &shim_scheduler); }

static void shim_thread() {
    shim_kernel(shim_arguments);
    shim_fibers[shim_current].done = true;
    swapcontext(&shim_fibers[shim_current].context, &shim_scheduler);
}

template <auto kernel, typename... Arguments, size_t... index>
static void shim_call(void (*)(Arguments...), void** arguments, std::index_sequence<index...>) {
    kernel(*(Arguments*)arguments[index]...);
}
template <auto kernel, typename... Arguments>
static void shim_unpack(void (*pointer)(Arguments...), void** arguments) {
    shim_call<kernel>(pointer, arguments, std::index_sequence_for<Arguments...>());
}
template <auto kernel>
static void shim_entry(void** arguments) { shim_unpack<kernel>(kernel, arguments); }

// A kernel's parameters, one letter and a size each: p pointer, i integer, f floating point, s struct.
template <typename T>
static constexpr char shim_kind() {
    return std::is_pointer_v<T> ? 'p' : std::is_integral_v<T> ? 'i' : std::is_floating_point_v<T> ? 'f' : 's';
}
template <typename... Arguments>
static int shim_describe(void (*)(Arguments...), char* kinds, int* sizes) {
    int count = 0;
    ((kinds[count] = shim_kind<Arguments>(), sizes[count++] = (int)sizeof(Arguments)), ...);
    return count;
}

// Behind a block's shared memory lies more that nobody may write.
static const size_t SHIM_GUARD = 64;

// 0, or the number of a block, from 1, that wrote past its shared memory.
static int shim_run(void (*entry)(void**), int blocks, int threads, size_t shared, void** arguments) {
    const size_t held = shared / 4;
    std::vector<float> memory(held + SHIM_GUARD);
    shim_shared = memory.data();
    shim_kernel = entry;
    shim_arguments = arguments;
    shim_fibers.resize(threads);
    // Not written in advance, and given back: 64 MB a kernel, of which a few pages are used.
    const std::unique_ptr<char[]> stacks(new char[threads * SHIM_STACK]);
    for (int block = 0; block < blocks; block++) {
        for (auto& x : memory) x = NAN;  // what was not written must not be read
        for (size_t i = held; i < memory.size(); i++) memory[i] = 12345.0f;
        blockIdx = {(unsigned)block, 0, 0};
        for (int i = 0; i < threads; i++) {
            auto& fiber = shim_fibers[i];
            getcontext(&fiber.context);
            fiber.context.uc_stack = {stacks.get() + i * SHIM_STACK, 0, SHIM_STACK};
            fiber.context.uc_link = nullptr;
            fiber.done = false;
            makecontext(&fiber.context, shim_thread, 0);
        }
        for (size_t left = threads; left;)
            for (int i = 0; i < threads; i++) {
                if (shim_fibers[i].done) continue;
                shim_current = i;
                threadIdx = {(unsigned)i, 0, 0};
                swapcontext(&shim_scheduler, &shim_fibers[i].context);
                left -= shim_fibers[i].done;
            }
        for (size_t i = held; i < memory.size(); i++)
            if (memory[i] != 12345.0f) return block + 1;
    }
    return 0;
}
