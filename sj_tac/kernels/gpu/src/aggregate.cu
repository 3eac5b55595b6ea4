// aggregate: weighted sums of GROUP frames of size numbers each, and their gradients.

extern "C" __global__ void __launch_bounds__(BLOCK) aggregate_forward(
    const io* __restrict__ x, const float* __restrict__ weights, io* __restrict__ out, int frames, long long size) {
    const position i = ((position)blockIdx.x * BLOCK + threadIdx.x) * WIDTH_V;
    if (i >= size) return;
    float sums[WIDTH_V];
    int summed = 0;
    for (int t = 0; t < frames; t++) {
        const Pack<io, WIDTH_V> pack = *(const Pack<io, WIDTH_V>*)(x + t * (position)size + i);
        const float w = weights[t];
#pragma unroll
        for (int j = 0; j < WIDTH_V; j++) sums[j] = summed ? sums[j] + to_float(pack.x[j]) * w : to_float(pack.x[j]) * w;
        if (++summed == GROUP || t == frames - 1) {
            Pack<io, WIDTH_V> sum;
#pragma unroll
            for (int j = 0; j < WIDTH_V; j++) put(sum.x[j], sums[j]);
            *(Pack<io, WIDTH_V>*)(out + t / GROUP * (position)size + i) = sum;
            summed = 0;
        }
    }
}

// gx and partial may be null: not wanted. partial: [blocks][frames].
extern "C" __global__ void __launch_bounds__(BLOCK) aggregate_backward(
    const io* __restrict__ go, const io* __restrict__ x, const float* __restrict__ weights, io* __restrict__ gx,
    float* __restrict__ partial, float* scratch, int frames, long long size, int rounds) {
    SHARED;
    const int sums = partial ? frames : 0;
    float* tally = tally_of(shared, scratch, sums);  // [frames][BLOCK] where partial is wanted
    for (int t = 0; t < sums; t++) tally[t * BLOCK + threadIdx.x] = 0.0f;
    for (int r = 0; r < rounds; r++) {
        const position i = (((position)blockIdx.x * rounds + r) * BLOCK + threadIdx.x) * WIDTH_V;
        if (i >= size) continue;
        for (int t = 0; t < frames; t++) {
            const Pack<io, WIDTH_V> gradient = *(const Pack<io, WIDTH_V>*)(go + t / GROUP * (position)size + i);
            if (gx) {
                Pack<io, WIDTH_V> pack;
#pragma unroll
                for (int j = 0; j < WIDTH_V; j++) put(pack.x[j], to_float(gradient.x[j]) * weights[t]);
                *(Pack<io, WIDTH_V>*)(gx + t * (position)size + i) = pack;
            }
            if (sums) {
                const Pack<io, WIDTH_V> pack = *(const Pack<io, WIDTH_V>*)(x + t * (position)size + i);
#pragma unroll
                for (int j = 0; j < WIDTH_V; j++) tally[t * BLOCK + threadIdx.x] += to_float(gradient.x[j]) * to_float(pack.x[j]);
            }
        }
    }
    sum_over_block(tally, sums, partial + (position)blockIdx.x * sums);
}
