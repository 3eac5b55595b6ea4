// fire, forward: one thread runs all steps of its slots, from the drives to the next layer's weighted sums.

extern "C" __global__ void __launch_bounds__(BLOCK) fire_forward(
    const io* __restrict__ y, const io* __restrict__ residual, const float* __restrict__ scale,
    const float* __restrict__ shift, const float* __restrict__ v0, const float* __restrict__ linear, const float* __restrict__ rate, const float* __restrict__ weights,
    void* __restrict__ output, float* __restrict__ v_out, Call call) {
    const position slot = ((position)blockIdx.x * BLOCK + threadIdx.x) * WIDTH_V;
    if (slot >= call.frame / CORNERS) return;
    const Place place = locate(slot, call);
    const Affine affine(scale, shift, place.channel);
    Step step = {rate ? *rate : call.tau, call.decay, call.gain};
    Neurons neurons;
    neurons.begin(v0, place.first, call);
    for (int g = 0; g < call.groups; g++) {
        float x[NEURONS];
        load(y + g * (position)call.frame, place.first, call, x);
        affine.apply(x);
#if MODE == 5
        step.decay = linear[2 * g], step.gain = linear[2 * g + 1];
#endif
        neurons.take(x, g, step, residual, weights, output, place.first, slot, call);
    }
    store(v_out, place.first, call, neurons.v);
}
