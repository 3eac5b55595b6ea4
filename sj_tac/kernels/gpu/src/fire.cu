// fire, forward: one thread runs all steps of its slots, from the drives to the next layer's weighted sums.
//
// With MASKS, for pools other than 2x2, the spikes of a neuron leave as bits, 32 steps a word, and pool.cu goes on from there.

// REST0: the resting voltage is 0. Not so in the backward, which gains little by it and spills more.
#define RESTING(call) (REST0 ? 0.0f : (call).rest)

// Steps of a sum; and whether sums begin and end at the same steps on every drive, which is known without counting then.
#define EACH (GROUP ? GROUP : 1)
#define STEADY (K % EACH == 0 && (WHOLE || EACH == 1))

// Whether a neuron of the slot fired, or how many did.
#if MEAN
typedef int fired_of_slot;
#else
typedef bool fired_of_slot;
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) fire_forward(
    const io* __restrict__ y, const io* __restrict__ residual, const float* __restrict__ scale,
    const float* __restrict__ shift, const float* __restrict__ v0, const float* __restrict__ linear, const float* __restrict__ rate, const float* __restrict__ weights,
    void* __restrict__ output, float* __restrict__ v_out, Call call) {
    position slot = ((position)blockIdx.x * BLOCK + threadIdx.x) * WIDTH_V;
    if (slot >= call.frame / CORNERS) return;
    const Place place = locate(slot, call);
    const Affine affine(scale, shift, place.channel);
    const float tau = rate ? *rate : call.tau;
    float v[NEURONS], x[NEURONS];
    if (v0) {
        load(v0, place.first, call, v);
    } else {
#pragma unroll
        for (int n = 0; n < NEURONS; n++) v[n] = RESTING(call);
    }
#if MASKS
    unsigned int bits[WIDTH_V] = {};
#else
    float sums[WIDTH_V] = {};
    [[maybe_unused]] int summed = 0, row = 0;
    io* out = (io*)output + slot;
#endif
    for (int g = 0; g < call.groups; g++) {
        load(y + g * (position)call.frame, place.first, call, x);
        affine.apply(x);
#if MODE == 5
        const float decay = linear[2 * g], gain = linear[2 * g + 1];
#else
        const float decay = call.decay, gain = call.gain;
#endif
        const int length = steps_on(g, call);
#pragma unroll
        for (int j = 0; j < K; j++) {
            if (WHOLE || j < length) {
                const int t = g * K + j;  // no drive but the last has fewer steps
                fired_of_slot fired[WIDTH_V] = {};
#if RESIDUAL
                float drive[NEURONS];
                load(residual + t * (position)call.frame, place.first, call, drive);
#pragma unroll
                for (int n = 0; n < NEURONS; n++) drive[n] += x[n];
#else
                const float* drive = x;
#endif
#pragma unroll
                for (int n = 0; n < NEURONS; n++) {
                    const float h = charged(drive[n], v[n], tau, RESTING(call), decay, gain);
                    fired[n % WIDTH_V] = MEAN ? fired[n % WIDTH_V] + (h >= call.threshold) : fired[n % WIDTH_V] | (h >= call.threshold);
                    v[n] = after(h, call.threshold, RESTING(call));
                }
#if MASKS
#pragma unroll
                for (int i = 0; i < WIDTH_V; i++) {
                    bits[i] |= (fired[i] ? 1u : 0u) << (t % 32);
                    if (t % 32 == 31 || t == call.steps - 1) {
                        ((unsigned int*)output)[t / 32 * (position)call.frame + place.first + i] = bits[i];
                        bits[i] = 0;
                    }
                }
#else
#if STEADY
                const bool begins = j % EACH == 0, ends = (j + 1) % EACH == 0;
                const int at = g * (K / EACH) + j / EACH;
#else
                const bool begins = summed == 0, ends = ++summed == EACH || t == call.steps - 1;
                const int at = row;
                if (ends) summed = 0, row++;
#endif
                const float w = GROUP ? weights[t] : 1.0f;
#pragma unroll
                for (int i = 0; i < WIDTH_V; i++) {
                    const float spikes = MEAN ? (float)fired[i] / CORNERS * w : (fired[i] ? w : 0.0f);
                    sums[i] = begins ? spikes : sums[i] + spikes;
                }
                if (ends) {
                    Pack<io, WIDTH_V> pack;
#pragma unroll
                    for (int i = 0; i < WIDTH_V; i++) put(pack.x[i], sums[i]);
                    *(Pack<io, WIDTH_V>*)(out + at * (position)call.emitted) = pack;
                }
#endif
            }
        }
    }
    store(v_out, place.first, call, v);
}
