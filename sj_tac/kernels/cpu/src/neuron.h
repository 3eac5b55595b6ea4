// A neuron's step and the derivative of its spike. The order of operations is SpikingJelly's, so that spikes are the same.
#pragma once
#include "call.h"
#include "vectors.h"

// ZERO: the neuron resets to exactly 0, as most do, and rests there.
template <class W, int MODE, bool ZERO> struct Neuron {
    typedef typename Vector<W>::F F;
    typedef typename Vector<W>::I I;
    W tau, rest, threshold;
    bool hard;
    W decay = 1, gain = 1;

    explicit Neuron(const Call& a) : tau(W(a.tau)), rest(W(a.rest)), threshold(W(a.threshold)), hard(a.hard) {}

    // MERGED: the numbers of the step on drive g.
    void on_drive(const Call& a, i64 g) {
        if (MODE == MERGED) decay = ((const W*)a.linear)[2 * g], gain = ((const W*)a.linear)[2 * g + 1];
    }

    F charged(F x, F v) const {
        const F above = ZERO ? v : v - rest;
        if (MODE == LIF_DECAY) return v + (x - above) / tau;
        if (MODE == LIF) return v - above / tau + x;
        if (MODE == PLIF_DECAY) return v + (x - above) * tau;
        if (MODE == PLIF) return v - above * tau + x;
        if (MODE == IF) return v + x;
        return ZERO ? decay * v + gain * x : rest + decay * above + gain * x;
    }

    I fires(F h) const { return h >= threshold; }

    F reset(F h, I fired) const {
        if (ZERO) return fired ? F{} : h;
        return fired ? (hard ? F{} + rest : h - threshold) : h;
    }
};

// d spike / d h of n vectors of voltages h, numbered as in host.FUSED_SURROGATES.
template <class F, class W> static inline void slopes(i64 surrogate, W alpha, W threshold, const F* h, F* out, i64 n) {
    constexpr double PI = 3.14159265358979323846;
    const W half = alpha / 2, square = alpha * alpha, angle = W(double(alpha) * PI / 2), inverse = 1 / alpha;
    const W erf = W(double(alpha) / std::sqrt(PI));
    const auto each = [&](const auto& f) {
        for (i64 i = 0; i < n; i++) out[i] = f(h[i] - threshold);
    };
    switch (surrogate) {
        case 0: return each([&](F z) { const F s = 1 / (1 + exponential(-alpha * z)); return (1 - s) * s * alpha; });  // Sigmoid
        case 1: return each([&](F z) { z = z * angle; return half / (1 + z * z); });                                  // ATan
        case 2: return each([&](F z) { z = alpha - square * magnitude(z); return z > 0 ? z : F{}; });                 // PiecewiseQuadratic
        case 3: return each([&](F z) { return half * exponential(-alpha * magnitude(z)); });                          // PiecewiseExp
        case 4: return each([&](F z) { z = inverse + magnitude(z); return inverse / 2 / (z * z); });                  // SoftSign
        case 5: return each([&](F z) { z = 1 + magnitude(z); return alpha / (z * z); });                              // SuperSpike
        default: return each([&](F z) { z = alpha * z; return erf * exponential(-z * z); });                          // Erf
    }
}
