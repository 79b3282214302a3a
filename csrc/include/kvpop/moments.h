// Moments of a head's evicted tokens, residuals of token values, and corrections of outputs (MomentKV;
// DESIGN "Scores from attention, and corrections"). The moments are mean key [D], mean value [D], and the sum of products of their
// deviations [D, D] with one row per key channel, all float32, after the scorer's state. The number of
// evicted tokens follows from the position.

#pragma once

namespace kvpop::KVPOP_ISA {

struct Moments {
    const State state;
    int64_t size, first;  // D; offset of the moments in the state

    Moments(const DecodeStep& a, int64_t r, int64_t h)
        : state{a, r, h}, size(a.size), first(a.scorer.state_floats()) {}

    static int64_t floats(int64_t size) { return size * size + 2 * size; }

    // Calls f(words, from, count) for the contiguous pieces of [at, at + count).
    template <class F>
    KVPOP_INLINE void pieces(int64_t at, int64_t count, const F& f) const {
        for (int64_t from = 0, n; from < count; from += n) {
            float* words = state.words(first + at + from, count - from, n);
            f(words, from, n);
        }
    }
    // Returns the products [D, D] contiguously, in `copy` if they are not contiguous in the state.
    const float* products(float* copy) const {
        int64_t n;
        const float* words = state.words(first + 2 * size, size * size, n);
        if (n == size * size) return words;
        pieces(2 * size, size * size, [&](const float* from, int64_t at, int64_t count) {
            __builtin_memcpy(copy + at, from, size_t(count) * 4);
        });
        return copy;
    }
    void means(float* key, float* value) const {
        pieces(0, size, [&](const float* from, int64_t at, int64_t count) { __builtin_memcpy(key + at, from, size_t(count) * 4); });
        pieces(size, size, [&](const float* from, int64_t at, int64_t count) { __builtin_memcpy(value + at, from, size_t(count) * 4); });
    }
    // Adds x = [k; v] as token n, counted from 1 (Welford). deviation [D]: scratch.
    void take_in(float n, const float* x, float* deviation) const {
        const float* value = x + size;
        pieces(size, size, [&](float* mean, int64_t at, int64_t count) {
            for (int64_t i = 0; i < count; i++) {
                if (n == 1) mean[i] = 0;
                deviation[at + i] = value[at + i] - mean[i];
                mean[i] += deviation[at + i] / n;
            }
        });
        pieces(0, size, [&](float* mean, int64_t at, int64_t count) {
            for (int64_t c = 0; c < count; c++) {
                if (n == 1) mean[c] = 0;
                mean[c] += (x[at + c] - mean[c]) / n;
                const float own = x[at + c] - mean[c];
                pieces(2 * size + (at + c) * size, size, [&](float* row, int64_t from, int64_t many) {
                    if (n == 1)
                        for (int64_t i = 0; i < many; i++) row[i] = 0;
                    for (int64_t i = 0; i < many; i++) row[i] += own * deviation[from + i];
                });
            }
        });
    }
};

// |v - vb - scale * Sig k| of the tokens in slots [from, end), at most BATCH, with moments of n > 0 evicted
// tokens.
template <class T>
void residuals(const DecodeStep& a, int64_t r, int64_t h, int64_t from, int64_t end, float n, const float* products,
               const float* mean_value, float* keys, float* predicted, float* out) {
    for (int64_t slot = from; slot < end; slot++) {
        const T* key = key_row<T>(a, r, h, slot);
        for (int64_t e = 0; e < a.size; e++) keys[(slot - from) * a.size + e] = to_float(key[e]);
    }
    product(end - from, keys, a.size, products, a.size, a.size, predicted, a.size);
    for (int64_t slot = from; slot < end; slot++) {
        const T* value = value_row<T>(a, r, h, slot);
        float squares = 0;
        for (int64_t e = 0; e < a.size; e++) {
            const float left = to_float(value[e]) - mean_value[e] - a.scale / n * predicted[(slot - from) * a.size + e];
            squares += left * left;
        }
        out[slot] = __builtin_sqrtf(squares);
    }
}

inline int64_t residual_scratch(const DecodeStep& a) {
    if (a.scorer.kind != ScorerKind::MomentResidual) return 0;
    return 2 * Pieces::round(BATCH * a.size) + 2 * Pieces::round(a.size) + Pieces::round(a.size * a.size) +
           Pieces::round(a.mass_row);
}

// Returns residuals [mass_row] by slot of the tokens that the step ranks: the one in slot `leaving` and the
// long-range ones.
template <class T>
float* residuals_of(const DecodeStep& a, int64_t r, int64_t h, int64_t leaving, int64_t used, Pieces pieces) {
    const Moments moments(a, r, h);
    float *keys = pieces.take(BATCH * a.size), *predicted = pieces.take(BATCH * a.size), *out = pieces.take(a.mass_row);
    float *mean_key = pieces.take(a.size), *mean_value = pieces.take(a.size), *copy = pieces.take(a.size * a.size);
    const int64_t evicted = a.evicted(r, h, a.position(r));
    const float* products = evicted ? moments.products(copy) : copy;
    if (evicted) moments.means(mean_key, mean_value);
    for (int64_t i = 0; i < a.size && !evicted; i++) mean_value[i] = 0;
    for (int64_t i = 0; i < a.size * a.size && !evicted; i++) copy[i] = 0;
    const float n = evicted ? float(evicted) : 1;
    residuals<T>(a, r, h, leaving, leaving + 1, n, products, mean_value, keys, predicted, out);
    for (int64_t slot = a.roles_of(r).first_long(); slot < used; slot += BATCH)
        residuals<T>(a, r, h, slot, slot + BATCH < used ? slot + BATCH : used, n, products, mean_value, keys, predicted, out);
    return out;
}

// Estimated contribution of the evicted tokens to a head's outputs, per query head: their share of the
// softmax and their output [D].
struct Correction {
    float *share, *out;
};

inline int64_t correction_scratch(const DecodeStep& a) {
    if (!a.keeps_moments()) return 0;
    return Pieces::round(a.group) + 2 * Pieces::round(a.group * a.size) + 2 * Pieces::round(a.size) +
           Pieces::round(a.size * a.size);
}

// maximum, total [G]: of the softmax over the retained tokens. n: number of evicted tokens, at least one.
inline Correction correction(const DecodeStep& a, int64_t r, int64_t h, float n, const float* maximum, const float* total,
                             Pieces pieces) {
    const Moments moments(a, r, h);
    const Correction found{pieces.take(a.group), pieces.take(a.group * a.size)};
    float* q = pieces.take(a.group * a.size);
    float *mean_key = pieces.take(a.size), *mean_value = pieces.take(a.size), *copy = pieces.take(a.size * a.size);
    const float* products = moments.products(copy);
    moments.means(mean_key, mean_value);
    for (int64_t g = 0; g < a.group; g++)
        for (int64_t e = 0; e < a.size; e++) q[g * a.size + e] = read_q(a, r, h * a.group + g, e);
    for (int64_t g = 0; g < a.group; g += BATCH)
        product(a.group - g < BATCH ? a.group - g : BATCH, q + g * a.size, a.size, products, a.size, a.size,
                found.out + g * a.size, a.size);
    for (int64_t g = 0; g < a.group; g++) {
        const float mass = __builtin_logf(n) + a.scale * dot(q + g * a.size, mean_key, a.size);
        found.share[g] = 1 / (1 + total[g] * __builtin_expf(maximum[g] - mass));
        for (int64_t e = 0; e < a.size; e++)
            found.out[g * a.size + e] = mean_value[e] + a.scale / n * found.out[g * a.size + e];
    }
    return found;
}

}  // namespace kvpop::KVPOP_ISA
