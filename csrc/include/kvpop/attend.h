// Attention of the G query heads of one KV head over its slots in use: online softmax, tile by tile, with
// sums in float32. Products are float32, or bfloat16 pairs if the processor supports them and q and the
// cache are bfloat16. Each tile of K and V is read from memory once for all query heads, and for all drafts of a request.

#pragma once

namespace kvpop::KVPOP_ISA {

constexpr int TILE = 64;  // slots; a tile never crosses a block
#if KVPOP_VECTOR_BYTES == 64
constexpr int MAX_GROUP = 4;  // rows of queries whose accumulators fit into the registers together
#else
constexpr int MAX_GROUP = 3;
#endif

// Shape of a row of D elements of T as float vectors (see Rows).
template <class T>
struct RowShape {
    int64_t size, full_steps, floats;
    bool has_tail;
    vu tail;
    explicit RowShape(int64_t d) : size(d) {
        const int64_t words = d * int64_t(sizeof(T)) / 4;
        full_steps = words / VL;
        has_tail = words % VL != 0;
        floats = (full_steps + has_tail) * Rows<T>::PER_STEP * VL;
        tail = (vu)(lanes() < int32_t(words % VL));
    }
};

// Way of attending that widens rows to float32. It defines the memory layout of rows of q and of the
// accumulated output.
template <class T>
struct Widened {
    using Item = T;
    struct Session {};  // what must live while tiles are added
    static constexpr int MOST_ROWS = MAX_GROUP;
    static KVPOP_INLINE int64_t place(int64_t e) { return Rows<T>::place(e); }
    // Writes the query of a head to `row`. word: floats from one word of the row to the next.
    static KVPOP_INLINE void put_q(const DecodeStep& a, int64_t r, int64_t head, float* row, int64_t) {
        for (int64_t e = 0; e < a.size; e++) row[place(e)] = read_q(a, r, head, e);
    }
};

#if KVPOP_BF16_DOT
// Way of attending by products of bfloat16 pairs. Adjacent rows of V are interleaved, which permutes the
// channels of each step.
struct Paired {
    using Item = bf16;
    struct Session {};
    static constexpr int MOST_ROWS = MAX_GROUP;
    static KVPOP_INLINE int64_t place(int64_t e) {
        const int64_t step = e / 32, lane = e % 32 / 8, inside = e % 8;
        return (2 * step + inside / 4) * VL + lane * 4 + inside % 4;
    }
    static KVPOP_INLINE void put_q(const DecodeStep& a, int64_t r, int64_t head, float* row, int64_t word) {
        const bf16* q = static_cast<const bf16*>(a.q) + r * a.q_stride[0] + head * a.q_stride[1];
        for (int64_t e = 0; e < a.size; e += 2) __builtin_memcpy(row + e / 2 * word, q + e, 2 * sizeof(bf16));
    }
};
#endif

#if KVPOP_AMX
// Way of attending by products of matrices of bfloat16 pairs, in which a tile meets 16 rows of queries at once. The pairs
// of a query are a column, so that columns of one matrix are the queries of any tokens that follow one another.
struct Multiplied : Paired {
    using Session = AmxTiles;
    static constexpr int MOST_ROWS = AMX_ROWS;
    static bool takes(const DecodeStep& a) {
        return a.has_drafts && a.cache_is_bf16 && a.q_is_bf16 && !a.scorer.coupled() && a.size / 2 % AMX_WORDS == 0;
    }
    // Columns of a matrix of queries; 16 can be read from any of them on.
    static int64_t columns(int64_t rows) { return (rows + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS + AMX_ROWS; }
};
#endif

// Running softmax of one KV head: a row of q, a row of accumulated output, maximum and sum per query head.
struct Softmax {
    const float* q;
    float* acc;
    float* maximum;
    float* total;
    int64_t floats;  // between rows of acc and, where they are not columns, of q
    int64_t word;    // between words of a row of q
    float scale;
    float* logits;  // destination of the tile's logits, one row per query head, or null
    int64_t logits_row;
};

template <class T>
struct Tile {
    const T *k, *v;
    const T *next_k, *next_v;  // the next tile, prefetched while this one is computed, or null
    int slots;
    int biased;         // leading slots whose logits get a bias
    const float* bias;  // read only if there are any
};

template <int GT, bool MASKED, class T>
KVPOP_INLINE void dot_step(Widened<T>, const T* k, const RowShape<T>& shape, const Softmax& s, int64_t step,
                           vf (&acc)[GT][4]) {
    constexpr int PER = Rows<T>::PER_STEP;
    vf x[4][PER];
    for (int i = 0; i < 4; i++) Rows<T>::template load<MASKED>(k + i * shape.size, step, shape.tail, x[i]);
    for (int p = 0; p < PER; p++)
        for (int g = 0; g < GT; g++) {
            const vf q = load(s.q + g * s.floats + (step * PER + p) * VL);
            for (int i = 0; i < 4; i++) acc[g][i] += q * x[i][p];
        }
}

#if KVPOP_BF16_DOT
template <int GT, bool MASKED>
KVPOP_INLINE void dot_step(Paired, const bf16* k, const RowShape<bf16>& shape, const Softmax& s, int64_t step,
                           vf (&acc)[GT][4]) {
    vu x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = load_as<vu>(k + i * shape.size + step * 2 * VL);
        if (MASKED) x[i] &= shape.tail;
    }
    for (int g = 0; g < GT; g++) {
        const vu q = load_as<vu>(s.q + g * s.floats + step * VL);
        for (int i = 0; i < 4; i++) acc[g][i] = Bf16Words::multiply_add(acc[g][i], q, x[i]);
    }
}
#endif

// Computes logits[g][i] = scale * q_g . k_i for slots [0, n), n rounded up to VL, and prefetches `ahead` at
// the same rate.
template <class A, int GT, class T = typename A::Item>
KVPOP_INLINE void tile_logits(const T* k, const RowShape<T>& shape, const Softmax& s, int n, const uint8_t* ahead,
                              float (&logits)[GT][TILE]) {
    const int64_t quad_bytes = 4 * shape.size * int64_t(sizeof(T));
    for (int slot = 0; slot < n; slot += VL) {
        vf quads[GT][VL / 4];
        for (int part = 0; part < VL / 4; part++) {
            const T* rows = k + (slot + 4 * part) * shape.size;
            if (ahead) {
                for (int64_t b = 0; b < quad_bytes; b += 64) prefetch(ahead + b);
                ahead += quad_bytes;
            }
            vf acc[GT][4] = {};
            for (int64_t step = 0; step < shape.full_steps; step++) dot_step<GT, false>(A{}, rows, shape, s, step, acc);
            if (shape.has_tail) dot_step<GT, true>(A{}, rows, shape, s, shape.full_steps, acc);
            for (int g = 0; g < GT; g++) quads[g][part] = sums_of_four(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
        }
        for (int g = 0; g < GT; g++) store(&logits[g][slot], s.scale * join_quads(quads[g]));
    }
}

// Adds the biases of slots [0, n) to their logits. What lies after them in the block is not used. Not inlined, so that
// attention without biases is compiled as if there were none.
template <int GT>
__attribute__((noinline)) void add_bias(const float* bias, int n, float (&logits)[GT][TILE]) {
    for (int slot = 0; slot < n; slot += VL) {
        const vf own = lanes() + slot < n ? load(bias + slot) : vf{};
        for (int g = 0; g < GT; g++) store(&logits[g][slot], load(&logits[g][slot]) + own);
    }
}

// Converts logits to weights under the new maxima. factor[g] scales what was accumulated before.
template <int GT>
KVPOP_INLINE void tile_softmax(float (&x)[GT][TILE], int n, const Softmax& s, float (&factor)[GT]) {
    const vf none = splat(-__builtin_inff());
    vf top[GT], part[GT] = {};
    for (int i = n / VL * VL; i < n; i += VL)
        for (int g = 0; g < GT; g++) store(&x[g][i], lanes() + i < n ? load(&x[g][i]) : none);
    for (int g = 0; g < GT; g++) top[g] = none;
    for (int i = 0; i < n; i += VL)
        for (int g = 0; g < GT; g++) top[g] = max(top[g], load(&x[g][i]));
    for (int g = 0; g < GT; g++) {
        const float tile_max = max(top[g]), before = s.maximum[g];
        s.maximum[g] = tile_max > before ? tile_max : before;
        factor[g] = exp(splat(before - s.maximum[g]))[0];
        top[g] = splat(s.maximum[g]);
    }
    for (int i = 0; i < n; i += VL)
        for (int g = 0; g < GT; g++) {
            const vf p = exp(load(&x[g][i]) - top[g]);
            store(&x[g][i], p);
            part[g] += p;
        }
    for (int g = 0; g < GT; g++) s.total[g] = s.total[g] * factor[g] + sum(part[g]);
}

// acc[g] = factor[g] * acc[g] + sum_i weight[g][i] * v_i over the columns of STEPS steps from `first` on.
template <int GT, int STEPS, bool MASKED, class T>
KVPOP_INLINE void add_rows(Widened<T>, const T* v, const RowShape<T>& shape, const Softmax& s, int n, int64_t first,
                           const float (&weight)[GT][TILE], const float* factor, const uint8_t* ahead) {
    constexpr int PER = Rows<T>::PER_STEP, WIDE = STEPS * PER;
    constexpr int64_t FETCH = MASKED ? 0 : STEPS * KVPOP_VECTOR_BYTES;  // bytes this call prefetches per row
    vf acc[GT][WIDE];
    float* out = s.acc + first * PER * VL;
    for (int g = 0; g < GT; g++)
        for (int c = 0; c < WIDE; c++) acc[g][c] = factor[g] * load(out + g * s.floats + c * VL);
    for (int i = 0; i < n; i++) {
        const T* row = v + i * shape.size;
        for (int64_t b = 0; b < FETCH && ahead; b += 64) prefetch(ahead + i * shape.size * int64_t(sizeof(T)) + b);
        vf x[WIDE];
        for (int t = 0; t < STEPS; t++) Rows<T>::template load<MASKED>(row, first + t, shape.tail, x + t * PER);
        for (int g = 0; g < GT; g++)
            for (int c = 0; c < WIDE; c++) acc[g][c] += weight[g][i] * x[c];
    }
    for (int g = 0; g < GT; g++)
        for (int c = 0; c < WIDE; c++) store(out + g * s.floats + c * VL, acc[g][c]);
}

#if KVPOP_BF16_DOT
// Same as above, two rows at a time, with weights rounded to bfloat16.
template <int GT, int STEPS, bool MASKED>
KVPOP_INLINE void add_rows(Paired, const bf16* v, const RowShape<bf16>& shape, const Softmax& s, int n, int64_t first,
                           const float (&weight)[GT][TILE], const float* factor, const uint8_t* ahead) {
    constexpr int WIDE = STEPS * 2;
    constexpr int64_t FETCH = MASKED ? 0 : STEPS * KVPOP_VECTOR_BYTES;
    vf acc[GT][WIDE];
    float* out = s.acc + first * 2 * VL;
    for (int g = 0; g < GT; g++)
        for (int c = 0; c < WIDE; c++) acc[g][c] = factor[g] * load(out + g * s.floats + c * VL);
    alignas(64) uint32_t pairs[GT][TILE / 2];
    for (int g = 0; g < GT; g++)
        for (int i = 0; i < n; i += 2 * VL) {
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(&weight[g][i + VL]), (__m512)load(&weight[g][i]));
            __builtin_memcpy(&pairs[g][i / 2], &both, sizeof both);
        }
    for (int i = 0; i < n; i += 2) {
        const bf16* row = v + i * shape.size;
        for (int64_t b = 0; b < FETCH && ahead; b += 64) {
            const uint8_t* next = ahead + i * shape.size * int64_t(sizeof(bf16)) + b;
            prefetch(next), prefetch(next + shape.size * 2);
        }
        vu x[WIDE];
        for (int t = 0; t < STEPS; t++) {
            const int64_t at = (first + t) * 2 * VL;
            vu even = load_as<vu>(row + at), odd = i + 1 < n ? load_as<vu>(row + shape.size + at) : vu{};
            if (MASKED) even &= shape.tail, odd &= shape.tail;
            x[2 * t] = (vu)_mm512_unpacklo_epi16((__m512i)even, (__m512i)odd);
            x[2 * t + 1] = (vu)_mm512_unpackhi_epi16((__m512i)even, (__m512i)odd);
        }
        for (int g = 0; g < GT; g++) {
            const vu w = pairs[g][i / 2] - vu{};
            for (int c = 0; c < WIDE; c++) acc[g][c] = Bf16Words::multiply_add(acc[g][c], w, x[c]);
        }
    }
    for (int g = 0; g < GT; g++)
        for (int c = 0; c < WIDE; c++) store(out + g * s.floats + c * VL, acc[g][c]);
}
#endif

// Processes one tile for GT query heads.
template <class A, int GT, class T = typename A::Item>
void attend_tile(const Tile<T>& tile, const RowShape<T>& shape, const Softmax& s) {
    constexpr int WIDEST = 4 / Rows<T>::PER_STEP;
    const int n = tile.slots;
    const uint8_t* ahead = reinterpret_cast<const uint8_t*>(tile.next_v);
    alignas(64) float weight[GT][TILE];
    float factor[GT];
    tile_logits<A, GT>(tile.k, shape, s, n, reinterpret_cast<const uint8_t*>(tile.next_k), weight);
    if (tile.biased > 0) add_bias<GT>(tile.bias, tile.biased, weight);
    for (int g = 0; g < GT && s.logits; g++) __builtin_memcpy(s.logits + g * s.logits_row, weight[g], size_t(n) * 4);
    tile_softmax<GT>(weight, n, s, factor);
    int64_t step = 0;
    for (; step + WIDEST <= shape.full_steps; step += WIDEST) {
        add_rows<GT, WIDEST, false>(A{}, tile.v, shape, s, n, step, weight, factor, ahead);
        if (ahead) ahead += WIDEST * KVPOP_VECTOR_BYTES;
    }
    for (; step < shape.full_steps; step++) {
        add_rows<GT, 1, false>(A{}, tile.v, shape, s, n, step, weight, factor, ahead);
        if (ahead) ahead += KVPOP_VECTOR_BYTES;
    }
    if (shape.has_tail) add_rows<GT, 1, true>(A{}, tile.v, shape, s, n, step, weight, factor, ahead);
}

#if KVPOP_AMX
// Transposes 16 rows of 16 words.
KVPOP_INLINE void transpose(vu (&x)[VL], uint32_t* out, int64_t stride) {
    vu pairs[VL], quads[VL];
    for (int i = 0; i < VL; i += 2)
        pairs[i] = __builtin_shuffle(x[i], x[i + 1], LOW32), pairs[i + 1] = __builtin_shuffle(x[i], x[i + 1], HIGH32);
    for (int i = 0; i < VL; i += 4)
        for (int j = 0; j < 2; j++) {
            quads[i + 2 * j] = __builtin_shuffle(pairs[i + j], pairs[i + j + 2], LOW64);
            quads[i + 2 * j + 1] = __builtin_shuffle(pairs[i + j], pairs[i + j + 2], HIGH64);
        }
    for (int j = 0; j < 4; j++) {
        const vu even = __builtin_shuffle(quads[j], quads[4 + j], EVEN128), odd = __builtin_shuffle(quads[j], quads[4 + j], ODD128);
        const vu more_even = __builtin_shuffle(quads[8 + j], quads[12 + j], EVEN128);
        const vu more_odd = __builtin_shuffle(quads[8 + j], quads[12 + j], ODD128);
        const vu columns[4] = {__builtin_shuffle(even, more_even, EVEN128), __builtin_shuffle(odd, more_odd, EVEN128),
                               __builtin_shuffle(even, more_even, ODD128), __builtin_shuffle(odd, more_odd, ODD128)};
        for (int i = 0; i < 4; i++) __builtin_memcpy(out + (4 * i + j) * stride, &columns[i], sizeof(vu));
    }
}

// Processes one tile for up to 16 rows of queries. Lanes of logits and weights are queries until weights are transposed.
inline void multiply_tile(int rows, const Tile<bf16>& tile, const RowShape<bf16>& shape, const Softmax& s) {
    constexpr int STEPS = 2, WIDE = STEPS * 2 * VL;  // columns of V at once
    alignas(64) float x[TILE][VL], sums[VL][WIDE], factor[VL];
    alignas(64) uint32_t weights[VL][TILE / 2], values[TILE / 2][WIDE];
    const int n = tile.slots, whole = (n + 2 * VL - 1) / (2 * VL) * 2 * VL;
    const int64_t words = shape.size / 2;
    const uint32_t* k = reinterpret_cast<const uint32_t*>(tile.k);
    gemm<AmxWords>({k, words, reinterpret_cast<const uint32_t*>(s.q), s.word, words, &x[0][0], VL, nullptr}, (n + VL - 1) / VL * VL, VL);
    const __mmask16 mask = __mmask16((1u << rows) - 1);
    const vf before = (vf)_mm512_maskz_loadu_ps(mask, s.maximum);
    vf top = before, total{};
    for (int i = 0; i < n; i++) {
        vf logits = s.scale * load(x[i]);
        if (i < tile.biased) logits += tile.bias[i];
        store(x[i], logits);
        top = max(logits, top);
    }
    const vf scaled = exp(before - top);
    store(factor, scaled);
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                                 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int i = 0; i < whole; i += 2 * VL) {
        vu pairs[VL];
        for (int j = 0; j < VL; j++) {
            const int slot = i + 2 * j;
            if (tile.next_k)
                for (int64_t e = 0; e < 2 * shape.size; e += 2 * VL) prefetch(tile.next_k + slot * shape.size + e);
            const vf low = slot < n ? exp(load(x[slot]) - top) : vf{}, high = slot + 1 < n ? exp(load(x[slot + 1]) - top) : vf{};
            total += low, total += high;
            pairs[j] = (vu)_mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
        }
        transpose(pairs, &weights[0][i / 2], TILE / 2);
    }
    _mm512_mask_storeu_ps(s.maximum, mask, (__m512)top);
    _mm512_mask_storeu_ps(s.total, mask, (__m512)((vf)_mm512_maskz_loadu_ps(mask, s.total) * scaled + total));
    for (int64_t step = 0, steps; step < shape.full_steps; step += steps) {
        steps = shape.full_steps - step < STEPS ? shape.full_steps - step : STEPS;
        for (int i = 0; i < whole; i += 2)
            for (int64_t j = 0; j < steps; j++) {
                const bf16* row = tile.v + i * shape.size + (step + j) * 2 * VL;
                if (tile.next_v) prefetch(tile.next_v + (row - tile.v)), prefetch(tile.next_v + (row - tile.v) + shape.size);
                const vu even = i < n ? load_as<vu>(row) : vu{}, odd = i + 1 < n ? load_as<vu>(row + shape.size) : vu{};
                const __m512i low = _mm512_unpacklo_epi16((__m512i)even, (__m512i)odd), high = _mm512_unpackhi_epi16((__m512i)even, (__m512i)odd);
                uint32_t* pair = values[i / 2] + j * 2 * VL;
                __builtin_memcpy(pair, &low, sizeof low), __builtin_memcpy(pair + VL, &high, sizeof high);
            }
        const int64_t columns = steps * 2 * VL;
        gemm<AmxWords>({&weights[0][0], TILE / 2, &values[0][0], WIDE, whole / 2, &sums[0][0], WIDE, nullptr}, VL, columns);
        for (int g = 0; g < rows; g++)
            for (int c = 0; c < columns; c += VL) {
                float* out = s.acc + g * s.floats + step * 2 * VL + c;
                store(out, factor[g] * load(out) + load(sums[g] + c));
            }
    }
}
#endif

template <class A, class T = typename A::Item>
KVPOP_INLINE void attend_group(int count, const Tile<T>& tile, const RowShape<T>& shape, const Softmax& s) {
#if KVPOP_AMX
    if constexpr (A::MOST_ROWS == AMX_ROWS) return multiply_tile(count, tile, shape, s);
#endif
    switch (count) {
        case 1: return attend_tile<A, 1>(tile, shape, s);
        case 2: return attend_tile<A, 2>(tile, shape, s);
        case 3: return attend_tile<A, 3>(tile, shape, s);
#if KVPOP_VECTOR_BYTES == 64
        case 4: return attend_tile<A, 4>(tile, shape, s);
#endif
    }
}

inline int64_t row_floats(const DecodeStep& a) {
    return a.cache_is_bf16 ? RowShape<bf16>(a.size).floats : RowShape<float>(a.size).floats;
}
// Sizes of Partial and Begun of `rows` rows whose parts follow one another.
inline int64_t sums_floats(const DecodeStep& a, int64_t rows) {
    return Pieces::round(rows * row_floats(a)) + 2 * Pieces::round(rows);
}
inline int64_t query_floats(const DecodeStep& a, int64_t rows) {
#if KVPOP_AMX
    if (Multiplied::takes(a)) return a.size / 2 * Multiplied::columns(rows);
#endif
    return rows * row_floats(a);
}
inline int64_t begun_floats(const DecodeStep& a, int64_t rows) { return Pieces::round(query_floats(a, rows)) + sums_floats(a, rows); }
inline int64_t partial_floats(const DecodeStep& a) { return sums_floats(a, a.group); }
inline int64_t attend_scratch(const DecodeStep& a) {
    return begun_floats(a, a.group) + Pieces::round(a.group * a.mass_row) + correction_scratch(a);
}

// Sums over some slots of one head, of rows of queries: for each a row of the output, maximum and sum.
struct Partial {
    float *acc, *maximum, *total;
    Partial(const DecodeStep& a, int64_t rows, float* floats) {
        Pieces pieces{floats};
        acc = pieces.take(rows * row_floats(a)), maximum = pieces.take(rows), total = pieces.take(rows);
    }
};

// Queries of one head, G for each token, and their sums over the slots that they have seen.
struct Begun {
    float* q;
    int64_t row, word;  // floats between rows of q and between words of a row
    Partial sums;

    static Begun of(const DecodeStep& a, int64_t rows, float* q, const Partial& sums) {
#if KVPOP_AMX
        if (Multiplied::takes(a)) return {q, 1, Multiplied::columns(rows), sums};
#endif
        return {q, row_floats(a), 1, sums};
    }
    static Begun at(const DecodeStep& a, int64_t rows, float* floats) {
        Pieces pieces{floats};
        float* q = pieces.take(query_floats(a, rows));
        return of(a, rows, q, Partial(a, rows, pieces.next));
    }
    // The rows from one on.
    Begun from(const DecodeStep& a, int64_t first) const {
        Begun rest = *this;
        rest.q += first * row, rest.sums.acc += first * row_floats(a), rest.sums.maximum += first, rest.sums.total += first;
        return rest;
    }
};

// Number of slots of the tile that starts at `slot`: up to the end of its block, `end`, or TILE slots.
KVPOP_INLINE int64_t tile_slots(const DecodeStep& a, int64_t slot, int64_t end) {
    int64_t n = a.block_slots - slot % a.block_slots;
    if (end - slot < n) n = end - slot;
    return n < TILE ? n : TILE;
}

// Prefetches the scores and positions of the slots of one block.
KVPOP_INLINE void prefetch_scores(const DecodeStep& a, int64_t r, int64_t h, int64_t slot) {
    const uint8_t* p = reinterpret_cast<const uint8_t*>(a.scores(a.slot_region(r, h, slot)));
    for (int64_t b = 0; b < 8 * a.block_slots; b += 64) prefetch(p + b);
}

// Begins the sums of request r, KV head h over no slots.
template <class A>
void begin_sums(const DecodeStep& a, int64_t r, int64_t h, const Begun& begun) {
    const int64_t floats = row_floats(a);
    for (int64_t i = 0; i < a.group * floats; i++) begun.sums.acc[i] = 0;
    for (int64_t g = 0; g < a.group; g++) {
        float* q = begun.q + g * begun.row;
        begun.sums.maximum[g] = -__builtin_inff(), begun.sums.total[g] = 0;
        for (int64_t i = 0; i < floats && begun.word == 1; i++) q[i] = 0;
        A::put_q(a, r, h * a.group + g, q, begun.word);
    }
}

// Adds one tile to the sums of rows of queries. logits: [rows, mass_row] of the tile's slots, or null.
template <class A, class T = typename A::Item>
KVPOP_INLINE void add_tile(const DecodeStep& a, Tile<T> tile, const RowShape<T>& shape, const Begun& begun, int64_t rows,
                           float* logits) {
    const int64_t passes = (rows + A::MOST_ROWS - 1) / A::MOST_ROWS;
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t g = rows * pass / passes, last = rows * (pass + 1) / passes, row = g * shape.floats;
        const Softmax s{begun.q + g * begun.row, begun.sums.acc + row, begun.sums.maximum + g, begun.sums.total + g, shape.floats,
                        begun.word, a.scale, logits ? logits + g * a.mass_row : nullptr, a.mass_row};
        attend_group<A>(int(last - g), tile, shape, s);
        tile.next_k = tile.next_v = nullptr;
    }
}

// One token, which sees slots [0, end) of its prefix and then its tail. For those of several see TokensOfTail in verify.h.
struct OneToken {
    static constexpr int64_t count = 1;
    int64_t last;
    KVPOP_INLINE int64_t end(int64_t) const { return last; }
    KVPOP_INLINE bool changes(int64_t, int64_t, int64_t) const { return false; }
    KVPOP_INLINE void change(int64_t, int64_t, int64_t) const {}
    KVPOP_INLINE void change_back(int64_t, int64_t) const {}
};

// Adds slots from `begin` on of the prefix and then the tail of request r, KV head h to the sums of tokens. Each tile is
// read once for all that see the same in it. fetch_next: the next request and head still have to search for a victim.
// logits: [G, mass_row] by slot of the tail, or null.
template <class A, class Tokens>
void sum_slots(const DecodeStep& a, int64_t r, int64_t h, int64_t begin, const Tokens& tokens, bool fetch_next,
               const Begun& begun, float* logits) {
    using T = typename A::Item;
    const RowShape<T> shape(a.size);
    [[maybe_unused]] const typename A::Session session;
    // Prefetch the scores of the request and head that usually follow on this thread, for their search for
    // a victim.
    const int64_t next_r = (r + 1) % a.requests, next_h = h + (r + 1) / a.requests;
    const int64_t searched = fetch_next && next_h < a.heads && a.searches(next_r, next_h) ? a.in_use(next_r, next_h) : 0;
    const int64_t prefix = a.prefix_seen(r), biases = a.biased(r) < prefix ? a.biased(r) : prefix;
    const int64_t end = tokens.end(tokens.count - 1);
    for (int64_t slot = begin; slot < end;) {
        if (slot % a.block_slots == 0 && slot < searched) prefetch_scores(a, next_r, next_h, slot);
        const bool protects = slot < prefix;
        const int64_t base = protects ? 0 : prefix, to_v = a.block_slots * a.size, first = slot;
        const int64_t n = tile_slots(a, slot - base, (protects && prefix < end ? prefix : end) - base);
        const T* k = seen_row<T>(a, r, h, slot, prefix);
        float* own = logits && !protects ? logits + slot - prefix : nullptr;
        const float* bias = biases > slot ? a.prefix_bias(r, h, slot) : nullptr;
        slot += n;
        const T* next = slot < end ? seen_row<T>(a, r, h, slot, prefix) : k;
        Tile<T> tile{k, k + to_v, next, next + to_v, 0, 0, bias};
        for (int64_t i = 0, last; i < tokens.count; i = last) {
            if (!protects) tokens.change(i, first - base, slot - base);
            const int64_t seen = tokens.end(i) < slot ? tokens.end(i) : slot;
            for (last = i + 1; last < tokens.count; last++) {
                if ((tokens.end(last) < slot ? tokens.end(last) : slot) != seen) break;
                if (!protects && tokens.changes(last, first - base, slot - base)) break;
            }
            if (seen <= first) continue;
            const int64_t biased = biases - first < seen - first ? biases - first : seen - first;
            tile.slots = int(seen - first), tile.biased = int(biased > 0 ? biased : 0);
            add_tile<A>(a, tile, shape, begun.from(a, i * a.group), (last - i) * a.group, own);
            tile.next_k = tile.next_v = nullptr;
        }
        if (!protects) tokens.change_back(first - base, slot - base);
    }
}

// Adds the attention sinks of head h to its sums: one more key per query head, whose value is 0.
inline void add_sinks(const DecodeStep& a, int64_t h, const Partial& sums) {
    const int64_t floats = row_floats(a);
    for (int64_t g = 0; g < a.group; g++) {
        const float sink = a.sink_logits[h * a.group + g];
        const float top = sink > sums.maximum[g] ? sink : sums.maximum[g];
        const float factor = __builtin_expf(sums.maximum[g] - top);
        for (int64_t i = g * floats; i < (g + 1) * floats; i++) sums.acc[i] *= factor;
        sums.total[g] = sums.total[g] * factor + __builtin_expf(sink - top);
        sums.maximum[g] = top;
    }
}

// Writes output and log-sum-exps; the sums end as weighted means. evicted: estimated contribution of the evicted tokens to the output, or
// null.
template <class A>
void write_output(const DecodeStep& a, int64_t r, int64_t h, const Partial& sums, const Correction* evicted) {
    const int64_t floats = row_floats(a);
    for (int64_t g = 0; g < a.group; g++) {
        const int64_t row = (r * a.heads + h) * a.group + g;
        a.lse[row] = sums.maximum[g] + __builtin_logf(sums.total[g]);
        float* acc = sums.acc + g * floats;
        for (int64_t i = 0; i < floats; i += VL) store(acc + i, load(acc + i) / sums.total[g]);
        for (int64_t e = 0; e < a.size; e++) {
            float x = acc[A::place(e)];
            if (evicted) x += evicted->share[g] * (evicted->out[g * a.size + e] - x);
            if (a.q_is_bf16) static_cast<bf16*>(a.out)[row * a.size + e] = to_bf16(x);
            else static_cast<float*>(a.out)[row * a.size + e] = x;
        }
    }
}

// Writes the query's weights, averaged over the query heads, to the score fields of slots [0, used), or
// adds them.
inline void put_mass(const DecodeStep& a, int64_t r, int64_t h, int64_t used, const float* logits, const Partial& sums) {
    for (int64_t slot = 0; slot < used; slot += VL) {  // a block is a multiple of VL slots
        vf mass{};
        for (int64_t g = 0; g < a.group; g++)
            mass += exp(load(logits + g * a.mass_row + slot) - sums.maximum[g]) / sums.total[g];
        mass /= float(a.group);
        float* scores = a.scores(a.slot_region(r, h, slot)) + slot % a.block_slots;
        const vf before = load(scores);
        store(scores, lanes() + int32_t(slot) < int32_t(used) ? (a.scorer.mean ? before + mass : mass) : before);
    }
}

// Calls f with the way of attending for the step's dtypes.
template <class F>
KVPOP_INLINE void with_attention(const DecodeStep& a, const F& f) {
#if KVPOP_AMX
    if (Multiplied::takes(a)) return f(Multiplied{});
#endif
#if KVPOP_BF16_DOT
    if (a.cache_is_bf16 && a.q_is_bf16) return f(Paired{});
#endif
    if (a.cache_is_bf16) f(Widened<bf16>{});
    else f(Widened<float>{});
}

// Finishes attention of one head with the sums over its prefix and slots [0, used), and writes the results. logits:
// [G, mass_row] by slot if attention masses are kept, else null. scratch: correction_scratch() floats.
template <class A>
void finish_attention(const DecodeStep& a, int64_t r, int64_t h, int64_t used, const Partial& sums, const float* logits,
                      float* scratch) {
    if (a.sink_logits) add_sinks(a, h, sums);
    Correction evicted;
    const int64_t count = a.corrects && !a.in_prefix(r) ? a.evicted(r, h, a.position(r) + 1) : 0;
    if (count > 0) evicted = correction(a, r, h, float(count), sums.maximum, sums.total, {scratch});
    write_output<A>(a, r, h, sums, count > 0 ? &evicted : nullptr);
    if (logits && used) put_mass(a, r, h, used, logits, sums);
}

// Runs attention of one head over its prefix and slots [0, used). scratch: attend_scratch() floats. begun: sums over its
// prefix, or null.
inline void attend(const DecodeStep& a, int64_t r, int64_t h, int64_t used, float* scratch, const Begun* begun = nullptr) {
    with_attention(a, [&](auto way) {
        using A = decltype(way);
        Pieces pieces{scratch + begun_floats(a, a.group)};
        float* logits = a.scorer.coupled() ? pieces.take(a.group * a.mass_row) : nullptr;
        const int64_t prefix = a.prefix_seen(r);
        const Begun own = begun ? *begun : Begun::at(a, a.group, scratch);
        if (!begun) begin_sums<A>(a, r, h, own);
        sum_slots<A>(a, r, h, begun ? prefix : 0, OneToken{prefix + used}, true, own, logits);
        finish_attention<A>(a, r, h, used, own.sums, logits, pieces.next);
    });
}

// Runs one of several parts of a head's attention, which may run in parallel: part `part` of `parts`, split
// between tiles. sums: partial_floats() floats.
inline void attend_part(const DecodeStep& a, int64_t r, int64_t h, int64_t used, int64_t part, int64_t parts, float* sums,
                        float* scratch) {
    const int64_t seen = a.prefix_seen(r) + used, tiles = (seen + TILE - 1) / TILE;
    const int64_t begin = tiles * part / parts * TILE, end = tiles * (part + 1) / parts * TILE;
    with_attention(a, [&](auto way) {
        using A = decltype(way);
        const Begun begun = Begun::of(a, a.group, scratch, Partial(a, a.group, sums));
        begin_sums<A>(a, r, h, begun);
        sum_slots<A>(a, r, h, begin, OneToken{end < seen ? end : seen}, false, begun, nullptr);
    });
}

// Merges all parts, which are contiguous in memory, and writes the output.
inline void merge_parts(const DecodeStep& a, int64_t r, int64_t h, int64_t parts, float* sums) {
    const Partial whole(a, a.group, sums);
    const int64_t floats = row_floats(a);
    for (int64_t part = 1; part < parts; part++) {
        const Partial more(a, a.group, sums + part * partial_floats(a));
        for (int64_t g = 0; g < a.group; g++) {
            if (more.total[g] == 0) continue;  // this part has no slots
            const float top = whole.maximum[g] > more.maximum[g] ? whole.maximum[g] : more.maximum[g];
            const float mine = __builtin_expf(whole.maximum[g] - top), its = __builtin_expf(more.maximum[g] - top);
            for (int64_t i = g * floats; i < (g + 1) * floats; i++)
                whole.acc[i] = mine * whole.acc[i] + its * more.acc[i];
            whole.total[g] = mine * whole.total[g] + its * more.total[g];
            whole.maximum[g] = top;
        }
    }
    if (a.sink_logits) add_sinks(a, h, whole);
    with_attention(a, [&](auto way) { write_output<decltype(way)>(a, r, h, whole, nullptr); });
}

}  // namespace kvpop::KVPOP_ISA
