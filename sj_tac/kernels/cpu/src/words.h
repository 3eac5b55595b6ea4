// Steps of neurons as bits of words, one bit a step, and the OR of words over the windows of a pool.
#pragma once
#include "forward_block.h"

// Words of the rows of one plane: of each neuron one word for every BITS steps, a sheet of rows for each.
template <class W> struct Words {
    typedef typename Vector<W>::Word Word;
    static constexpr int BITS = 8 * sizeof(Word);
    const i64 row, sheet, sheets;
    Room<Word> room;
    i64 plane = -1, first = 0, next = 0;  // which rows they are of

    Words(const Call& a, i64 rows)
        : row(a.row()), sheet((rows * row + 15) / 16 * 16), sheets((a.steps + BITS - 1) / BITS), room(sheet * sheets) {}

    Word* at(i64 r, i64 s) const { return room + s * sheet + (r - first) * row; }

    // Steps the rows [begin, end) of a plane; those of the call before that are among them are kept.
    template <class S> void step(const Call& a, const Affine<W>& affine, i64 of, i64 begin, i64 end) {
        i64 have = begin;
        if (of == plane && begin >= first && next > begin) {
            for (i64 s = 0; s < sheets; s++) memmove(room + s * sheet, at(begin, s), (next - begin) * row * sizeof(Word));
            have = next;
        }
        plane = of, first = begin, next = std::max(have, end);
        if (have < end) {
            const i64 begin = (of * a.height + have) * row;
            step_in_mode<S, S, false>(a, affine, begin, (end - have) * row, affine.place(begin), at(have, 0), sheet);
        }
    }
};
