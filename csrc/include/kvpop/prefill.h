// The two stages of a prefill piece that depend on the instruction set: the scorer, and attention over
// packed tiles.

#pragma once

namespace kvpop::KVPOP_ISA {

// Row of head h of token t, counted from the start of the chunk.
template <class T>
KVPOP_INLINE const T* token(const void* base, const int64_t* stride, int64_t t, int64_t h) {
    return static_cast<const T*>(base) + t * stride[0] + h * stride[1];
}

KVPOP_INLINE int64_t prefill_rows(const DecodeStep& a) { return TILE_QUERIES * a.group; }

inline int64_t prefill_scratch(const DecodeStep& a) {
    const int64_t rows = prefill_rows(a);
    return 2 * Pieces::round(rows * a.size) + 2 * Pieces::round(rows * TILE_KEYS) + 3 * Pieces::round(rows) +
           scratch_floats(a);
}

// Computes raw scores of the tokens leaving the window in the piece and, for scorers that score at
// insertion, of the piece's own tokens. It proceeds token by token as in a decode step.
template <class T>
void prefill_scores_of(PrefillChunk& chunk, const Piece& piece, int64_t h, float* scratch) {
    const DecodeStep& a = chunk.step;
    const Scorer& s = a.scorer;
    const PrefillHead& work = chunk.heads[h];
    const Head<T> head{a, 0, h};
    Pieces pieces{scratch};
    MLSTMBatch batch(a, pieces);
    float *x_u = pieces.take(2 * a.size), *hidden = pieces.take(s.hidden);
    const State state{a, 0, h};
    const Roles roles = a.roles_of(0);
    // Row of token t: in its slot if it precedes the piece, else in the chunk.
    const auto row = [&](int64_t t) {
        const int64_t slot = roles.ring_slot(t), at = t - chunk.start;
        return t < piece.a ? Row<T>{head.k(slot), head.v(slot)}
                           : Row<T>{token<T>(a.k, a.k_stride, at, h), token<T>(a.v, a.v_stride, at, h)};
    };
    const auto inserted = [&](int64_t t) { return t < piece.a ? *head.score(roles.ring_slot(t)) : work.inserted[t - piece.a]; };
    for (int64_t i = 0; i < piece.tokens(); i++) work.inserted[i] = a.given_score(piece.a - chunk.start + i, h);
    int64_t left = 0;
    for (int64_t t = piece.a; t < piece.b; t++) {
        const int64_t u = t - roles.window, number = (t - piece.a) % BATCH;
        const bool leaving = u >= roles.first_evictable();
        float read = 0;
        if (s.kind == ScorerKind::MLSTM) {
            const int64_t count = t + BATCH < piece.b ? BATCH : piece.b - t;
            for (int64_t i = 0; number == 0 && i < count; i++) {
                const Row<T> taken = row(t + i), leaves = u + i >= roles.first_evictable() ? row(u + i) : taken;
                into_batch(head, taken, u + i >= roles.first_evictable() ? &leaves : nullptr, batch, i);
            }
            if (number == 0) mlstm_project(a, h, count, batch);
            if (t == 0) state.reset();
            read = mlstm_step(a, state, batch, number);
            if (!s.delayed) work.inserted[t - piece.a] = read;
        }
        if (!leaving) continue;
        const bool stored = s.kind == ScorerKind::Given || (s.kind == ScorerKind::MLSTM && !s.delayed);
        const float score = stored ? inserted(u) : read;
        work.leaving[left++] = s.kind == ScorerKind::MLSTM ? score : stateless_score(head, row(u), score, x_u, hidden);
    }
}

inline void prefill_scores(PrefillChunk& chunk, const Piece& piece, int64_t h, float* scratch) {
    if (chunk.step.cache_is_bf16) prefill_scores_of<bf16>(chunk, piece, h, scratch);
    else prefill_scores_of<float>(chunk, piece, h, scratch);
}

// Visibility of a tile's keys to the queries [first, last] of a piece.
struct TileSight {
    bool any, all;
};

inline TileSight tile_sight(const int32_t* born, const int32_t* gone, int32_t first, int32_t last) {
    vi any{}, all = vi{} - 1;
    for (int64_t i = 0; i < TILE_KEYS; i += VL) {
        const vi b = load_as<vi>(born + i), g = load_as<vi>(gone + i);
        any |= (b <= last) & (g > first) & (b < g);
        all &= (b <= first) & (g > last);
    }
    TileSight sight{false, true};
    for (int i = 0; i < VL; i++) {
        sight.any |= any[i] != 0;
        sight.all &= all[i] != 0;
    }
    return sight;
}

KVPOP_INLINE void store_weights(uint32_t* out, const vf* p, FloatWords) {
    for (int64_t i = 0; i < TILE_KEYS / VL; i++) store(reinterpret_cast<float*>(out) + i * VL, p[i]);
}
#if KVPOP_BF16_DOT
template <class W>
KVPOP_INLINE void store_weights(uint32_t* out, const vf* p, W) {
    for (int64_t i = 0; i < TILE_KEYS / VL; i += 2) {
        const __m512bh pair = _mm512_cvtne2ps_pbh((__m512)p[i + 1], (__m512)p[i]);
        __builtin_memcpy(out + i * VL / 2, &pair, sizeof pair);
    }
}
#endif

// Converts the logits of a tile to weights under the new maxima, row by row. factor[row] scales what was
// accumulated before. bias: per key, read only if BIASED.
template <class W, bool BIASED>
KVPOP_INLINE void tile_weights(const float* logits, uint32_t* weights, int64_t queries, int64_t group, int32_t first,
                               const int32_t* born, const int32_t* gone, const float* bias, bool all, float scale, float* maximum,
                               float* total, float* factor) {
    constexpr int64_t VECTORS = TILE_KEYS / VL;
    const vf none = splat(-__builtin_inff());
    for (int64_t i = 0; i < queries; i++) {
        const int32_t at = first + int32_t(i);
        for (int64_t row = i * group; row < (i + 1) * group; row++) {
            vf p[VECTORS], top = none, sums{};
            for (int64_t j = 0; j < VECTORS; j++) {
                p[j] = scale * load(logits + row * TILE_KEYS + j * VL);
                if (BIASED) p[j] += load(bias + j * VL);
                if (!all) {
                    const vi seen = (load_as<vi>(born + j * VL) <= at) & (load_as<vi>(gone + j * VL) > at);
                    p[j] = seen ? p[j] : none;
                }
                top = max(top, p[j]);
            }
            const float here = max(top), before = maximum[row];
            factor[row] = 1;
            if (here > before) {
                maximum[row] = here;
                factor[row] = exp(splat(before - here))[0];
            }
            const vf m = splat(maximum[row]);
            for (int64_t j = 0; j < VECTORS; j++) sums += p[j] = exp(p[j] - m);
            total[row] = total[row] * factor[row] + sum(sums);
            store_weights(weights + row * TILE_KEYS / W::PER, p, W{});
        }
    }
}

template <class W>
KVPOP_INLINE void load_queries(const DecodeStep& a, int64_t first, int64_t queries, int64_t h, uint32_t* out) {
    for (int64_t i = 0; i < queries; i++)
        for (int64_t g = 0; g < a.group; g++, out += a.size / W::PER) {
            const int64_t head = h * a.group + g;
            if (W::PER == 2) {
                const bf16* row = static_cast<const bf16*>(a.q) + (first + i) * a.q_stride[0] + head * a.q_stride[1];
                __builtin_memcpy(out, row, a.size * sizeof(bf16));
            } else {
                for (int64_t e = 0; e < a.size; e++) {
                    const float x = read_q(a, first + i, head, e);
                    __builtin_memcpy(out + e, &x, sizeof x);
                }
            }
        }
}

// Runs attention of KV head h for query tokens [first, first + queries), counted from the start of the
// piece.
template <class W>
void prefill_attend_of(const PrefillChunk& chunk, const Piece& piece, int64_t h, int64_t first, int64_t queries,
                       float* scratch) {
    const DecodeStep& a = chunk.step;
    const PrefillHead& work = chunk.heads[h];
    const int64_t rows = queries * a.group, most = prefill_rows(a), at = piece.a - chunk.start + first;
    Pieces pieces{scratch};
    uint32_t* q = reinterpret_cast<uint32_t*>(pieces.take(most * a.size));
    float *acc = pieces.take(most * a.size), *logits = pieces.take(most * TILE_KEYS);
    uint32_t* weights = reinterpret_cast<uint32_t*>(pieces.take(most * TILE_KEYS));
    float *maximum = pieces.take(most), *total = pieces.take(most), *factor = pieces.take(most);
    load_queries<W>(a, at, queries, h, q);
    for (int64_t i = 0; i < rows; i++) {
        maximum[i] = a.sink_logits ? a.sink_logits[h * a.group + i % a.group] : -__FLT_MAX__;
        total[i] = a.sink_logits ? 1 : 0;
    }
    for (int64_t i = 0; i < rows * a.size; i++) acc[i] = 0;
    const int64_t tiles = work.tiles, words = a.size / W::PER;
    for (int64_t t = 0; t < tiles; t++) {
        const int32_t *born = work.born + t * TILE_KEYS, *gone = work.gone + t * TILE_KEYS;
        const TileSight sight = tile_sight(born, gone, int32_t(first), int32_t(first + queries - 1));
        if (!sight.any) continue;
        const uint32_t *k = work.keys + t * TILE_KEYS * words, *v = work.values + t * TILE_KEYS * words;
        gemm<W>({q, words, k, TILE_KEYS, words, logits, TILE_KEYS, nullptr}, rows, TILE_KEYS);
        const float* bias = work.bias ? work.bias + t * TILE_KEYS : nullptr;
        (bias ? tile_weights<W, true> : tile_weights<W, false>)(logits, weights, queries, a.group, int32_t(first), born, gone,
                                                                bias, sight.all, a.scale, maximum, total, factor);
        gemm<W>({weights, TILE_KEYS / W::PER, v, a.size, TILE_KEYS / W::PER, acc, a.size, factor}, rows, a.size);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = (at + i / a.group) * a.heads * a.group + h * a.group + i % a.group;
        a.lse[row] = maximum[i] + __builtin_logf(total[i]);
        for (int64_t e = 0; e < a.size; e++) {
            const float x = acc[i * a.size + e] / total[i];
            if (a.q_is_bf16) static_cast<bf16*>(a.out)[row * a.size + e] = to_bf16(x);
            else static_cast<float*>(a.out)[row * a.size + e] = x;
        }
    }
}

inline void prefill_attend(const PrefillChunk& chunk, const Piece& piece, int64_t h, int64_t first, int64_t queries,
                           float* scratch) {
#if KVPOP_AMX
    if (chunk.packed.per == 2 && chunk.step.size / AmxWords::PER % AMX_WORDS == 0) {
        const AmxTiles tiles;
        return prefill_attend_of<AmxWords>(chunk, piece, h, first, queries, scratch);
    }
#endif
#if KVPOP_BF16_DOT
    if (chunk.packed.per == 2) return prefill_attend_of<Bf16Words>(chunk, piece, h, first, queries, scratch);
#endif
    prefill_attend_of<FloatWords>(chunk, piece, h, first, queries, scratch);
}

}  // namespace kvpop::KVPOP_ISA
