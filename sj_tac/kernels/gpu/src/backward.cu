// fire, backward: one thread runs the steps of its slots again, from y and v0, and walks them back.
//
// The charged voltages of SEGMENT steps (STEPS, or K if that is more) are kept in registers; of the segments before, only the
// voltage they begin with.
// Sums over slots (scale, shift, weights, linear) are taken by thread over ROUNDS slots, then over the block, in one order,
// and the blocks' partial sums are added by the caller.
//
// LANES: of a block's threads, how many lie along the channels (channels_last), or how many planes a block takes (contiguous).
// SEGMENTS: segments of a call. POOLED: the spikes went through a pool that windows.cuh describes.
// LINEAR_SUMS, WEIGHT_SUMS: gradients to linear and to weights are wanted.

#define GROUPS_OF_SEGMENT (K < STEPS ? STEPS / K : 1)
#define SEGMENT (GROUPS_OF_SEGMENT * K)
#define ROWS (BLOCK / LANES)

struct Tensors {
    const io *__restrict__ go, *__restrict__ y, *__restrict__ residual;
    const float *__restrict__ gv, *__restrict__ scale, *__restrict__ shift, *__restrict__ v0, *__restrict__ linear;
    const float *__restrict__ rate, *__restrict__ weights;
    const unsigned int* __restrict__ masks;
    io *__restrict__ gy, *__restrict__ g_residual;
    float *__restrict__ gv0, *sums_scale, *sums_shift, *sums_linear, *sums_weights, *scratch;
};

// A step's drive: that of its group, and the residual's frame where there is one.
__device__ __forceinline__ void drive_of(const Tensors& at, int t, position first, const Call& call, const float* x, float* drive) {
#if RESIDUAL
    load(at.residual + t * (position)call.frame, first, call, drive);
#pragma unroll
    for (int n = 0; n < NEURONS; n++) drive[n] += x[n];
#else
#pragma unroll
    for (int n = 0; n < NEURONS; n++) drive[n] = x[n];
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK) fire_backward(Tensors at, Call call, int rounds, int parts) {
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
    float sum_scale[WIDTH_V] = {}, sum_shift[WIDTH_V] = {};
#endif
#if LAST
    const position units = call.frame / CORNERS / call.channels;  // pixels, or windows, of all samples
    const int pack = (int)outer * LANES + lane;
    const bool inside = pack * WIDTH_V < call.channels;
#else
    const position units = call.pixels / CORNERS / WIDTH_V;  // packs of a plane
    const position plane = outer * LANES + lane;
    const bool inside = plane < call.frame / call.pixels;
#endif
    for (int r = 0; r < rounds; r++) {
        const position unit = (part * rounds + r) * ROWS + row;
        if (!inside || unit >= units) continue;
#if LAST
        const position slot = unit * call.channels + pack * WIDTH_V;
#else
        const position slot = (plane * units + unit) * WIDTH_V;
#endif
        const Place place = locate(slot, call);
        const Affine affine(at.scale, at.shift, place.channel);
        float begin[SEGMENTS][NEURONS], v[NEURONS], x[NEURONS], h[SEGMENT][NEURONS], carry[NEURONS];
        if (at.v0) {
            load(at.v0, place.first, call, v);
        } else {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) v[n] = call.rest;
        }
#if POOLED
        Windows windows(at.masks, place.first, call);
#endif
        for (int s = 0; s < SEGMENTS; s++) {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) begin[s][n] = v[n];
            if (s == SEGMENTS - 1) break;
            for (int g = s * GROUPS_OF_SEGMENT; g < (s + 1) * GROUPS_OF_SEGMENT; g++) {
                load(at.y + g * (position)call.frame, place.first, call, x);
                affine.apply(x);
                const float decay = MODE == 5 ? at.linear[2 * g] : call.decay, gain = MODE == 5 ? at.linear[2 * g + 1] : call.gain;
                for (int j = 0; j < K; j++) {
                    float drive[NEURONS];
                    drive_of(at, g * K + j, place.first, call, x, drive);
#pragma unroll
                    for (int n = 0; n < NEURONS; n++)
                        v[n] = after(charged(drive[n], v[n], tau, call.rest, decay, gain), call.threshold, call.rest);
                }
            }
        }
        if (at.gv) {
            load(at.gv, place.first, call, carry);
        } else {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) carry[n] = 0.0f;
        }
        for (int s = SEGMENTS - 1; s >= 0; s--) {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) v[n] = begin[s][n];
#pragma unroll
            for (int i = 0; i < GROUPS_OF_SEGMENT; i++) {
                const int g = s * GROUPS_OF_SEGMENT + i;
                if (!WHOLE && g >= call.groups) continue;
                load(at.y + g * (position)call.frame, place.first, call, x);
                affine.apply(x);
                const float decay = MODE == 5 ? at.linear[2 * g] : call.decay, gain = MODE == 5 ? at.linear[2 * g + 1] : call.gain;
                const int length = steps_on(g, call);
#pragma unroll
                for (int j = 0; j < K; j++) {
                    if (!WHOLE && j >= length) continue;
                    float drive[NEURONS];
                    drive_of(at, g * K + j, place.first, call, x, drive);
#pragma unroll
                    for (int n = 0; n < NEURONS; n++) {
                        h[i * K + j][n] = charged(drive[n], v[n], tau, call.rest, decay, gain);
                        v[n] = after(h[i * K + j][n], call.threshold, call.rest);
                    }
                }
            }
#pragma unroll
            for (int i = GROUPS_OF_SEGMENT - 1; i >= 0; i--) {
                const int g = s * GROUPS_OF_SEGMENT + i;
                if (!WHOLE && g >= call.groups) continue;
                const int length = steps_on(g, call);
                const float beta = at.linear ? at.linear[2 * g] : call.decay, gamma = at.linear ? at.linear[2 * g + 1] : call.gain;
                float gx[NEURONS] = {}, beta_sum = 0.0f, gamma_sum = 0.0f, raw[NEURONS];
                load(at.y + g * (position)call.frame, place.first, call, raw);
#pragma unroll
                for (int n = 0; n < NEURONS; n++) x[n] = raw[n];
                affine.apply(x);
#pragma unroll
                for (int j = K - 1; j >= 0; j--) {
                    if (!WHOLE && j >= length) continue;
                    const int t = g * K + j;
                    const float w = GROUP ? at.weights[t] : 1.0f;
                    const position from = (GROUP ? t / (GROUP ? GROUP : 1) : t) * (position)call.emitted;
                    float gs[NEURONS];
#if POOLED
                    gs[0] = windows.gradient(at.go + from, t) * w;
#else
                    const Pack<io, WIDTH_V> go = *(const Pack<io, WIDTH_V>*)(at.go + from + slot);
#pragma unroll
                    for (int m = 0; m < WIDTH_V; m++) {
                        const float gradient = to_float(go.x[m]) * w;
#if MEAN
                        int fired = 0;
#pragma unroll
                        for (int c = 0; c < CORNERS; c++) {
                            fired += h[i * K + j][c * WIDTH_V + m] >= call.threshold ? 1 : 0;
                            gs[c * WIDTH_V + m] = gradient / CORNERS;
                        }
                        if (WEIGHT_SUMS) tally[(linear_sums + t) * BLOCK + thread] += to_float(go.x[m]) * ((float)fired / CORNERS);
#else
                        // To the first corner that fired; to the very first where none did, as torch's MaxPool.
                        bool taken = false;
#pragma unroll
                        for (int c = 0; c < CORNERS; c++) {
                            const bool fires = h[i * K + j][c * WIDTH_V + m] >= call.threshold;
                            gs[c * WIDTH_V + m] = CORNERS == 1 || (fires && !taken) ? gradient : 0.0f;
                            taken |= fires;
                        }
                        if (CORNERS > 1 && !taken) gs[m] = gradient;
                        if (WEIGHT_SUMS && taken) tally[(linear_sums + t) * BLOCK + thread] += to_float(go.x[m]);
#endif
                    }
#endif
                    float drive[NEURONS], to_drive[NEURONS];
                    if (LINEAR_SUMS) drive_of(at, t, place.first, call, x, drive);
#pragma unroll
                    for (int n = 0; n < NEURONS; n++) {
                        const float voltage = h[i * K + j][n], slope = derivative(voltage, call.threshold, call.alpha);
#if HARD
                        const float kept = (voltage >= call.threshold ? 0.0f : 1.0f) + (call.detach ? 0.0f : (call.rest - voltage) * slope);
#else
                        const float kept = 1.0f - (call.detach ? 0.0f : call.threshold * slope);
#endif
                        carry[n] = gs[n] * slope + carry[n] * kept;
                        if (LINEAR_SUMS) {
                            const float before =
                                i * K + j ? after(h[i * K + j - (i * K + j ? 1 : 0)][n], call.threshold, call.rest) : begin[s][n];
                            beta_sum += carry[n] * (before - call.rest);
                            gamma_sum += carry[n] * drive[n];
                        }
                        to_drive[n] = carry[n] * gamma;
                        gx[n] += to_drive[n];
                        carry[n] *= beta;
                    }
#if RESIDUAL
                    store(at.g_residual + t * (position)call.frame, place.first, call, to_drive);
#endif
                }
                if (LINEAR_SUMS) {
                    tally[2 * g * BLOCK + thread] += beta_sum;
                    tally[(2 * g + 1) * BLOCK + thread] += gamma_sum;
                }
#if AFFINE
#pragma unroll
                for (int n = 0; n < NEURONS; n++) {
                    sum_shift[n % WIDTH_V] += gx[n];
                    sum_scale[n % WIDTH_V] += gx[n] * raw[n];
                    gx[n] *= affine.scale[n % WIDTH_V];
                }
#endif
                store(at.gy + g * (position)call.frame, place.first, call, gx);
            }
        }
        if (at.gv0) store(at.gv0, place.first, call, carry);
    }
    sum_over_block(tally, linear_sums, at.sums_linear + (position)blockIdx.x * linear_sums);
    sum_over_block(tally + linear_sums * BLOCK, weight_sums, at.sums_weights + (position)blockIdx.x * weight_sums);
#if AFFINE
    // For scale and shift: over the rows that share a channel.
#pragma unroll
    for (int m = 0; m < WIDTH_V; m++) {
#pragma unroll
        for (int which = 0; which < 2; which++) {
            __syncthreads();
            shared[thread] = which ? sum_shift[m] : sum_scale[m];
            __syncthreads();
            for (int width = ROWS / 2; width > 0; width /= 2) {
                if (row < width) shared[thread] += shared[thread + width * (LAST ? LANES : 1)];
                __syncthreads();
            }
            float* sums = which ? at.sums_shift : at.sums_scale;
#if LAST
            if (row == 0 && inside) sums[part * call.channels + pack * WIDTH_V + m] = shared[thread];
#else
            if (row == 0 && inside) sums[(plane * parts + part) * WIDTH_V + m] = shared[thread];
#endif
        }
    }
#endif
}
