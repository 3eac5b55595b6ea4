// CUDA on a CPU, as far as this project's kernels need it: blocks one after another, a block's threads as fibers that take
// turns between barriers. The kernel source itself is compiled unchanged.
#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <utility>
#include <vector>

#define SHIM 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct shim_index { unsigned int x, y, z; };
static shim_index blockIdx, threadIdx;
static float* shim_shared;

static inline float __uint_as_float(unsigned int bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline unsigned int __float_as_uint(float x) { unsigned int bits; memcpy(&bits, &x, 4); return bits; }
static inline float shim_half_to_float(unsigned short bits) { _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
static inline unsigned short shim_float_to_half(float x) { _Float16 h = (_Float16)x; unsigned short bits; memcpy(&bits, &h, 2); return bits; }

struct shim_fiber { ucontext_t context; std::vector<char> stack; bool done; };
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

static void shim_run(void (*entry)(void**), int blocks, int threads, size_t shared, void** arguments) {
    std::vector<float> memory(shared / 4 + 1);
    shim_shared = memory.data();
    shim_kernel = entry;
    shim_arguments = arguments;
    shim_fibers.resize(threads);
    for (auto& fiber : shim_fibers) fiber.stack.resize(256 * 1024);
    for (int block = 0; block < blocks; block++) {
        for (auto& x : memory) x = NAN;  // what was not written must not be read
        blockIdx = {(unsigned)block, 0, 0};
        for (auto& fiber : shim_fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
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
    }
}
