// A convolution of a few input channels for the threads of a block: a tile of a map, of several output channels. Frames and
// filters are float [G, N, C_IN, height, width] and [C, C_IN, KERNEL, KERNEL], or half; both contiguous.
//
// The order of additions is fixed. A drive begins at 0 and takes one fmaf (rounded once) for every input channel, in each for
// every row of the filter, in each for every column; padding is zeros, which are multiplied as well. The bias is added last.
// Arithmetic is float; the sum is then rounded to the frames' format, as it would be on its way through memory.
//
// Macros beside those of neuron.cuh:
//   C_IN, KERNEL, STRIDE, PADDING    of the convolution, the same along rows and columns
//   BIAS                             it has one
//   TX, TY, TZ                       threads of a block along a row of slots, along rows, and along channels
//   DEEP                             output channels of a thread; a divisor of all

// Neurons of a thread, along a row and rows.
#define COLUMNS (WINDOWS ? 2 * WIDTH_V : WIDTH_V)
#define ROWS (WINDOWS ? 2 : 1)
// Numbers of a row that they look at, and how many of them are read from shared memory at once, and in all.
#define SPAN ((COLUMNS - 1) * STRIDE + KERNEL)
#define AT_ONCE (COLUMNS * STRIDE % 4 == 0 ? 4 : COLUMNS * STRIDE % 2 == 0 ? 2 : 1)
#define READ ((SPAN + AT_ONCE - 1) / AT_ONCE * AT_ONCE)
// What a block looks at: columns, rows, and all numbers; and what its filters take. Vectors begin at multiples of 4 numbers.
#define WIDE_PATCH (((TX - 1) * COLUMNS * STRIDE + READ + 3) / 4 * 4)
#define HIGH_PATCH ((TY * ROWS - 1) * STRIDE + KERNEL)
#define PATCH (C_IN * HIGH_PATCH * WIDE_PATCH)
#define FILTERS ((C_IN * KERNEL * KERNEL * TZ * DEEP + 3) / 4 * 4)

// The part of the output that a thread has, and its block's part of the input.
struct Tile {
    int sample, channel, first_channel;  // the first channels of the thread and of the block
    int row, column;                     // of the first neuron
    int top, left;                       // where the block's patch begins, above and left of the map where it is padded
    bool within;                         // the thread has neurons at all

    __device__ __forceinline__ explicit Tile(const Call& call) {
        const int high = call.pixels / call.width / ROWS, wide = call.width / COLUMNS;
        const int across = (wide + TX - 1) / TX, down = (high + TY - 1) / TY, through = (call.channels + TZ * DEEP - 1) / (TZ * DEEP);
        const int x = blockIdx.x % across, y = blockIdx.x / across % down;
        first_channel = blockIdx.x / across / down % through * (TZ * DEEP);
        sample = blockIdx.x / across / down / through;
        const int slot = x * TX + threadIdx.x % TX, line = y * TY + threadIdx.x / TX % TY;
        channel = first_channel + (int)threadIdx.x / (TX * TY) * DEEP;
        row = line * ROWS;
        column = slot * COLUMNS;
        top = y * TY * ROWS * STRIDE - PADDING;
        left = x * TX * COLUMNS * STRIDE - PADDING;
        within = slot < wide && line < high && channel < call.channels;
    }

    // The first neuron of one of the thread's channels, in a frame.
    __device__ __forceinline__ position neuron(int deep, const Call& call) const {
        return ((position)sample * call.channels + channel + deep) * call.pixels + (position)row * call.width + column;
    }

    // The first slot of one of the thread's channels, as the output lies in memory.
    __device__ __forceinline__ position slot(int deep, const Call& call) const {
        const position plane = (position)sample * call.channels + channel + deep;
        return plane * (call.pixels / CORNERS) + row / ROWS * (call.width / (COLUMNS / WIDTH_V)) + column / (COLUMNS / WIDTH_V);
    }
};

// The block's filters into shared memory, [C_IN][KERNEL][KERNEL][TZ * DEEP]: a thread's channels lie side by side.
__device__ __forceinline__ void hold_filters(float* held, const io* filters, const Tile& tile, const Call& call) {
    for (int i = threadIdx.x; i < C_IN * KERNEL * KERNEL * TZ * DEEP; i += BLOCK) {
        const int channel = tile.first_channel + i % (TZ * DEEP);
        held[i] = channel < call.channels ? to_float(filters[channel * (C_IN * KERNEL * KERNEL) + i / (TZ * DEEP)]) : 0.0f;
    }
}

// The block's part of a frame into shared memory, [C_IN][HIGH_PATCH][WIDE_PATCH]; ``frame``: of the block's sample.
__device__ __forceinline__ void hold_patch(float* patch, const io* frame, const Tile& tile, int height, int width) {
    for (int i = threadIdx.x; i < PATCH; i += BLOCK) {
        const int row = tile.top + i / WIDE_PATCH % HIGH_PATCH, column = tile.left + i % WIDE_PATCH;
        const bool inside = row >= 0 && row < height && column >= 0 && column < width;
        const int channel = i / (WIDE_PATCH * HIGH_PATCH);
        patch[i] = inside ? to_float(frame[((position)channel * height + row) * width + column]) : 0.0f;
    }
}

// Side by side in shared memory, in vectors.
__device__ __forceinline__ void read_row(const float* from, float* row) {
#pragma unroll
    for (int i = 0; i < READ; i += AT_ONCE) {
        const Pack<float, AT_ONCE> pack = *(const Pack<float, AT_ONCE>*)(from + i);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) row[i + j] = pack.x[j];
    }
}

// The thread's drives, [DEEP][NEURONS] in the order of neuron.cuh, without bias.
__device__ __forceinline__ void convolve(const float* patch, const float* filters, float (&drive)[DEEP][NEURONS]) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX % TY, tz = threadIdx.x / (TX * TY);
    const float* from = patch + ty * ROWS * STRIDE * WIDE_PATCH + tx * COLUMNS * STRIDE;
    const float* weight = filters + tz * DEEP;
#pragma unroll
    for (int d = 0; d < DEEP; d++)
#pragma unroll
        for (int n = 0; n < NEURONS; n++) drive[d][n] = 0.0f;
#pragma unroll 1
    for (int channel = 0; channel < C_IN; channel++) {
        float rows[(ROWS - 1) * STRIDE + KERNEL][READ];
#pragma unroll
        for (int a = 0; a < KERNEL; a++) {
            // Each row is read once, and late: the second row of neurons looks at what the first will come to.
            if (ROWS == 1 || a < STRIDE) read_row(from + a * WIDE_PATCH, rows[a]);
            if (ROWS == 2) read_row(from + (a + STRIDE) * WIDE_PATCH, rows[a + (ROWS - 1) * STRIDE]);
#pragma unroll
            for (int b = 0; b < KERNEL; b++) {
                const Pack<float, DEEP> w = *(const Pack<float, DEEP>*)(weight + (a * KERNEL + b) * (TZ * DEEP));
#pragma unroll
                for (int n = 0; n < NEURONS; n++) {
                    const int corner = n / WIDTH_V, row = corner / 2, column = WINDOWS ? n % WIDTH_V * 2 + corner % 2 : n;
#pragma unroll
                    for (int d = 0; d < DEEP; d++) drive[d][n] = fmaf(rows[row * STRIDE + a][column * STRIDE + b], w.x[d], drive[d][n]);
                }
            }
        }
        from += HIGH_PATCH * WIDE_PATCH;
        weight += KERNEL * KERNEL * TZ * DEEP;
    }
}

// What memory would hold of a channel's drives: bias and all, in the frames' format.
__device__ __forceinline__ void finish(float* drive, const io* bias, int channel) {
#if BIAS
    const float added = to_float(bias[channel]);
#endif
#pragma unroll
    for (int n = 0; n < NEURONS; n++) {
        io rounded;
#if BIAS
        drive[n] += added;
#endif
        put(rounded, drive[n]);
        drive[n] = to_float(rounded);
    }
}
