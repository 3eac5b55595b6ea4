// fire, backward: one thread runs the steps of its slots again, from y and v0, and walks them back.
//
// The charged voltages of SEGMENT steps are kept in registers; of the segments before, only the voltage they begin with.
// Sums over slots (scale, shift, weights, linear) are taken by thread over ROUNDS slots, then over the block, in one order,
// and the blocks' partial sums are added by the caller.
//
// LANES: of a block's threads, how many lie along the channels (channels_last) or 1 (contiguous: one plane a block).
// SEGMENTS: segments of a call. POOLED: the spikes went through a pool that windows.cuh describes.

#define GROUPS_OF_SEGMENT (K < 16 ? 16 / K : 1)
#define SEGMENT (GROUPS_OF_SEGMENT * K)
#define ROWS (BLOCK / LANES)

struct Tensors {
    const io *go, *y;
    const float *gv, *scale, *shift, *v0, *linear, *rate, *weights;
    const unsigned int* masks;
    io* gy;
    float *gv0, *sums_scale, *sums_shift, *sums_linear, *sums_weights, *scratch;
};

extern "C" __global__ void __launch_bounds__(BLOCK) fire_backward(Tensors at, Call call, int rounds, int parts) {
    SHARED;
    const int thread = threadIdx.x, row = thread / LANES;
    const int linear_sums = at.sums_linear ? 2 * call.groups : 0, weight_sums = at.sums_weights ? call.steps : 0;
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
    const int pack = (int)outer * LANES + thread % LANES;
    const bool inside = pack * WIDTH_V < call.channels;
#else
    const position units = call.pixels / CORNERS / WIDTH_V;  // packs of a plane
    const bool inside = true;
#endif
    for (int r = 0; r < rounds; r++) {
        const position unit = (part * rounds + r) * ROWS + row;
        if (!inside || unit >= units) continue;
#if LAST
        const position slot = unit * call.channels + pack * WIDTH_V;
#else
        const position slot = (outer * units + unit) * WIDTH_V;
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
#pragma unroll
                    for (int n = 0; n < NEURONS; n++)
                        v[n] = after(charged(x[n], v[n], tau, call.rest, decay, gain), call.threshold, call.rest);
                }
            }
        }
        load(at.gv, place.first, call, carry);
        for (int s = SEGMENTS - 1; s >= 0; s--) {
#pragma unroll
            for (int n = 0; n < NEURONS; n++) v[n] = begin[s][n];
#pragma unroll
            for (int i = 0; i < GROUPS_OF_SEGMENT; i++) {
                const int g = s * GROUPS_OF_SEGMENT + i;
                if (g >= call.groups) continue;
                load(at.y + g * (position)call.frame, place.first, call, x);
                affine.apply(x);
                const float decay = MODE == 5 ? at.linear[2 * g] : call.decay, gain = MODE == 5 ? at.linear[2 * g + 1] : call.gain;
                const int length = steps_on(g, call);
#pragma unroll
                for (int j = 0; j < K; j++) {
                    if (j >= length) continue;
#pragma unroll
                    for (int n = 0; n < NEURONS; n++) {
                        h[i * K + j][n] = charged(x[n], v[n], tau, call.rest, decay, gain);
                        v[n] = after(h[i * K + j][n], call.threshold, call.rest);
                    }
                }
            }
#pragma unroll
            for (int i = GROUPS_OF_SEGMENT - 1; i >= 0; i--) {
                const int g = s * GROUPS_OF_SEGMENT + i;
                if (g >= call.groups) continue;
                const int length = steps_on(g, call);
                const float beta = at.linear ? at.linear[2 * g] : call.decay, gamma = at.linear ? at.linear[2 * g + 1] : call.gain;
                float gx[NEURONS] = {}, beta_sum = 0.0f, gamma_sum = 0.0f, raw[NEURONS];
                load(at.y + g * (position)call.frame, place.first, call, raw);
#pragma unroll
                for (int n = 0; n < NEURONS; n++) x[n] = raw[n];
                affine.apply(x);
#pragma unroll
                for (int j = K - 1; j >= 0; j--) {
                    if (j >= length) continue;
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
                        // To the first corner that fired; to the very first where none did, as torch's MaxPool.
                        bool taken = false;
#pragma unroll
                        for (int c = 0; c < CORNERS; c++) {
                            const bool fires = h[i * K + j][c * WIDTH_V + m] >= call.threshold;
                            gs[c * WIDTH_V + m] = CORNERS == 1 || (fires && !taken) ? gradient : 0.0f;
                            taken |= fires;
                        }
                        if (CORNERS > 1 && !taken) gs[m] = gradient;
                        if (weight_sums && taken) tally[(linear_sums + t) * BLOCK + thread] += to_float(go.x[m]);
                    }
#endif
#pragma unroll
                    for (int n = 0; n < NEURONS; n++) {
                        const float voltage = h[i * K + j][n], slope = derivative(voltage, call.threshold, call.alpha);
#if HARD
                        const float kept = (voltage >= call.threshold ? 0.0f : 1.0f) + (call.detach ? 0.0f : (call.rest - voltage) * slope);
#else
                        const float kept = 1.0f - (call.detach ? 0.0f : call.threshold * slope);
#endif
                        carry[n] = gs[n] * slope + carry[n] * kept;
                        if (linear_sums) {
                            const float before =
                                i * K + j ? after(h[i * K + j - (i * K + j ? 1 : 0)][n], call.threshold, call.rest) : begin[s][n];
                            beta_sum += carry[n] * (before - call.rest);
                            gamma_sum += carry[n] * x[n];
                        }
                        gx[n] += carry[n] * gamma;
                        carry[n] *= beta;
                    }
                }
                if (linear_sums) {
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
                if (row < width) shared[thread] += shared[thread + width * LANES];
                __syncthreads();
            }
            float* sums = which ? at.sums_shift : at.sums_scale;
#if LAST
            if (row == 0 && inside) sums[part * call.channels + pack * WIDTH_V + m] = shared[thread];
#else
            if (row == 0) sums[(position)blockIdx.x * WIDTH_V + m] = shared[thread];
#endif
        }
    }
#endif
}
