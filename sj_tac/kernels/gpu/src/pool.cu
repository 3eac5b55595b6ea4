// Pools other than 2x2, behind fire_forward with MASKS: spikes as bits -> pool -> frames, or weighted sums of GROUP steps.

extern "C" __global__ void __launch_bounds__(BLOCK) fire_pool(
    const unsigned int* __restrict__ masks, const float* __restrict__ weights, io* __restrict__ out, Call call) {
    const position slot = (position)blockIdx.x * BLOCK + threadIdx.x;
    if (slot >= call.emitted) return;
    const int height = call.pixels / call.width;
    const Spot o = spot(slot, pooled(height, KH, SH, PH), pooled(call.width, KW, SW, PW), call.channels);
    float sum = 0.0f;
    int summed = 0, row = 0;
    for (int t = 0; t < call.steps; t++) {
        const float value = pooled_value(masks, o, t, call, height) * (GROUP ? weights[t] : 1.0f);
        sum = summed ? sum + value : value;
        if (++summed == (GROUP ? GROUP : 1) || t == call.steps - 1) {
            put(out[row++ * (position)call.emitted + slot], sum);
            summed = 0;
        }
    }
}

// Gradient to the weights: sums over what the pool emitted, by block.
extern "C" __global__ void __launch_bounds__(BLOCK) fire_pool_weights(
    const unsigned int* __restrict__ masks, const io* __restrict__ go, float* __restrict__ partial, float* scratch, Call call,
    int rounds) {
    SHARED;
    float* tally = tally_of(shared, scratch, call.steps);  // [T][BLOCK]
    for (int t = 0; t < call.steps; t++) tally[t * BLOCK + threadIdx.x] = 0.0f;
    const int height = call.pixels / call.width;
    for (int r = 0; r < rounds; r++) {
        const position slot = ((position)blockIdx.x * rounds + r) * BLOCK + threadIdx.x;
        if (slot >= call.emitted) continue;
        const Spot o = spot(slot, pooled(height, KH, SH, PH), pooled(call.width, KW, SW, PW), call.channels);
        for (int t = 0; t < call.steps; t++) {
            const io go_t = go[t / (GROUP ? GROUP : 1) * (position)call.emitted + slot];
            tally[t * BLOCK + threadIdx.x] += to_float(go_t) * pooled_value(masks, o, t, call, height);
        }
    }
    sum_over_block(tally, call.steps, partial + (position)blockIdx.x * call.steps);
}
