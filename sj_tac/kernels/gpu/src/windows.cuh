// Pools of any windows KH x KW, strides SH x SW, padding PH x PW, on spikes that are bits of masks[T / 32][frame].
// MEAN: AvgPool, padding counted; else MaxPool. WORDS: words of 32 steps. REACH: windows that a neuron can be in.

// Where a number lies in a map, contiguous or channels_last.
struct Spot {
    position plane;  // sample and channel, contiguous; the sample, channels_last
    int row, column, channel;
};

__device__ __forceinline__ Spot spot(position number, int height, int width, int channels) {
    Spot s;
    s.channel = LAST ? (int)(number % channels) : 0;
    position pixel = LAST ? number / channels : number;
    s.column = (int)(pixel % width);
    s.row = (int)(pixel / width % height);
    s.plane = pixel / width / height;
    return s;
}

__device__ __forceinline__ position number_at(position plane, int row, int column, int channel, int height, int width, int channels) {
    position pixel = (plane * height + row) * width + column;
    return LAST ? pixel * channels + channel : pixel;
}

__device__ __forceinline__ int pooled(int size, int kernel, int stride, int padding) {
    return (size + 2 * padding - kernel) / stride + 1;
}

// The value of one step behind the pool.
__device__ __forceinline__ float pooled_value(
    const unsigned int* masks, const Spot& o, int t, const Call& call, int height) {
    int count = 0;
    for (int a = 0; a < KH; a++)
        for (int b = 0; b < KW; b++) {
            const int row = o.row * SH - PH + a, column = o.column * SW - PW + b;
            if (row < 0 || row >= height || column < 0 || column >= call.width) continue;
            const position n = number_at(o.plane, row, column, o.channel, height, call.width, call.channels);
            count += masks[t / 32 * (position)call.frame + n] >> (t % 32) & 1u;
        }
    return MEAN ? (float)count / (float)(KH * KW) : (count ? 1.0f : 0.0f);
}

#ifdef REACH
// The windows that a neuron is in, and the steps at which each hands its gradient to it.
struct Windows {
    int count;
    position out[REACH];
    unsigned int takes[REACH][WORDS];

    __device__ Windows(const unsigned int* masks, position neuron, const Call& call) {
        const int height = call.pixels / call.width;
        const int out_height = pooled(height, KH, SH, PH), out_width = pooled(call.width, KW, SW, PW);
        const Spot s = spot(neuron, height, call.width, call.channels);
        count = 0;
        const int top = s.row + PH - KH + 1, left = s.column + PW - KW + 1;
        for (int r = top > 0 ? (top + SH - 1) / SH : 0; r < out_height && r * SH <= s.row + PH; r++)
            for (int c = left > 0 ? (left + SW - 1) / SW : 0; c < out_width && c * SW <= s.column + PW; c++) {
                out[count] = number_at(s.plane, r, c, s.channel, out_height, out_width, call.channels);
                for (int word = 0; word < WORDS; word++) {
                    unsigned int before = 0, any = 0, mine = 0;
                    bool seen = false, very_first = true, started = false;
                    for (int a = 0; !MEAN && a < KH; a++)
                        for (int b = 0; b < KW; b++) {
                            const int row = r * SH - PH + a, column = c * SW - PW + b;
                            if (row < 0 || row >= height || column < 0 || column >= call.width) continue;
                            const position n = number_at(s.plane, row, column, s.channel, height, call.width, call.channels);
                            const unsigned int bits = masks[word * (position)call.frame + n];
                            if (n == neuron) {
                                mine = bits;
                                seen = true;
                                very_first = !started;
                            }
                            if (!seen) before |= bits;
                            any |= bits;
                            started = true;
                        }
                    // MaxPool's gradient goes to the first largest of a window: the very first where no neuron fired.
                    takes[count][word] = MEAN ? ~0u : (mine & ~before) | (very_first ? ~any : 0u);
                }
                count++;
            }
    }

    __device__ __forceinline__ float gradient(const io* go, int t) const {
        float sum = 0.0f;
        for (int i = 0; i < count; i++) {
            const float g = to_float(go[out[i]]);
            if (takes[i][t / 32] >> (t % 32) & 1u) sum += MEAN ? g / (float)(KH * KW) : g;
        }
        return sum;
    }
};
#endif
