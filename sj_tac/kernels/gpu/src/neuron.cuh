// The neuron's step, the surrogates, and where neurons lie in memory. Fixed at compile time by macros, so that loops unroll
// and the state stays in registers:
//   MODE          how a step charges, in the host's order of operations (host.charge_mode): 0 LIF with decay_input, 1 LIF,
//                 2 PLIF with decay_input, 3 PLIF (both: tau is a factor), 4 IF, 5 a merged step with its own beta and gamma
//   REST0         the resting voltage is 0
//   HARD          hard reset to the resting voltage, else soft: minus the threshold
//   AFFINE        a scale and shift for every channel comes before the steps
//   RESIDUAL      a frame is added to the drive at every step
//   WINDOWS       a pool of 2x2 windows that tile the map is inside; MEAN: AvgPool, else MaxPool
//   WHOLE         the last drive has as many steps as all, and the last group of drives as many drives
//   LAST          channels_last
//   WIDTH_V       slots (neurons, or windows) of one thread, side by side in memory
//   K             steps on a drive; the last drive may have fewer
//   GROUP         steps that are summed into one frame of the output; 0 for frames
//   SURROGATE     as the host numbers them: Sigmoid, ATan, PiecewiseQuadratic, PiecewiseExp, SoftSign, SuperSpike, Erf
#define RESTING(call) (REST0 ? 0.0f : (call).rest)

// Steps of a sum; and whether sums begin and end at the same steps on every drive, which is known without counting then.
#define EACH (GROUP ? GROUP : 1)
#define STEADY (K % EACH == 0 && (WHOLE || EACH == 1))

// h, from the drive and the voltage before.
__device__ __forceinline__ float charged(float x, float v, float tau, float rest, float decay, float gain) {
#if MODE == 0
    return v + (x - (v - rest)) / tau;
#elif MODE == 1
    return v - (v - rest) / tau + x;
#elif MODE == 2
    return v + (x - (v - rest)) * tau;
#elif MODE == 3
    return v - (v - rest) * tau + x;
#elif MODE == 4
    return v + x;
#else
    return rest + decay * (v - rest) + gain * x;
#endif
}

// The voltage behind the reset.
__device__ __forceinline__ float after(float h, float threshold, float rest) {
#if HARD
    return h >= threshold ? rest : h;
#else
    return h >= threshold ? h - threshold : h;
#endif
}

#ifdef SURROGATE
// d spike / d h at h - threshold, without the factor that is the same for all: STEEPNESS. Every divisor is at least 1.
#if SURROGATE == 1 || SURROGATE == 3 || SURROGATE == 4
#define STEEPNESS(alpha) ((alpha) * 0.5f)
#elif SURROGATE == 6
#define STEEPNESS(alpha) ((alpha) * 0.5641895835477563f)
#else
#define STEEPNESS(alpha) (alpha)
#endif
__device__ __forceinline__ float shape(float h, float threshold, float alpha) {
    float x = h - threshold;
#if SURROGATE == 0
    float s = RECIPROCAL(1.0f + expf(-alpha * x));
    return (1.0f - s) * s;
#elif SURROGATE == 1
    float z = x * (alpha * 1.5707963267948966f);
    return RECIPROCAL(fmaf(z, z, 1.0f));
#elif SURROGATE == 2
    return fmaxf(fmaf(-alpha, fabsf(x), 1.0f), 0.0f);
#elif SURROGATE == 3
    return expf(-alpha * fabsf(x));
#elif SURROGATE == 4
    float z = fmaf(alpha, fabsf(x), 1.0f);
    return RECIPROCAL(z * z);
#elif SURROGATE == 5
    float z = 1.0f + fabsf(x);
    return RECIPROCAL(z * z);
#else
    float z = alpha * x;
    return expf(-z * z);
#endif
}
#endif

// Neurons of a slot, and of a thread; neuron (corner, slot) of a thread is number corner * WIDTH_V + slot.
#if WINDOWS
#define CORNERS 4
#else
#define CORNERS 1
#endif
#define NEURONS (CORNERS * WIDTH_V)

// Where a thread's slots begin: the first corner's neuron, and its channel.
struct Place {
    position first;
    int channel;
};

// Slots are numbered as the output lies in memory.
__device__ __forceinline__ Place locate(position slot, const Call& call) {
    Place place;
#if WINDOWS && LAST
    position unit = slot / call.channels, half = call.width / 2;
    place.channel = (int)(slot % call.channels);
    place.first = (unit / half * 2 * call.width + unit % half * 2) * call.channels + place.channel;
#elif WINDOWS
    position half = call.width / 2, unit = slot / half;
    place.first = unit * 2 * call.width + slot % half * 2;
    place.channel = (int)(unit / (call.pixels / call.width / 2) % call.channels);
#elif LAST
    place.first = slot;
    place.channel = (int)(slot % call.channels);
#else
    place.first = slot;
    place.channel = (int)(slot / call.pixels % call.channels);
#endif
    return place;
}

// The backward gets its tensors in a struct, where nothing else says that they are not written. What is read again is not
// kept in registers until then.
#ifdef SURROGATE
#define READ_PACK(pack) (again ? *(pack) : fetch(pack))
#else
#define READ_PACK(pack) (*(pack))
#endif

// A thread's neurons of one frame, in vectors.
template <bool again = false, typename number>
__device__ __forceinline__ void load(const number* frame, position first, const Call& call, float* x) {
#if WINDOWS && !LAST
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const auto pack = READ_PACK((const Pack<number, 2 * WIDTH_V>*)(frame + first + row * (position)call.width));
        float side[2 * WIDTH_V];
        to_floats(pack, side);
#pragma unroll
        for (int j = 0; j < 2 * WIDTH_V; j++) x[(2 * row + j % 2) * WIDTH_V + j / 2] = side[j];
    }
#else
#pragma unroll
    for (int corner = 0; corner < CORNERS; corner++) {
        position at = first + (corner % 2 + corner / 2 * (position)call.width) * call.channels;
        const auto pack = READ_PACK((const Pack<number, WIDTH_V>*)(frame + at));
        to_floats(pack, x + corner * WIDTH_V);
    }
#endif
}

template <typename number>
__device__ __forceinline__ void store(number* frame, position first, const Call& call, const float* x) {
#if WINDOWS && !LAST
#pragma unroll
    for (int row = 0; row < 2; row++) {
        Pack<number, 2 * WIDTH_V> pack;
#pragma unroll
        for (int j = 0; j < 2 * WIDTH_V; j++) put(pack.x[j], x[(2 * row + j % 2) * WIDTH_V + j / 2]);
        *(Pack<number, 2 * WIDTH_V>*)(frame + first + row * (position)call.width) = pack;
    }
#else
#pragma unroll
    for (int corner = 0; corner < CORNERS; corner++) {
        position at = first + (corner % 2 + corner / 2 * (position)call.width) * call.channels;
        Pack<number, WIDTH_V> pack;
#pragma unroll
        for (int j = 0; j < WIDTH_V; j++) put(pack.x[j], x[corner * WIDTH_V + j]);
        *(Pack<number, WIDTH_V>*)(frame + at) = pack;
    }
#endif
}

// The BatchNorm's affine map for a thread's slots: all of one channel, or in channels_last of channels side by side.
struct Affine {
#if AFFINE
    float scale[WIDTH_V], shift[WIDTH_V];
#endif

    __device__ __forceinline__ Affine(const float* scales, const float* shifts, int channel) {
#if AFFINE
#pragma unroll
        for (int j = 0; j < WIDTH_V; j++) {
            scale[j] = scales[channel + (LAST ? j : 0)];
            shift[j] = shifts[channel + (LAST ? j : 0)];
        }
#endif
    }

    __device__ __forceinline__ void apply(float* x) const {
#if AFFINE
#pragma unroll
        for (int n = 0; n < NEURONS; n++) x[n] = x[n] * scale[n % WIDTH_V] + shift[n % WIDTH_V];
#endif
    }
};

// Steps on drive g.
__device__ __forceinline__ int steps_on(int g, const Call& call) {
    return WHOLE || g + 1 < call.groups ? K : call.steps - (call.groups - 1) * K;
}
