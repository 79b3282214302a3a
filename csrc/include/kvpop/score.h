// The scorers' formulas (kvpop_vllm/kernels/reference/scoring.py) for one token of one head, float32.

#pragma once

namespace kvpop::KVPOP_ISA {

KVPOP_INLINE float dot(const float* a, const float* b, int64_t n) {
    vf s0{}, s1{};
    int64_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        s0 += load(a + i) * load(b + i);
        s1 += load(a + i + VL) * load(b + i + VL);
    }
    float s = sum(s0 + s1);
    for (; i < n; i++) s += a[i] * b[i];
    return s;
}

// WIDE vectors of columns of x [rows] times w [rows, columns], ROWS rows at a time in separate accumulators.
template <int WIDE, int ROWS>
KVPOP_INLINE void matvec_columns(const float* x, const float* w, int64_t rows, int64_t columns, float* out) {
    vf acc[ROWS][WIDE] = {};
    for (int64_t i = 0; i < rows; i += ROWS)
        for (int j = 0; j < ROWS; j++)
            for (int c = 0; c < WIDE; c++) acc[j][c] += x[i + j] * load(w + (i + j) * columns + c * VL);
    for (int c = 0; c < WIDE; c++) {
        vf s = acc[0][c];
        for (int j = 1; j < ROWS; j++) s += acc[j][c];
        store(out + c * VL, s);
    }
}

// out [columns] = x [rows] times w [rows, columns]; rows is a multiple of 4.
inline void matvec(const float* x, const float* w, int64_t rows, int64_t columns, float* out) {
    int64_t c = 0;
    for (; c + 4 * VL <= columns; c += 4 * VL) matvec_columns<4, 2>(x, w + c, rows, columns, out + c);
    for (; c + 2 * VL <= columns; c += 2 * VL) matvec_columns<2, 4>(x, w + c, rows, columns, out + c);
    for (; c + VL <= columns; c += VL) matvec_columns<1, 4>(x, w + c, rows, columns, out + c);
    for (; c < columns; c++) {
        float s = 0;
        for (int64_t i = 0; i < rows; i++) s += x[i] * w[i * columns + c];
        out[c] = s;
    }
}

// In place; the buffer reaches to the next multiple of VL.
inline void silu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += VL) store(x + i, load(x + i) / (1.0f + exp(-load(x + i))));
}

// out = softmax(sign * a), n values.
inline void softmax(const float* a, int64_t n, float sign, float* out) {
    float top = sign * a[0], total = 0;
    for (int64_t i = 1; i < n; i++) top = sign * a[i] > top ? sign * a[i] : top;
    int64_t i = 0;
    vf part{};
    for (; i + VL <= n; i += VL) {
        const vf e = exp(sign * load(a + i) - top);
        store(out + i, e);
        part += e;
    }
    total = sum(part);
    for (; i < n; i++) total += out[i] = __builtin_expf(sign * a[i] - top);
    for (i = 0; i < n; i++) out[i] /= total;
}

// phi(projection of x): F features into out; scratch holds the Fp columns.
inline void features(const Scorer& s, const float* projection, int64_t h, const float* x, int64_t wide, float* scratch,
                     float* out) {
    matvec(x, projection + h * wide * s.columns, wide, s.columns, scratch);
    softmax(scratch, s.columns, 1.0f, out);
    if (s.hedgehog) softmax(scratch, s.columns, -1.0f, out + s.columns);
}

KVPOP_INLINE float softcap(float a, float cap) { return cap == 0 ? a : cap * __builtin_tanhf(a / cap); }
KVPOP_INLINE float log_sigmoid(float a) {
    return (a < 0 ? a : 0) - __builtin_log1pf(__builtin_expf(-__builtin_fabsf(a)));
}

inline float linear_score(const Scorer& s, int64_t h, const float* x, int64_t wide) {
    return dot(x, s.weight + h * wide, wide) + s.bias[h];
}

// hidden: scratch of M floats, rounded up to VL.
inline float mlp_score(const Scorer& s, int64_t h, const float* x, int64_t wide, float* hidden) {
    matvec(x, s.fc1_weight + h * wide * s.hidden, wide, s.hidden, hidden);
    const float* bias = s.fc1_bias + h * s.hidden;
    for (int64_t i = 0; i < s.hidden; i++) hidden[i] += bias[i];
    silu(hidden, s.hidden);
    return dot(hidden, s.fc2_weight + h * s.hidden, s.hidden) + s.fc2_bias[h];
}

// The flat state C [F, Dv] | z [F] | m [1] of a head, spread over the regions of its state blocks.
struct State {
    const DecodeStep& a;
    int64_t r, h;

    // The words from `at` on that are contiguous, at most `want`; returns where they start.
    KVPOP_INLINE float* words(int64_t at, int64_t want, int64_t& count) const {
        const int64_t region = a.region_bytes / 4, inside = at % region, left = region - inside;
        count = want < left ? want : left;
        return reinterpret_cast<float*>(a.region(r, h, at / region)) + inside;
    }
    void reset() const {
        const int64_t cells = a.scorer.features * (a.scorer.values + 1);
        int64_t count;
        for (int64_t at = 0; at < cells; at += count) {
            float* p = words(at, cells - at, count);
            for (int64_t i = 0; i < count; i++) p[i] = 0;
        }
        *words(cells, 1, count) = STATE_M_START;
    }
};

// c = keep * c + write * v; sum += read * c.
KVPOP_INLINE void update_row(float* c, int64_t n, float keep, float write, const float* v, float read, float* sum) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf cell = keep * load(c + i) + write * load(v + i);
        store(c + i, cell);
        store(sum + i, load(sum + i) + read * cell);
    }
    for (; i < n; i++) {
        c[i] = keep * c[i] + write * v[i];
        sum[i] += read * c[i];
    }
}

// Buffers of one head's mLSTM step, each rounded up to VL floats.
struct MLSTMScratch {
    float *key, *query, *value, *numerator, *columns;
};

// Takes token x_q = x into the state; with x_read, also returns the score of that token read from the new state.
inline float mlstm_step(const DecodeStep& a, const State& state, const float* x, const float* x_read,
                        const MLSTMScratch& w) {
    const Scorer& s = a.scorer;
    const int64_t h = state.h, wide = 2 * a.size, cells = s.features * s.values;
    features(s, s.k_proj, h, x, wide, w.columns, w.key);
    const float* value = x + a.size;
    if (s.v_proj) {
        matvec(x, s.v_proj + h * wide * s.values, wide, s.values, w.value);
        value = w.value;
    }
    for (int64_t i = 0; i < s.features; i++) w.query[i] = 0;
    for (int64_t i = 0; i < s.values; i++) w.numerator[i] = 0;
    if (x_read) features(s, s.q_proj, h, x_read, wide, w.columns, w.query);

    const float igate = softcap(dot(x, s.igate_weight + h * wide, wide) + s.igate_bias[h], s.softcap);
    const float log_f = log_sigmoid(softcap(dot(x, s.fgate_weight + h * wide, wide) + s.fgate_bias[h], s.softcap));
    int64_t count;
    float* m = state.words(cells + s.features, 1, count);
    const float old = log_f + *m, top = old > igate ? old : igate;
    const float keep = __builtin_expf(old - top), gain = __builtin_expf(igate - top);
    *m = top;
    for (int64_t f = 0; f < s.features; f++)
        for (int64_t c = 0; c < s.values; c += count) {
            float* row = state.words(f * s.values + c, s.values - c, count);
            update_row(row, count, keep, gain * w.key[f], value + c, w.query[f], w.numerator + c);
        }
    float qz = 0;
    for (int64_t f = 0; f < s.features; f += count) {
        float* z = state.words(cells + f, s.features - f, count);
        for (int64_t i = 0; i < count; i++) {
            z[i] = keep * z[i] + gain * w.key[f + i];
            qz += w.query[f + i] * z[i];
        }
    }
    if (!x_read) return 0;

    const float bounded = top < -60 ? -60 : (top > 60 ? 60 : top);
    const float denominator = qz + READOUT_EPS * __builtin_expf(-bounded);
    for (int64_t i = 0; i < s.values; i++) w.numerator[i] /= denominator;
    if (s.norm_weight) {
        const float* weight = s.norm_weight + h * s.values;
        const float rms = 1 / __builtin_sqrtf(dot(w.numerator, w.numerator, s.values) / float(s.values) + NORM_EPS);
        for (int64_t i = 0; i < s.values; i++) w.numerator[i] *= rms * weight[i];
    }
    silu(w.numerator, s.values);
    const float score = dot(w.numerator, s.out_weight + h * s.values, s.values) + s.out_bias[h];
    return s.skip_weight ? score + dot(x_read, s.skip_weight + h * wide, wide) : score;
}

}  // namespace kvpop::KVPOP_ISA
