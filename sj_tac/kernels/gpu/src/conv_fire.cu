// Convolution and fire, forward, in one kernel: a thread convolves the drives of its slots in several channels, from frames of a
// few channels, and runs all steps on them. The drives, of a net's first layer its largest tensor, never reach memory.

#if RESIDENT
#define BOUNDS __launch_bounds__(BLOCK, RESIDENT / BLOCK)
#else
#define BOUNDS __launch_bounds__(BLOCK)
#endif

extern "C" __global__ void BOUNDS conv_fire_forward(
    const io* __restrict__ frames, const io* __restrict__ filters, const io* __restrict__ bias, const float* __restrict__ scale,
    const float* __restrict__ shift, const float* __restrict__ v0, const float* __restrict__ rate, const float* __restrict__ weights,
    void* __restrict__ output, float* __restrict__ v_out, Call call, int height, int width) {
    SHARED;
    const Tile tile(call);
    float* held = shared;
    float* patch = shared + FILTERS;  // two of them: one is filled while the other is read
    const position sample = (position)C_IN * height * width;
    const position frame = call.frame / ((position)call.channels * call.pixels) * sample;
    const io* from = frames + tile.sample * sample;
    hold_filters(held, filters, tile, call);
    hold_patch(patch, from, tile, height, width);
#if AHEAD
    Ahead ahead(tile, height, width);
#endif
    const Step step = {rate ? *rate : call.tau, call.decay, call.gain};
    Neurons neurons[DEEP];
#if LAST
    const Affine affine(scale, shift, tile.within ? tile.channel : 0);
#endif
    if (tile.within) {
#pragma unroll
        for (int d = 0; d < DEEP; d++) neurons[d].begin(tile.has(d, call) ? v0 : nullptr, tile.neuron(d, call), call);
    }
    __syncthreads();
    for (int g = 0; g < call.groups; g++) {
        const bool more = g + 1 < call.groups;
#if AHEAD
        if (more) ahead.ask(from + (g + 1) * frame);
#else
        if (more) hold_patch(patch + (g + 1) % 2 * PATCH, from + (g + 1) * frame, tile, height, width);
#endif
        if (tile.within) {
            float x[DEEP][NEURONS];
            convolve(patch + g % 2 * PATCH, held, x);
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                finish(x[d], bias, tile.channel_of(d));
#if !LAST
                const Affine affine(scale, shift, tile.channel + d);
#endif
                affine.apply(x[d]);
                neurons[d].take(x[d], g, step, nullptr, weights, output, tile.neuron(d, call), tile.slot(d, call), call, tile.has(d, call));
            }
        }
#if AHEAD
        if (more) ahead.lay(patch + (g + 1) % 2 * PATCH);
#endif
        __syncthreads();
    }
    if (tile.within) {
#pragma unroll
        for (int d = 0; d < DEEP; d++)
            if (tile.has(d, call)) store(v_out, tile.neuron(d, call), call, neurons[d].v);
    }
}
