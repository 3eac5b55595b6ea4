// Sums over the threads of a block, in one fixed order.

#ifdef SHIM
#define SHARED_TALLY float* tally = shim_shared
#else
#define SHARED_TALLY extern __shared__ float tally[]
#endif

// The threads' numbers values[i * BLOCK + thread], i < count, each summed over the whole block, to partial[i].
__device__ __forceinline__ void sum_over_block(float* values, int count, float* partial) {
    const int thread = threadIdx.x;
    __syncthreads();
    for (int width = BLOCK / 2; width > 0; width /= 2) {
        for (int i = 0; i < count; i++)
            if (thread < width) values[i * BLOCK + thread] += values[i * BLOCK + thread + width];
        __syncthreads();
    }
    for (int i = thread; i < count; i += BLOCK) partial[i] = values[i * BLOCK];
    __syncthreads();
}
