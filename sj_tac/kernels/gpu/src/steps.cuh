// fire, forward: a thread's neurons take the steps of one drive after the other, and what they fire leaves as
// the next layer's weighted sums, as frames, or, with MASKS, as bits, 32 steps a word, from which pool.cu goes on.
//
// Macros beside those of neuron.cuh:
//   MASKS         spikes leave as bits

// Whether a neuron of the slot fired, or how many did.
#if MEAN
typedef int fired_of_slot;
#else
typedef bool fired_of_slot;
#endif

// The numbers of a neuron's step on one drive.
struct Step {
    float tau, decay, gain;
};

// A thread's neurons on their way through the drives.
struct Neurons {
    float v[NEURONS];
#if MASKS
    unsigned int bits[WIDTH_V];
#else
    float sums[WIDTH_V];
    int summed, row;
#endif

    // At rest, or where an earlier call has left them; ``first``: the first neuron.
    __device__ __forceinline__ void begin(const float* v0, position first, const Call& call) {
        if (v0) {
            load(v0, first, call, v);
        } else {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) v[n] = RESTING(call);
        }
#if MASKS
#pragma unroll
        for (int i = 0; i < WIDTH_V; i++) bits[i] = 0;
#else
#pragma unroll
        for (int i = 0; i < WIDTH_V; i++) sums[i] = 0.0f;
        summed = 0, row = 0;
#endif
    }

    // The steps on drive g, ``x`` behind the affine map; ``slot``: where the thread's first slot is in a frame of the output.
    __device__ __forceinline__ void take(
        const float* x, int g, const Step& numbers, const io* residual, const float* weights, void* output, position first, position slot,
        const Call& call) {
        const int length = steps_on(g, call);
#pragma unroll
        for (int j = 0; j < K; j++) {
            if (WHOLE || j < length) {
                const int t = g * K + j;  // no drive but the last has fewer steps
                fired_of_slot fired[WIDTH_V] = {};
#if RESIDUAL
                float drive[NEURONS];
                load(residual + t * (position)call.frame, first, call, drive);
#pragma unroll
                for (int n = 0; n < NEURONS; n++) drive[n] += x[n];
#else
                const float* drive = x;
#endif
#pragma unroll
                for (int n = 0; n < NEURONS; n++) {
                    const float h = charged(drive[n], v[n], numbers.tau, RESTING(call), numbers.decay, numbers.gain);
                    fired[n % WIDTH_V] = MEAN ? fired[n % WIDTH_V] + (h >= call.threshold) : fired[n % WIDTH_V] | (h >= call.threshold);
                    v[n] = after(h, call.threshold, RESTING(call));
                }
                leave(fired, g, j, t, weights, output, first, slot, call);
            }
        }
    }

    // What step j on drive g, step t of all, fired.
    __device__ __forceinline__ void leave(
        const fired_of_slot* fired, int g, int j, int t, const float* weights, void* output, position first, position slot,
        const Call& call) {
#if MASKS
#pragma unroll
        for (int i = 0; i < WIDTH_V; i++) {
            bits[i] |= (fired[i] ? 1u : 0u) << (t % 32);
            if (t % 32 == 31 || t == call.steps - 1) {
                ((unsigned int*)output)[t / 32 * (position)call.frame + first + i] = bits[i];
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
            *(Pack<io, WIDTH_V>*)((io*)output + slot + at * (position)call.emitted) = pack;
        }
#endif
    }
};
