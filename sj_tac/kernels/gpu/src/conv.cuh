// A convolution of a few input channels for the threads of a block: a tile of a map, of several output channels. Frames and
// filters are float [G, N, C_IN, height, width] and [C, C_IN, KERNEL, KERNEL], or half.
//
// The order of additions is fixed, in either memory format. A drive begins at 0 and takes one fmaf (rounded once) for every
// input channel, in each for every row of the filter, in each for every column; padding is zeros, which are multiplied as
// well. The bias is added last. Arithmetic is float; the sum is then rounded to the frames' format, as it would be on its way
// through memory.
//
// Threads lie side by side as the output does. Contiguous: along rows, so that filters are the same for a warp, and what it
// looks at lies side by side. In channels_last: along the channels; a warp looks at one place of the map, or a few.
//
// Macros beside those of neuron.cuh:
//   C_IN, KERNEL, STRIDE, PADDING    of the convolution, the same along rows and columns
//   BIAS                             it has one
//   FRAMES_LAST, FILTERS_LAST        frames, and filters, are channels_last
//   TX, TY, TZ                       threads of a block along a row of slots, along rows, and along channels
//   DEEP                             sets of WIDTH_V slots of a thread. Contiguous: its output channels, a divisor of all; in
//                                    channels_last: slots along a row, each of WIDTH_V channels
//   FITS                             no thread's slots reach past the end of a row
//   AHEAD                            numbers of the next frame that a thread holds while it works on one; 0: none
//   RESIDENT                         threads that a multiprocessor is to hold at once, which bounds their registers; 0: any

// Slots of a thread along a row, and its channels.
#if LAST
#define ALONG DEEP
#define CHANNELS WIDTH_V
#else
#define ALONG WIDTH_V
#define CHANNELS DEEP
#endif
// Neurons of a thread, along a row and rows.
#define SIDE (WINDOWS ? 2 : 1)
#define COLUMNS (SIDE * ALONG)
#define ROWS SIDE
// Numbers of a row that they look at, and how many of them are read from shared memory at once, and in all.
#define SPAN ((COLUMNS - 1) * STRIDE + KERNEL)
#define AT_ONCE (COLUMNS * STRIDE % 4 == 0 ? 4 : COLUMNS * STRIDE % 2 == 0 ? 2 : 1)
#define READ ((SPAN + AT_ONCE - 1) / AT_ONCE * AT_ONCE)
// Input channels whose code is written out one behind the other: all of small filters, which saves an instruction of a drive
// or two. Contiguous: one.
#define AT_ONE_GO (LAST && C_IN * KERNEL * KERNEL <= 18 ? C_IN : 1)
// What a block looks at: columns, rows, and all numbers; and what its filters take. Vectors begin at multiples of 4 numbers.
#define WIDE_PATCH (((TX - 1) * COLUMNS * STRIDE + READ + 3) / 4 * 4)
#define HIGH_PATCH ((TY * ROWS - 1) * STRIDE + KERNEL)
#define PATCH (C_IN * HIGH_PATCH * WIDE_PATCH)
#define FILTERS ((C_IN * KERNEL * KERNEL * TZ * CHANNELS + 3) / 4 * 4)

// Where a thread of this number stands in its block.
#if LAST
#define THREAD_X(thread) ((thread) / TZ % TX)
#define THREAD_Y(thread) ((thread) / (TZ * TX))
#define THREAD_Z(thread) ((thread) % TZ)
#else
#define THREAD_X(thread) ((thread) % TX)
#define THREAD_Y(thread) ((thread) / TX % TY)
#define THREAD_Z(thread) ((thread) / (TX * TY))
#endif

// The part of the output that a thread has, and its block's part of the input.
struct Tile {
    int sample, channel, first_channel;  // the first channels of the thread and of the block
    int row, column;                     // of the first neuron
    int top, left;                       // where the block's patch begins, above and left of the map where it is padded
    bool within;                         // the thread has neurons at all

    __device__ __forceinline__ explicit Tile(const Call& call) {
        const int high = call.pixels / call.width / ROWS, wide = FITS ? call.width / COLUMNS : (call.width + COLUMNS - 1) / COLUMNS;
        const int across = (wide + TX - 1) / TX, down = (high + TY - 1) / TY, deep = TZ * CHANNELS;
        const int through = (call.channels + deep - 1) / deep;
        const int x = blockIdx.x % across, y = blockIdx.x / across % down;
        first_channel = blockIdx.x / across / down % through * deep;
        sample = blockIdx.x / across / down / through;
        const int slot = x * TX + THREAD_X(threadIdx.x), line = y * TY + THREAD_Y(threadIdx.x);
        channel = first_channel + THREAD_Z((int)threadIdx.x) * CHANNELS;
        row = line * ROWS;
        column = slot * COLUMNS;
        top = y * TY * ROWS * STRIDE - PADDING;
        left = x * TX * COLUMNS * STRIDE - PADDING;
        within = slot < wide && line < high && channel < call.channels;
    }

    // The channel of one of the thread's sets of slots: the first, where it has several.
    __device__ __forceinline__ int channel_of(int deep) const { return LAST ? channel : channel + deep; }

    // Whether a set of the thread's slots is on the map.
    __device__ __forceinline__ bool has(int deep, const Call& call) const {
        return !LAST || FITS || column + deep * SIDE < call.width;
    }

    // The first neuron of a set, in a frame.
    __device__ __forceinline__ position neuron(int deep, const Call& call) const {
#if LAST
        return ((position)sample * call.pixels + (position)row * call.width + column + deep * SIDE) * call.channels + channel;
#else
        return ((position)sample * call.channels + channel + deep) * call.pixels + (position)row * call.width + column;
#endif
    }

    // The first slot of a set, as the output lies in memory.
    __device__ __forceinline__ position slot(int deep, const Call& call) const {
#if LAST
        const position line = (position)sample * (call.pixels / call.width / ROWS) + row / ROWS;
        return (line * (call.width / SIDE) + column / SIDE + deep) * call.channels + channel;
#else
        const position plane = (position)sample * call.channels + channel + deep;
        return plane * (call.pixels / CORNERS) + row / ROWS * (call.width / SIDE) + column / SIDE;
#endif
    }
};

// The block's filters into shared memory, [C_IN][KERNEL][KERNEL][TZ * CHANNELS]: a thread's channels lie side by side.
__device__ __forceinline__ void hold_filters(float* held, const io* filters, const Tile& tile, const Call& call) {
    const int taps = KERNEL * KERNEL, deep = TZ * CHANNELS;
    for (int i = threadIdx.x; i < C_IN * taps * deep; i += BLOCK) {
        const int channel = tile.first_channel + i % deep, at = i / deep;
        const int from = FILTERS_LAST ? at % taps * C_IN + at / taps : at;
        held[i] = channel < call.channels ? to_float(filters[channel * (C_IN * taps) + from]) : 0.0f;
    }
}

// Where a pixel's number of an input channel is in a frame of one sample.
__device__ __forceinline__ position in_frame(int channel, int row, int column, int height, int width) {
    if (FRAMES_LAST) return ((position)row * width + column) * C_IN + channel;
    return ((position)channel * height + row) * width + column;
}

// The block's part of a frame into shared memory, [C_IN][HIGH_PATCH][WIDE_PATCH]; ``frame``: of the block's sample.
__device__ __forceinline__ void hold_patch(float* patch, const io* frame, const Tile& tile, int height, int width) {
    for (int i = threadIdx.x; i < PATCH; i += BLOCK) {
        const int row = tile.top + i / WIDE_PATCH % HIGH_PATCH, column = tile.left + i % WIDE_PATCH;
        const bool inside = row >= 0 && row < height && column >= 0 && column < width;
        const int channel = i / (WIDE_PATCH * HIGH_PATCH);
        patch[i] = inside ? to_float(frame[in_frame(channel, row, column, height, width)]) : 0.0f;
    }
}

#if AHEAD
// The same in two halves: a thread's numbers of the block's part of a frame are asked for before it works on another one, and
// laid down behind that, so that it need not wait. Where they are is found out once.
struct Ahead {
    position from[AHEAD];
    io numbers[AHEAD];

    __device__ __forceinline__ Ahead(const Tile& tile, int height, int width) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = threadIdx.x + i * BLOCK;
            const int row = tile.top + at / WIDE_PATCH % HIGH_PATCH, column = tile.left + at % WIDE_PATCH;
            const bool inside = at < PATCH && row >= 0 && row < height && column >= 0 && column < width;
            from[i] = inside ? in_frame(at / (WIDE_PATCH * HIGH_PATCH), row, column, height, width) : -1;
        }
    }

    __device__ __forceinline__ void ask(const io* frame) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) numbers[i] = from[i] < 0 ? (io)0 : frame[from[i]];
    }

    __device__ __forceinline__ void lay(float* patch) const {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (threadIdx.x + i * BLOCK < PATCH) patch[threadIdx.x + i * BLOCK] = to_float(numbers[i]);
    }
};
#endif

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
    const int tx = THREAD_X(threadIdx.x), ty = THREAD_Y(threadIdx.x), tz = THREAD_Z(threadIdx.x);
    const float* from = patch + ty * ROWS * STRIDE * WIDE_PATCH + tx * COLUMNS * STRIDE;
    const float* weight = filters + tz * CHANNELS;
#pragma unroll
    for (int d = 0; d < DEEP; d++)
#pragma unroll
        for (int n = 0; n < NEURONS; n++) drive[d][n] = 0.0f;
#pragma unroll AT_ONE_GO
    for (int channel = 0; channel < C_IN; channel++) {
        float rows[(ROWS - 1) * STRIDE + KERNEL][READ];
#pragma unroll
        for (int a = 0; a < KERNEL; a++) {
            // Each row is read once, and late: the second row of neurons looks at what the first will come to.
            if (ROWS == 1 || a < STRIDE) read_row(from + a * WIDE_PATCH, rows[a]);
            if (ROWS == 2) read_row(from + (a + STRIDE) * WIDE_PATCH, rows[a + (ROWS - 1) * STRIDE]);
#pragma unroll
            for (int b = 0; b < KERNEL; b++) {
                const Pack<float, CHANNELS> w = *(const Pack<float, CHANNELS>*)(weight + (a * KERNEL + b) * (TZ * CHANNELS));
#pragma unroll
                for (int n = 0; n < NEURONS; n++) {
                    const int corner = n / WIDTH_V, row = corner / 2;
#pragma unroll
                    for (int d = 0; d < DEEP; d++) {
                        const int column = (LAST ? d : n % WIDTH_V) * SIDE + corner % 2, channel = LAST ? n % WIDTH_V : d;
                        drive[d][n] = fmaf(rows[row * STRIDE + a][column * STRIDE + b], w.x[channel], drive[d][n]);
                    }
                }
            }
        }
        from += HIGH_PATCH * WIDE_PATCH;
        weight += KERNEL * KERNEL * TZ * CHANNELS;
    }
}

// What memory would hold of a set's drives: bias and all, in the frames' format; ``channel``: its first.
__device__ __forceinline__ void finish(float* drive, const io* bias, int channel) {
#if BIAS
    float added[WIDTH_V];
#pragma unroll
    for (int j = 0; j < WIDTH_V; j++) added[j] = to_float(bias[channel + (LAST ? j : 0)]);
#endif
#pragma unroll
    for (int n = 0; n < NEURONS; n++) {
        io rounded;
#if BIAS
        drive[n] += added[n % WIDTH_V];
#endif
        put(rounded, drive[n]);
        drive[n] = to_float(rounded);
    }
}
