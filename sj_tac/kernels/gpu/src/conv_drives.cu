// The drives alone, [G, N, C, H, W], bit for bit those that conv_fire.cu runs its steps on: for who reads frames afterwards.

extern "C" __global__ void __launch_bounds__(BLOCK) conv_drives(
    const io* __restrict__ frames, const io* __restrict__ filters, const io* __restrict__ bias, io* __restrict__ y, Call call,
    int height, int width) {
    SHARED;
    const Tile tile(call);
    float* patch = shared + FILTERS;
    const position sample = (position)C_IN * height * width;
    const position frame = call.frame / ((position)call.channels * call.pixels) * sample;
    hold_filters(shared, filters, tile, call);
    for (int g = 0; g < call.groups; g++) {
        hold_patch(patch, frames + g * frame + tile.sample * sample, tile, height, width);
        __syncthreads();
        if (tile.within) {
            float x[DEEP][NEURONS];
            convolve(patch, shared, x);
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                finish(x[d], bias, tile.channel_of(d));
                if (tile.has(d, call)) store(y + g * (position)call.frame, tile.neuron(d, call), call, x[d]);
            }
        }
        __syncthreads();
    }
}
