// Pieces of a call on torch's own threads, and memory for one piece.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include "call.h"

// GOMP_parallel of the OpenMP library that torch has loaded: one pool of threads serves both. Null: one thread.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
extern Parallel gomp_parallel;

// work(piece) for each piece, in any order.
template <class Work> static void share(i64 pieces, i64 threads, const Work& work) {
    struct Team {
        const Work& work;
        i64 pieces;
        std::atomic<i64> next;
    } team{work, pieces, {0}};
    const auto member = [](void* data) {
        Team& team = *(Team*)data;
        for (i64 piece; (piece = team.next++) < team.pieces;) team.work(piece);
    };
    threads = std::min(threads, pieces);
    if (threads > 1 && gomp_parallel) gomp_parallel(member, &team, (unsigned)threads, 0);
    else member(&team);
}

// Memory for n numbers, aligned for vectors. There is no way on without it.
template <class T> struct Room {
    T* at;
    explicit Room(i64 n) : at((T*)std::aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64)) {
        if (!at) std::abort();
    }
    ~Room() { std::free(at); }
    Room(const Room&) = delete;
    operator T*() const { return at; }
};

// scale and shift of neurons that lie side by side. In channels_last each neuron has another channel, pixel after pixel, and on
// small maps each few: there (unless the period is longer than what a thread takes at a time), `along` with the neurons, both are written out for one period of them, and for a block more, so
// that blocks are full and may begin anywhere. Else a run of neurons has one channel.
template <class W> struct Affine {
    const W *scale, *shift;
    const i64 map, period;
    const bool along;
    Room<W> room;
    Affine(const Call& a, i64 block)
        : scale((const W*)a.scale), shift((const W*)a.shift), map(a.last ? 1 : a.height * a.width), period(a.channels * map),
          along(a.last || (map < 64 && period <= 4096)), room(a.scale && along ? 2 * (period + block) : 0) {
        if (!scale || !along) return;
        const i64 n = period + block;
        for (i64 i = 0, c = 0; i < n; c = c + 1 < a.channels ? c + 1 : 0)
            for (const i64 end = std::min(n, i + map); i < end; i++) room[i] = scale[c], room[n + i] = shift[c];
        scale = room, shift = room + n;
    }

    // Of neuron `at` of a frame: where its numbers lie in scale and shift.
    i64 place(i64 at) const { return along ? at % period : at / map % (period / map); }
    // How many neurons from `at` on may run together.
    i64 run(i64 at) const { return along || !scale ? INT64_MAX : map - at % map; }
};
