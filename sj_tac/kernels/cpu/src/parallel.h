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

// scale and shift of neurons that lie side by side. In channels_last channel follows upon channel, pixel after pixel: they
// are written out so far that a block of neurons may begin at each channel.
template <class W> struct Affine {
    const W *scale, *shift;
    bool along;
    Room<W> room;
    Affine(const Call& a, i64 block)
        : scale((const W*)a.scale), shift((const W*)a.shift), along(a.last), room(a.scale && a.last ? 2 * (a.channels + block) : 0) {
        if (!scale || !along) return;
        const i64 n = a.channels + block;
        for (i64 i = 0; i < n; i++) room[i] = scale[i % a.channels], room[n + i] = shift[i % a.channels];
        scale = room, shift = room + n;
    }
};
