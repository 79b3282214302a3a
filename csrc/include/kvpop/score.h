// Scorer formulas (kvpop_vllm/scorers/linear.py, mlp.py, mlstm.py) for one token of one head, float32.

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

// Number of tokens whose products with the same weights are computed together.
constexpr int64_t BATCH = VL == 16 ? 6 : 3;
constexpr int SPLIT = 4;  // partial sums per product, to hide latency; independent of the number of tokens

// Multiplies x [ROWS, rows] by VECTORS vectors of columns of w [rows, columns].
template <int ROWS, int VECTORS>
KVPOP_INLINE void product_block(const float* x, int64_t x_stride, const float* w, int64_t rows, int64_t columns,
                                float* out, int64_t out_stride) {
    vf acc[SPLIT][ROWS][VECTORS] = {};
    for (int64_t i = 0; i < rows; i += SPLIT)
        for (int j = 0; j < SPLIT; j++)
            for (int c = 0; c < VECTORS; c++) {
                const vf column = load(w + (i + j) * columns + c * VL);
                for (int r = 0; r < ROWS; r++) acc[j][r][c] += x[r * x_stride + i + j] * column;
            }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++)
            store(out + r * out_stride + c * VL, (acc[0][r][c] + acc[1][r][c]) + (acc[2][r][c] + acc[3][r][c]));
}

template <int ROWS>
void product_of(const float* x, int64_t x_stride, const float* w, int64_t rows, int64_t columns, float* out,
                int64_t out_stride) {
    constexpr int WIDE = VL == 16 ? (ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1) : (ROWS == 1 ? 2 : 1);
    int64_t c = 0;
    for (; c + WIDE * VL <= columns; c += WIDE * VL)
        product_block<ROWS, WIDE>(x, x_stride, w + c, rows, columns, out + c, out_stride);
    for (; c + VL <= columns; c += VL) product_block<ROWS, 1>(x, x_stride, w + c, rows, columns, out + c, out_stride);
    for (; c < columns; c++)
        for (int r = 0; r < ROWS; r++) {
            float s = 0;
            for (int64_t i = 0; i < rows; i++) s += x[r * x_stride + i] * w[i * columns + c];
            out[r * out_stride + c] = s;
        }
}

// out [count, columns] = x [count, rows] times w [rows, columns], count <= BATCH. rows must be a multiple
// of 4.
inline void product(int64_t count, const float* x, int64_t x_stride, const float* w, int64_t rows, int64_t columns,
                    float* out, int64_t out_stride) {
    switch (count) {
        case 1: return product_of<1>(x, x_stride, w, rows, columns, out, out_stride);
        case 2: return product_of<2>(x, x_stride, w, rows, columns, out, out_stride);
        case 3: return product_of<3>(x, x_stride, w, rows, columns, out, out_stride);
#if KVPOP_VECTOR_BYTES == 64
        case 4: return product_of<4>(x, x_stride, w, rows, columns, out, out_stride);
        case 5: return product_of<5>(x, x_stride, w, rows, columns, out, out_stride);
        case 6: return product_of<6>(x, x_stride, w, rows, columns, out, out_stride);
#endif
    }
}

// In place. The buffer must extend to the next multiple of VL.
inline void silu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += VL) store(x + i, load(x + i) / (1.0f + exp(-load(x + i))));
}

// out = softmax(sign * a), n values.
inline void softmax(const float* a, int64_t n, float sign, float* out) {
    float top = sign * a[0], total = 0;
    int64_t i = 0;
    if (n >= VL) {
        vf tops = sign * load(a);
        for (i = VL; i + VL <= n; i += VL) tops = max(tops, sign * load(a + i));
        top = max(tops);
    }
    for (; i < n; i++) top = sign * a[i] > top ? sign * a[i] : top;
    i = 0;
    vf part{};
    for (; i + VL <= n; i += VL) {
        const vf e = exp(sign * load(a + i) - top);
        store(out + i, e);
        part += e;
    }
    total = sum(part);
    for (; i < n; i++) total += out[i] = __builtin_expf(sign * a[i] - top);
    for (i = 0; i + VL <= n; i += VL) store(out + i, load(out + i) / total);
    for (; i < n; i++) out[i] /= total;
}

KVPOP_INLINE float softcap(float a, float cap) { return cap == 0 ? a : cap * __builtin_tanhf(a / cap); }
KVPOP_INLINE float log_sigmoid(float a) {
    return (a < 0 ? a : 0) - __builtin_log1pf(__builtin_expf(-__builtin_fabsf(a)));
}

inline float linear_score(const Scorer& s, int64_t h, const float* x, int64_t wide) {
    return dot(x, s.weight + h * wide, wide) + s.bias[h];
}

// The sum is float64, so that the float32 result hardly ever depends on the order.
template <class T>
KVPOP_INLINE float key_norm_score(const T* key, int64_t size) {
    double squares = 0;
    for (int64_t e = 0; e < size; e++) squares += double(to_float(key[e])) * double(to_float(key[e]));
    return -float(__builtin_sqrt(squares));
}

// hidden: scratch of M floats, rounded up to VL.
inline float mlp_score(const Scorer& s, int64_t h, const float* x, int64_t wide, float* hidden) {
    product(1, x, wide, s.fc1_weight + h * wide * s.hidden, wide, s.hidden, hidden, s.hidden);
    const float* bias = s.fc1_bias + h * s.hidden;
    for (int64_t i = 0; i < s.hidden; i++) hidden[i] += bias[i];
    silu(hidden, s.hidden);
    return dot(hidden, s.fc2_weight + h * s.hidden, s.hidden) + s.fc2_bias[h];
}

// Flat state C [F, Dv] | z [F] | m [1] of a head, stored across the regions of its state blocks.
struct State {
    const DecodeStep& a;
    int64_t r, h;

    // Returns the start of the contiguous words from `at` on, at most `want`, and their number in `count`.
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

// Same for `rows` rows of VECTORS vectors, with gain * write[f] and read[f] for row f.
template <int VECTORS>
KVPOP_INLINE void update_rows_of(float* c, int64_t rows, float keep, float gain, const float* write, const float* v,
                                 const float* read, float* sum) {
    vf value[VECTORS], total[VECTORS];
    for (int j = 0; j < VECTORS; j++) value[j] = load(v + j * VL), total[j] = load(sum + j * VL);
    for (int64_t f = 0; f < rows; f++, c += VECTORS * VL) {
        const float in = gain * write[f];
        for (int j = 0; j < VECTORS; j++) {
            const vf cell = keep * load(c + j * VL) + in * value[j];
            store(c + j * VL, cell);
            total[j] += read[f] * cell;
        }
    }
    for (int j = 0; j < VECTORS; j++) store(sum + j * VL, total[j]);
}
inline void update_rows(float* c, int64_t rows, int64_t n, float keep, float gain, const float* write, const float* v,
                        const float* read, float* sum) {
    if (n == 2 * VL) return update_rows_of<2>(c, rows, keep, gain, write, v, read, sum);
    if (n == 4 * VL) return update_rows_of<4>(c, rows, keep, gain, write, v, read, sum);
    if (n == 8 * VL && VL == 16) return update_rows_of<8>(c, rows, keep, gain, write, v, read, sum);
    for (int64_t f = 0; f < rows; f++) update_row(c + f * n, n, keep, gain * write[f], v, read[f], sum);
}

// Up to BATCH tokens of one head before the state update: inputs, and results that do not need the state.
struct MLSTMBatch {
    float *x, *x_read;                      // [BATCH, 2D]: token updating the state, token read out
    float *key, *query, *value, *columns;   // [BATCH, n], n = F, F, Dv, Fp, rows of whole cache lines
    float* numerator;                       // [Dv]
    bool reads[BATCH];
    float igate[BATCH], log_f[BATCH];

    static int64_t row(int64_t n) { return (n + 15) / 16 * 16; }
    static int64_t floats(const DecodeStep& a) {
        const Scorer& s = a.scorer;
        return 2 * Pieces::round(BATCH * 2 * a.size) + 2 * Pieces::round(BATCH * row(s.features)) +
               Pieces::round(BATCH * row(s.values)) + Pieces::round(BATCH * row(s.columns)) + Pieces::round(s.values);
    }
    MLSTMBatch(const DecodeStep& a, Pieces& pieces)
        : x(pieces.take(BATCH * 2 * a.size)),
          x_read(pieces.take(BATCH * 2 * a.size)),
          key(pieces.take(BATCH * row(a.scorer.features))),
          query(pieces.take(BATCH * row(a.scorer.features))),
          value(pieces.take(BATCH * row(a.scorer.values))),
          columns(pieces.take(BATCH * row(a.scorer.columns))),
          numerator(pieces.take(a.scorer.values)) {}
};

// Writes phi(projection of x) of `count` tokens to out [count, F].
inline void features(const Scorer& s, const float* projection, int64_t h, int64_t count, const float* x, int64_t wide,
                     float* columns, float* out) {
    const int64_t row = MLSTMBatch::row(s.columns), out_row = MLSTMBatch::row(s.features);
    product(count, x, wide, projection + h * wide * s.columns, wide, s.columns, columns, row);
    for (int64_t i = 0; i < count; i++) {
        softmax(columns + i * row, s.columns, 1.0f, out + i * out_row);
        if (s.hedgehog) softmax(columns + i * row, s.columns, -1.0f, out + i * out_row + s.columns);
    }
}

// Computes keys, values, gates and queries of the batch's first `count` tokens. The result of a token does
// not depend on the others.
inline void mlstm_project(const DecodeStep& a, int64_t h, int64_t count, MLSTMBatch& batch) {
    const Scorer& s = a.scorer;
    const int64_t wide = 2 * a.size, value_row = MLSTMBatch::row(s.values), feature_row = MLSTMBatch::row(s.features);
    features(s, s.k_proj, h, count, batch.x, wide, batch.columns, batch.key);
    if (s.v_proj)
        product(count, batch.x, wide, s.v_proj + h * wide * s.values, wide, s.values, batch.value, value_row);
    bool reads = false;
    for (int64_t i = 0; i < count; i++) {
        const float* x = batch.x + i * wide;
        if (!s.v_proj) __builtin_memcpy(batch.value + i * value_row, x + a.size, size_t(s.values) * 4);
        batch.igate[i] = softcap(dot(x, s.igate_weight + h * wide, wide) + s.igate_bias[h], s.softcap);
        batch.log_f[i] = log_sigmoid(softcap(dot(x, s.fgate_weight + h * wide, wide) + s.fgate_bias[h], s.softcap));
        reads |= batch.reads[i];
        for (int64_t e = 0; e < wide && !batch.reads[i]; e++) batch.x_read[i * wide + e] = 0;
    }
    if (reads) features(s, s.q_proj, h, count, batch.x_read, wide, batch.columns, batch.query);
    for (int64_t i = 0; i < count; i++)
        for (int64_t f = 0; f < s.features && !batch.reads[i]; f++) batch.query[i * feature_row + f] = 0;
}

// Updates the state with token i of a projected batch. Returns the score read out from the new state.
inline float mlstm_step(const DecodeStep& a, const State& state, const MLSTMBatch& batch, int64_t i) {
    const Scorer& s = a.scorer;
    const int64_t h = state.h, wide = 2 * a.size, cells = s.features * s.values;
    const float* key = batch.key + i * MLSTMBatch::row(s.features);
    const float* query = batch.query + i * MLSTMBatch::row(s.features);
    const float* value = batch.value + i * MLSTMBatch::row(s.values);
    const float* x_read = batch.x_read + i * wide;
    const float igate = batch.igate[i], log_f = batch.log_f[i];
    float* numerator = batch.numerator;
    for (int64_t c = 0; c < s.values; c++) numerator[c] = 0;
    int64_t count;
    float* m = state.words(cells + s.features, 1, count);
    const float old = log_f + *m, top = old > igate ? old : igate;
    const float keep = __builtin_expf(old - top), gain = __builtin_expf(igate - top);
    *m = top;
    for (int64_t f = 0; f < s.features;) {
        float* rows = state.words(f * s.values, (s.features - f) * s.values, count);
        const int64_t whole = count / s.values;
        update_rows(rows, whole, s.values, keep, gain, key + f, value, query + f, numerator);
        f += whole;
        if (f == s.features) break;
        for (int64_t c = 0; c < s.values; c += count) {  // a row that spans two blocks
            float* row = state.words(f * s.values + c, s.values - c, count);
            update_row(row, count, keep, gain * key[f], value + c, query[f], numerator + c);
        }
        f++;
    }
    vf parts{};
    float qz = 0;
    for (int64_t f = 0; f < s.features; f += count) {
        float* z = state.words(cells + f, s.features - f, count);
        int64_t j = 0;
        for (; j + VL <= count; j += VL) {
            const vf cell = keep * load(z + j) + gain * load(key + f + j);
            store(z + j, cell);
            parts += load(query + f + j) * cell;
        }
        for (; j < count; j++) {
            z[j] = keep * z[j] + gain * key[f + j];
            qz += query[f + j] * z[j];
        }
    }
    qz += sum(parts);
    if (!batch.reads[i]) return 0;

    const float bounded = top < -60 ? -60 : (top > 60 ? 60 : top);
    const float denominator = qz + READOUT_EPS * __builtin_expf(-bounded);
    for (int64_t c = 0; c < s.values; c++) numerator[c] /= denominator;
    if (s.norm_weight) {
        const float* weight = s.norm_weight + h * s.values;
        const float rms = 1 / __builtin_sqrtf(dot(numerator, numerator, s.values) / float(s.values) + NORM_EPS);
        for (int64_t c = 0; c < s.values; c++) numerator[c] *= rms * weight[c];
    }
    silu(numerator, s.values);
    const float score = dot(numerator, s.out_weight + h * s.values, s.values) + s.out_bias[h];
    return s.skip_weight ? score + dot(x_read, s.skip_weight + h * wide, wide) : score;
}

}  // namespace kvpop::KVPOP_ISA
