// fire, backward: one thread runs the steps of its slots again, from y and v0, and walks them back.
//
// The charged voltages of a segment of steps are kept in registers; of the segments before, only the voltage they begin with.
// The steps are bound by comparisons and selections, of which a multiprocessor takes half as many as of multiply-adds: so of a
// MaxPool's window only the neuron that the gradient goes to needs a slope, and gradients are multiplied and added at once.
// Sums over slots (scale, shift, weights, linear) are taken by thread over ROUNDS slots, then over the block, in one order,
// and the blocks' partial sums are added by the caller.
//
// LANES: of a block's threads, how many lie along the channels (channels_last), or how many planes a block takes (contiguous).
// SEGMENTS: segments of a call. GROUPS_OF_SEGMENT: drives of one. RESIDENT: threads that a multiprocessor is to hold at once,
// which bounds their registers. DETACH: detach_reset. LINEAR: beta and gamma are read. POOLED: the spikes went through a pool
// that windows.cuh describes.
// LINEAR_SUMS, WEIGHT_SUMS: gradients to linear and to weights are wanted.

#define SEGMENT (GROUPS_OF_SEGMENT * K)
#define ROWS (BLOCK / LANES)
// Of a thread's slots, how many are of channels of their own.
#define CHANNELS (LAST ? WIDTH_V : 1)

struct Tensors {
    const io *__restrict__ go, *__restrict__ y;
    const io* __restrict__ y_again;  // the same: what is read of it later is read again, and not kept, nor are its addresses
    const io* __restrict__ residual;
    const float *__restrict__ gv, *__restrict__ scale, *__restrict__ shift, *__restrict__ v0, *__restrict__ linear;
    const float *__restrict__ rate, *__restrict__ weights;
    const unsigned int* __restrict__ masks;
    io *__restrict__ gy, *__restrict__ g_residual;
    float *__restrict__ gv0, *sums_scale, *sums_shift, *sums_linear, *sums_weights, *scratch;
};

// Where a number is in one of many frames of ``size``. Computed when it is needed: all places would be kept in registers.
__device__ __forceinline__ position in_frame(int frame, long long size, position number) {
    position place = frame * (position)size + number;
    ANEW(place);
    return place;
}

// A step's drive: that of its group, and the residual's frame where there is one.
__device__ __forceinline__ void drive_of(const Tensors& at, int t, position first, const Call& call, const float* x, float* drive) {
#if RESIDUAL
    load(at.residual, in_frame(t, call.frame, first), call, drive);
#pragma unroll
    for (int n = 0; n < NEURONS; n++) drive[n] += x[n];
#else
#pragma unroll
    for (int n = 0; n < NEURONS; n++) drive[n] = x[n];
#endif
}

// The gradient that reaches the last voltages.
__device__ __forceinline__ void arriving(const float* gv, position first, const Call& call, const float* v, float* carry) {
    if (gv) {
        load(gv, first, call, carry);
    } else {
#pragma unroll
        for (int n = 0; n < NEURONS; n++) carry[n] = 0.0f;
    }
    // A voltage that is no number stays none, and so is its gradient, though no gradient may reach its spikes.
#pragma unroll
    for (int n = 0; n < NEURONS; n++) carry[n] = v[n] == v[n] ? carry[n] : v[n];
}

// The gradients to what a thread's slots emit on one drive. They are read long before they are used: those of a whole segment
// where they are few (EARLY), else those of one drive while the steps of the next are taken.
#define SUMS_OF_DRIVE (STEADY ? K / EACH : K)
#define EARLY (GROUPS_OF_SEGMENT * SUMS_OF_DRIVE * WIDTH_V * sizeof(io) <= 32)
struct Arriving {
    Pack<io, WIDTH_V> of_step[SUMS_OF_DRIVE];

    __device__ __forceinline__ void read(const io* go, int g, position slot, const Call& call) {
#if !POOLED
        if (!WHOLE && g >= call.groups) return;
#pragma unroll
        for (int j = 0; j < SUMS_OF_DRIVE; j++) {
            if (!WHOLE && j >= steps_on(g, call)) continue;
            const int row = STEADY ? g * SUMS_OF_DRIVE + j : (g * K + j) / EACH;
            of_step[j] = *(const Pack<io, WIDTH_V>*)(go + in_frame(row, call.emitted, slot));  // not behind a store
        }
#endif
    }
};

// From a spike's gradient, times the surrogate's steepness, to the charged voltage's; and the surrogate's slope.
__device__ __forceinline__ float by_spike(float gradient, float h, const Call& call, float& slope) {
    const float form = shape(h, call.threshold_again, call.alpha);
    slope = STEEPNESS(call.alpha) * form;
    return gradient * form;
}

// From the gradient to what a slot emits to those to its neurons' charged voltages, by way of their spikes; neuron c is number
// c * stride. Gives back what the slot emitted. Slopes are those of the surrogate, where anything else needs them.
template <int stride>
__device__ __forceinline__ float through(float gradient, const float* h, const Call& call, float* arrived, float* slope) {
#if CORNERS == 1
    arrived[0] = by_spike(gradient, h[0], call, slope[0]);
    return h[0] >= call.threshold_again;
#elif MEAN
    int count = 0;
#pragma unroll
    for (int c = 0; c < CORNERS; c++) {
        count += h[c * stride] >= call.threshold_again;
        arrived[c * stride] = by_spike(gradient * (1.0f / CORNERS), h[c * stride], call, slope[c * stride]);
    }
    return (float)count / CORNERS;
#else
    // To the first corner that fired; to the very first where none did, as torch's MaxPool. No other needs a slope.
    bool first[CORNERS], any;
    const float chosen = first_of_four(h, stride, call.threshold_again, first, any);
    const float most = gradient * shape(chosen, call.threshold_again, call.alpha);
#pragma unroll
    for (int c = 0; c < CORNERS; c++) {
        arrived[c * stride] = first[c] ? most : 0.0f;
        if (!DETACH) by_spike(0.0f, h[c * stride], call, slope[c * stride]);
    }
    return any ? 1.0f : 0.0f;
#endif
}

// The gradient to a charged voltage: by way of the spike, and by way of the voltage behind the reset (``carry * ahead``).
__device__ __forceinline__ float charge_gradient(float carry, float ahead, float arrived, float h, float slope, const Call& call) {
#if DETACH && HARD
    return plus_below(h, call.threshold_again, carry, ahead, arrived);
#elif DETACH
    return fmaf(carry, ahead, arrived);
#elif HARD
    const float kept = (h >= call.threshold_again ? 0.0f : 1.0f) + (RESTING(call) - h) * slope;
    return fmaf(carry * ahead, kept, arrived);
#else
    return fmaf(carry * ahead, fmaf(-call.threshold_again, slope, 1.0f), arrived);
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT / BLOCK) fire_backward(Tensors at, Call call, int rounds, int parts) {
    SHARED;
    const int thread = threadIdx.x;
    const int lane = LAST ? thread % LANES : thread / ROWS, row = LAST ? thread / LANES : thread % ROWS;
    const int linear_sums = LINEAR_SUMS ? 2 * call.groups : 0, weight_sums = WEIGHT_SUMS ? call.steps : 0;
    // [G * 2 | T][BLOCK]: for linear where wanted, then for weights where wanted
    float* tally = tally_of(shared, at.scratch, linear_sums + weight_sums);
    for (int i = 0; i < linear_sums + weight_sums; i++) tally[i * BLOCK + thread] = 0.0f;
    const float tau = at.rate ? *at.rate : call.tau;
    const position part = blockIdx.x % parts, outer = blockIdx.x / parts;
#if AFFINE
    float sum_scale[CHANNELS] = {}, sum_shift[CHANNELS] = {};
#endif
#if LAST
    const position units = call.frame / CORNERS / call.channels;  // pixels, or windows, of all samples
    const int pack = (int)outer * LANES + lane;
    const int channel = pack * WIDTH_V;
    const bool inside = channel < call.channels;
#else
    const position units = call.pixels / CORNERS / WIDTH_V;  // packs of a plane
    const position plane = outer * LANES + lane;
    const int channel = (int)(plane % call.channels);
    const bool inside = plane < call.frame / call.pixels;
#endif
    const Affine affine(at.scale, at.shift, inside ? channel : 0);
    const position past = inside ? units : 0;
    for (int r = 0; r < rounds; r++) {
        const position unit = (part * rounds + r) * ROWS + row;
        if (unit >= past) break;
#if LAST
        const position slot = unit * call.channels + channel;
#else
        const position slot = (plane * units + unit) * WIDTH_V;
#endif
#if WINDOWS && LAST
        const position half = call.width / 2, high = (unsigned_position)unit / (unsigned_position)half;
        const position wide = unit - high * half;
        const position first = (high * 2 * call.width + wide * 2) * call.channels + channel;
#elif WINDOWS
        const position half = call.width / 2 / WIDTH_V, high = (unsigned_position)unit / (unsigned_position)half;
        const position wide = unit - high * half;
        const position first = plane * call.pixels + high * 2 * call.width + wide * 2 * WIDTH_V;
#else
        const position first = slot;
#endif
        float begin[SEGMENTS][NEURONS], v[NEURONS], x[NEURONS], h[SEGMENT][NEURONS], carry[NEURONS];
        if (at.v0) {
            load(at.v0, first, call, v);
        } else {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) v[n] = RESTING(call);
        }
#if POOLED
        Windows windows(at.masks, first, call);
#endif
        for (int s = 0; s < SEGMENTS; s++) {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) begin[s][n] = v[n];
            if (s == SEGMENTS - 1) break;
            for (int g = s * GROUPS_OF_SEGMENT; g < (s + 1) * GROUPS_OF_SEGMENT; g++) {
                load(at.y, in_frame(g, call.frame, first), call, x);
                affine.apply(x);
                const float decay = MODE == 5 ? at.linear[2 * g] : call.decay, gain = MODE == 5 ? at.linear[2 * g + 1] : call.gain;
#pragma unroll
                for (int j = 0; j < K; j++) {
                    float drive[NEURONS];
                    drive_of(at, g * K + j, first, call, x, drive);
#pragma unroll
                    for (int n = 0; n < NEURONS; n++)
                        v[n] = after(charged(drive[n], v[n], tau, RESTING(call), decay, gain), call.threshold, RESTING(call));
                }
            }
        }
        float ahead = 1.0f;  // what the next step keeps of the voltage behind this one
        for (int s = SEGMENTS - 1; s >= 0; s--) {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) v[n] = begin[s][n];
            Arriving go[GROUPS_OF_SEGMENT];
#pragma unroll
            for (int i = GROUPS_OF_SEGMENT - 1; i >= (EARLY ? 0 : GROUPS_OF_SEGMENT - 1); i--)
                go[i].read(at.go, s * GROUPS_OF_SEGMENT + i, slot, call);
#pragma unroll
            for (int i = 0; i < GROUPS_OF_SEGMENT; i++) {
                const int g = s * GROUPS_OF_SEGMENT + i;
                if (!WHOLE && g >= call.groups) continue;
                load(at.y, in_frame(g, call.frame, first), call, x);
                affine.apply(x);
                const float decay = MODE == 5 ? at.linear[2 * g] : call.decay, gain = MODE == 5 ? at.linear[2 * g + 1] : call.gain;
                const int length = steps_on(g, call);
#pragma unroll
                for (int j = 0; j < K; j++) {
                    if (!WHOLE && j >= length) continue;
                    float drive[NEURONS];
                    drive_of(at, g * K + j, first, call, x, drive);
#pragma unroll
                    for (int n = 0; n < NEURONS; n++) {
                        h[i * K + j][n] = charged(drive[n], v[n], tau, RESTING(call), decay, gain);
                        v[n] = after(h[i * K + j][n], call.threshold, RESTING(call));
                    }
                }
            }
            if (s == SEGMENTS - 1) arriving(at.gv, first, call, v, carry);
#pragma unroll
            for (int i = GROUPS_OF_SEGMENT - 1; i >= 0; i--) {
                const int g = s * GROUPS_OF_SEGMENT + i;
                if (!EARLY && i) go[i ? i - 1 : 0].read(at.go, g - 1, slot, call);
                if (!WHOLE && g >= call.groups) continue;
                const int length = steps_on(g, call);
                const float beta = LINEAR ? at.linear[2 * g] : call.decay, gamma = LINEAR ? at.linear[2 * g + 1] : call.gain;
                float gx[NEURONS] = {}, beta_sum = 0.0f, gamma_sum = 0.0f, raw[NEURONS];
                if (AFFINE || LINEAR_SUMS) load<true>(at.y_again, in_frame(g, call.frame, first), call, raw);
#pragma unroll
                for (int n = 0; n < NEURONS; n++) x[n] = raw[n];
                affine.apply(x);
#pragma unroll
                for (int j = K - 1; j >= 0; j--) {
                    if (!WHOLE && j >= length) continue;
                    const int t = g * K + j;
                    const float w = STEEPNESS(call.alpha) * (GROUP ? fetch((const Pack<float, 1>*)at.weights + t).x[0] : 1.0f);
                    float arrived[NEURONS], slope[NEURONS];
#if POOLED
                    const float gradient = windows.gradient(at.go + t / EACH * (position)call.emitted, t);
                    arrived[0] = by_spike(gradient * w, h[i * K + j][0], call, slope[0]);
#else
#pragma unroll
                    for (int m = 0; m < WIDTH_V; m++) {
                        const float gradient = to_float(go[i].of_step[STEADY ? j / EACH : j].x[m]);
                        const float fired = through<WIDTH_V>(gradient * w, h[i * K + j] + m, call, arrived + m, slope + m);
                        if (WEIGHT_SUMS) tally[(linear_sums + t) * BLOCK + thread] += gradient * fired;
                    }
#endif
                    float drive[NEURONS];
                    if (LINEAR_SUMS) drive_of(at, t, first, call, x, drive);
#pragma unroll
                    for (int n = 0; n < NEURONS; n++) {
                        carry[n] = charge_gradient(carry[n], ahead, arrived[n], h[i * K + j][n], slope[n], call);
                        if (LINEAR_SUMS) {
                            const float before =
                                i * K + j ? after(h[i * K + j - (i * K + j ? 1 : 0)][n], call.threshold, RESTING(call)) : begin[s][n];
                            beta_sum = fmaf(carry[n], before - RESTING(call), beta_sum);
                            gamma_sum = fmaf(carry[n], drive[n], gamma_sum);
                        }
                        gx[n] += carry[n];
                    }
                    ahead = beta;
#if RESIDUAL
                    float to_drive[NEURONS];
#pragma unroll
                    for (int n = 0; n < NEURONS; n++) to_drive[n] = carry[n] * gamma;
                    store(at.g_residual, in_frame(t, call.frame, first), call, to_drive);
#endif
                }
                if (LINEAR_SUMS) {
                    tally[2 * g * BLOCK + thread] += beta_sum;
                    tally[(2 * g + 1) * BLOCK + thread] += gamma_sum;
                }
#pragma unroll
                for (int n = 0; n < NEURONS; n++) {
#if AFFINE
                    if (LINEAR) gx[n] *= gamma;
                    sum_shift[n % CHANNELS] += gx[n];
                    sum_scale[n % CHANNELS] = fmaf(gx[n], raw[n], sum_scale[n % CHANNELS]);
                    gx[n] *= LINEAR ? affine.scale[n % WIDTH_V] : affine.scale[n % WIDTH_V] * call.gain;
#else
                    gx[n] *= gamma;
#endif
                }
                store(at.gy, in_frame(g, call.frame, first), call, gx);
            }
        }
        if (at.gv0) {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) carry[n] *= ahead;
            store(at.gv0, first, call, carry);
        }
    }
    sum_over_block(tally, linear_sums, at.sums_linear + (position)blockIdx.x * linear_sums);
    sum_over_block(tally + linear_sums * BLOCK, weight_sums, at.sums_weights + (position)blockIdx.x * weight_sums);
#if AFFINE
    // For scale and shift: over the rows that share a channel.
#pragma unroll
    for (int m = 0; m < CHANNELS; m++) {
#pragma unroll
        for (int which = 0; which < 2; which++) {
            __syncthreads();
            shared[thread] = (which ? sum_shift[m] : sum_scale[m]) * (LINEAR ? 1.0f : call.gain);
            __syncthreads();
            for (int width = ROWS / 2; width > 0; width /= 2) {
                if (row < width) shared[thread] += shared[thread + width * (LAST ? LANES : 1)];
                __syncthreads();
            }
            float* sums = which ? at.sums_shift : at.sums_scale;
#if LAST
            if (row == 0 && inside) sums[part * call.channels + channel + m] = shared[thread];
#else
            if (row == 0 && inside) sums[plane * parts + part] = shared[thread];
#endif
        }
    }
#endif
}
