// Sums over the threads of a block, in one fixed order.

#ifdef SHIM
#define SHARED float* shared = shim_shared
#else
#define SHARED extern __shared__ __align__(16) float shared[]
#endif

// Where the block's threads count: shared memory, or their part of ``scratch`` where that would be too small.
__device__ __forceinline__ float* tally_of(float* shared, float* scratch, int count) {
    return scratch ? scratch + (long long)blockIdx.x * count * BLOCK : shared;
}

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
