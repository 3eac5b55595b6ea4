// Which windows of a pool a neuron lies in, and at which steps their gradient is its own.
#pragma once
#include "words.h"

// Windows that neurons lie in which are side by side: where their gradient lies, and at which steps it is these neurons'.
template <class S> struct Windows {
    struct Window {
        const S* go;
        const typename Vector<Wide<S>>::Word* takes;  // null: at every step
    };
    const Room<Window> window;
    int n = 0;
    i64 row = 0, sheet = 0;  // from one row of groups to the next, and from one BITS steps to the next
    explicit Windows(i64 most) : window(most) {}
};

// The windows that the neurons of some rows of a plane lie in. Rows are looked at one after the other, from the top of a unit:
// in contiguous maps a few together, so that they fill a block, in channels_last one, of which each pixel is run by itself.
template <class S> struct Unpooling {
    typedef Wide<S> W;
    typedef typename Vector<W>::Word Word;
    const Call& a;
    const Words<W>& words;
    const i64 down, beside, row, groups;  // windows that a neuron lies in by rows and columns; numbers in a row; rows of `go`
    const i64 together;  // rows
    Room<Word> takes;    // [down, beside, sheets, together, row] steps at which a window's maximum is a neuron's
    Room<Word> earlier;  // [down, sheets, out_row] of each window that the row is in: steps at which a neuron above fires
    Room<Word> none;     // [out_row] of windows that begin in the row: steps at which none of their neurons fires
    Room<S> given;       // [down, beside, groups, together, row] contiguous maps: gradients of windows, brought to their neurons
    i64 plane = 0, r = 0, first = 0;

    Unpooling(const Call& a, const Words<W>& words)
        : a(a), words(words), down((a.kh + a.sh - 1) / a.sh), beside((a.kw + a.sw - 1) / a.sw), row(a.row()),
          groups((a.steps + a.group - 1) / a.group), together(a.last ? 1 : std::min(a.height, (255 + row) / row)),
          takes(a.pool == MAX_POOL ? down * beside * words.sheets * together * row : 0),
          earlier(a.pool == MAX_POOL ? down * words.sheets * a.out_row() : 0), none(a.out_row()),
          given(a.last ? 0 : down * beside * groups * together * row) {}

    i64 first_window(i64 r) const { return r + a.ph >= a.kh ? (r + a.ph - a.kh) / a.sh + 1 : 0; }
    i64 last_window(i64 r) const { return std::min(a.out_height - 1, (r + a.ph) / a.sh); }
    i64 top(i64 o) const { return std::max<i64>(0, o * a.sh - a.ph); }
    i64 bottom(i64 o) const { return std::min(a.height, o * a.sh - a.ph + a.kh); }
    i64 slot(i64 o) const { return o % down * beside; }
    Word* takes_of(i64 slot, i64 s) const { return takes + (slot * words.sheets + s) * together * row; }
    Word* earlier_of(i64 o, i64 s) const { return earlier + (o % down * words.sheets + s) * a.out_row(); }

    // each(q, c, b): column c of the map is column b of the windows in column q. From left to right in each window.
    template <class Each> void over_columns(Each each) const {
        const auto columns = [&](i64 kw, i64 sw) {
            // Windows in [low, high) lie within the map, and need no look at its borders.
            const i64 low = std::min(a.out_width, (a.pw + sw - 1) / sw);
            const i64 high = std::max(low, std::min(a.out_width, a.width + a.pw < kw ? 0 : (a.width + a.pw - kw) / sw + 1));
            const auto at_border = [&](i64 q) {
                const i64 c = q * sw - a.pw;
                for (i64 b = std::max<i64>(0, -c); b < std::min(kw, a.width - c); b++) each(q, c + b, b);
            };
            for (i64 q = 0; q < low; q++) at_border(q);
            for (i64 q = low; q < high; q++)
                for (i64 b = 0; b < kw; b++) each(q, q * sw - a.pw + b, b);
            for (i64 q = high; q < a.out_width; q++) at_border(q);
        };
        if (a.kw == 2 && a.sw == 2) columns(2, 2);
        else if (a.kw == 3 && a.sw == 2) columns(3, 2);
        else columns(a.kw, a.sw);
    }

    // ORs rows [begin, end) of the windows in row o into a word for each window.
    void or_rows(Word* to, i64 begin, i64 end, i64 s) const {
        const i64 n = a.across();
        for (i64 r = begin; r < end; r++) {
            const Word* fired = words.at(r, s);
            over_columns([&](i64 q, i64 c, i64) {
                for (i64 i = 0; i < n; i++) to[q * n + i] |= fired[c * n + i];
            });
        }
    }

    void begin(i64 of, i64 at) {
        plane = of, r = at;
        if (a.pool != MAX_POOL) return;
        for (i64 o = first_window(r); o <= last_window(r); o++)
            for (i64 s = 0; s < words.sheets; s++) {
                memset(earlier_of(o, s), 0, a.out_row() * sizeof(Word));
                or_rows(earlier_of(o, s), top(o), r, s);
            }
    }

    // At which steps the maxima of the windows in row o are those of neurons in row r.
    void take(i64 o, i64 s) {
        const i64 n = a.across(), stride = words.sheets * together * row, sw = a.sw;
        Word *before = earlier_of(o, s), *to = takes_of(slot(o), s) + (r - first) * row;
        const Word* fired = words.at(r, s);
        memset(none, 0, a.out_row() * sizeof(Word));
        if (r == top(o)) {
            memset(before, 0, a.out_row() * sizeof(Word));
            or_rows(none, r, bottom(o), s);
            for (i64 i = 0; i < a.out_row(); i++) none[i] = ~none[i];
        }
        if (n == 1) {
            Word *const __restrict found = to, *const __restrict seen = before, *const __restrict silent = none;
            over_columns([=](i64 q, i64 c, i64 b) {
                const Word bits = fired[c];
                found[(b < sw ? 0 : b / sw * stride) + c] = (bits & ~seen[q]) | silent[q];
                seen[q] |= bits, silent[q] = 0;
            });
            return;
        }
        over_columns([&](i64 q, i64 c, i64 b) {
            Word *found = to + (b < sw ? 0 : b / sw * stride) + c * n, *seen = before + q * n, *silent = none + q * n;
            const Word* bits = fired + c * n;
            for (i64 i = 0; i < n; i++) {
                found[i] = (bits[i] & ~seen[i]) | silent[i];
                seen[i] |= bits[i], silent[i] = 0;
            }
        });
    }

    // Looks at the next rows, of which there are n.
    void look(i64 n) {
        if (a.pool == MAX_POOL) memset(takes, 0, down * beside * words.sheets * together * row * sizeof(Word));
        if (!a.last) memset((void*)given.at, 0, down * beside * groups * together * row * sizeof(S));
        for (first = r; r < first + n; r++) look_at_row();
    }

    void look_at_row() {
        for (i64 o = first_window(r); o <= last_window(r); o++) {
            for (i64 s = 0; a.pool == MAX_POOL && s < words.sheets; s++) take(o, s);
            for (i64 group = 0; !a.last && group < groups; group++) {
                const S* go = (const S*)a.go + group * a.emitted() + (plane * a.out_height + o) * a.out_width;
                S* to = given + ((slot(o) * groups + group) * together + r - first) * row;
                const i64 stride = groups * together * row, sw = a.sw;
                over_columns([=](i64 q, i64 c, i64 b) { to[(b < sw ? 0 : b / sw * stride) + c] = go[q]; });
            }
        }
    }

    // Of the neurons of column c of the row in channels_last, of all rows else.
    void windows_of(i64 c, Windows<S>& windows) const {
        windows.n = 0, windows.sheet = together * row, windows.row = a.last ? a.emitted() : together * row;
        const auto add = [&](i64 slot, const S* go) {
            windows.window[windows.n++] = {go, a.pool == MAX_POOL ? takes_of(slot, 0) + c * a.across() : nullptr};
        };
        if (!a.last)
            for (i64 j = 0; j < down * beside; j++) add(j, given + j * groups * together * row);
        for (i64 o = first_window(first); a.last && o <= last_window(first); o++)
            for (i64 q = (c + a.pw) / a.sw; q >= 0 && c + a.pw - q * a.sw < a.kw; q--)
                if (q < a.out_width)
                    add(slot(o) + (c + a.pw - q * a.sw) / a.sw, (const S*)a.go + ((plane * a.out_height + o) * a.out_width + q) * a.channels);
    }
};
