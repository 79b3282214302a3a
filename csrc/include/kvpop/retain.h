// One step of one request and head: score the token leaving the window, evict, write the new token, attend.

#pragma once

namespace kvpop::KVPOP_ISA {

constexpr int DL = VL / 2;  // doubles per vector

KVPOP_INLINE vd splat(double x) { return x - vd{}; }

// Returns a * b, rounded separately and never contracted into a fused multiply-add, so that effective
// scores are the same on every instruction set.
KVPOP_INLINE vd rounded_product(vd a, double b) {
    vd product = a * b;
#if defined(__x86_64__)
    __asm__("" : "+v"(product));
#endif
    return product;
}

struct Victim {
    double effective, age, slot;  // slot -1: none
};

// Finds the lowest effective score among slots [first, end); of equal scores the oldest token's. factors:
// of raw scores by slot, or null.
inline Victim lowest(const DecodeStep& a, int64_t r, int64_t h, int64_t first, int64_t end, int64_t q, const float* factors) {
    const double log_gamma = a.log_gamma[h];
    vd iota;
    for (int i = 0; i < DL; i++) iota[i] = i;
    const bool draws = a.scorer.kind == ScorerKind::Draw;
    const uint64_t base = draws ? draw_base(a.draw_key(r, h), q) : 0;
    vd best = splat(__builtin_inf()), best_age = splat(-1.0), best_slot = splat(-1.0);
    for (int64_t block = first / a.block_slots; block * a.block_slots < end; block++) {
        uint8_t* region = a.slot_region(r, h, block * a.block_slots);
        const float* scores = a.scores(region);
        const int32_t* positions = a.slot_positions(region);
        const int64_t from = block * a.block_slots < first ? first % a.block_slots / DL * DL : 0;
        for (int64_t i = from; i < a.block_slots && block * a.block_slots + i < end; i += DL) {
            const vd slot = iota + double(block * a.block_slots + i);
            const vd age = double(q) - __builtin_convertvector(load_as<half_i>(positions + i), vd);
            vd steps = age;
            if (a.decay_step != 1)  // exact: both are integers below 2^31
                steps = __builtin_convertvector(__builtin_convertvector(age / double(a.decay_step), half_i), vd);
            vd raw = __builtin_convertvector(load_as<half_f>(scores + i), vd);
            for (int j = 0; draws && j < DL; j++) raw[j] = draw_of(base, positions[i + j]);
            if (a.scorer.mean) raw /= age;
            if (a.scorer.ages) raw *= age;
            if (factors) raw *= __builtin_convertvector(load_as<half_f>(factors + block * a.block_slots + i), vd);
            const vd effective = raw + rounded_product(steps, log_gamma);
            const vl inside = (slot >= double(first)) & (slot < double(end));
            const vl take = inside & ((effective < best) | ((effective == best) & (age > best_age)));
            best = take ? effective : best;
            best_age = take ? age : best_age;
            best_slot = take ? slot : best_slot;
        }
    }
    Victim victim{__builtin_inf(), -1, -1};
    for (int i = 0; i < DL; i++)
        if (best[i] < victim.effective || (best[i] == victim.effective && best_age[i] > victim.age))
            victim = {best[i], best_age[i], best_slot[i]};
    return victim;
}

template <class T>
struct Head {
    const DecodeStep& a;
    int64_t r, h;
    Roles roles = a.roles_of(r);

    T* k(int64_t slot) const {
        return reinterpret_cast<T*>(a.slot_region(r, h, slot)) + slot % a.block_slots * a.size;
    }
    T* v(int64_t slot) const { return k(slot) + a.block_slots * a.size; }
    float* score(int64_t slot) const { return a.scores(a.slot_region(r, h, slot)) + slot % a.block_slots; }

    void write(int64_t slot, const T* key, const T* value, float score_, int64_t position) const {
        __builtin_memcpy(k(slot), key, a.size * sizeof(T));
        __builtin_memcpy(v(slot), value, a.size * sizeof(T));
        *score(slot) = score_;
        a.slot_positions(a.slot_region(r, h, slot))[slot % a.block_slots] = int32_t(position);
    }
    // Reads key and value as one float row.
    void read(const T* key, const T* value, float* x) const {
        for (int64_t e = 0; e < a.size; e++) x[e] = to_float(key[e]);
        for (int64_t e = 0; e < a.size; e++) x[a.size + e] = to_float(value[e]);
    }
    // Returns the slot for token u, which leaves the window: the next free one, or that of a token with a
    // lower score; -1 evicts u.
    int64_t place(int64_t u, float score_, int64_t used, int64_t q, const float* factors) const {
        if (a.scorer.bounded && score_ < a.scorer.threshold) return -1;
        if (used < a.budget(r, h)) return used;
        const Victim victim = lowest(a, r, h, roles.first_long(), used, q, factors);
        double decay = double((q - u) / a.decay_step) * a.log_gamma[h];
#if defined(__x86_64__)
        __asm__("" : "+x"(decay));  // as in rounded_product
#endif
        double raw = a.scorer.mean ? double(score_) / double(q - u) : double(score_);
        if (a.scorer.kind == ScorerKind::Draw) raw = draw_of(draw_base(a.draw_key(r, h), q), u);
        if (a.scorer.ages) raw *= double(q - u);
        if (factors) raw *= double(factors[roles.ring_slot(u)]);
        return raw + decay < victim.effective ? -1 : int64_t(victim.slot);
    }
};

inline int64_t retain_scratch(const DecodeStep& a) {
    const Scorer& s = a.scorer;
    return Pieces::round(2 * a.size) + Pieces::round(s.hidden) + MLSTMBatch::floats(a) + Pieces::round(a.size) +
           residual_scratch(a);
}
inline int64_t scratch_floats(const DecodeStep& a) { return retain_scratch(a) + attend_scratch(a); }

// Rows of one token's key and value.
template <class T>
struct Row {
    const T *key, *value;
};

// Row of request r, head h, that the step adds.
template <class T>
KVPOP_INLINE Row<T> new_row(const DecodeStep& a, int64_t r, int64_t h) {
    return {static_cast<const T*>(a.k) + r * a.k_stride[0] + h * a.k_stride[1],
            static_cast<const T*>(a.v) + r * a.v_stride[0] + h * a.v_stride[1]};
}

// Slot of the token leaving the window in this step, or -1 if there is none.
inline int64_t leaving_slot(const DecodeStep& a, int64_t r) {
    const Roles roles = a.roles_of(r);
    const int64_t u = a.position(r) - roles.window;
    return u >= roles.first_evictable() ? roles.ring_slot(u) : -1;
}

// Sets entry i of a batch. `row` updates the state. A delayed scorer reads out `leaves`, the token leaving
// the window (null: none), any other scorer reads out `row`.
template <class T>
KVPOP_INLINE void into_batch(const Head<T>& head, const Row<T>& row, const Row<T>* leaves, MLSTMBatch& batch, int64_t i) {
    const int64_t wide = 2 * head.a.size;
    head.read(row.key, row.value, batch.x + i * wide);
    const Row<T>* read = head.a.scorer.delayed ? leaves : &row;
    batch.reads[i] = read != nullptr;
    if (read) head.read(read->key, read->value, batch.x_read + i * wide);
}

// Projects the new tokens of head h of `count` requests from r on, at most BATCH, for the mLSTM.
template <class T>
void project_steps(const DecodeStep& a, int64_t r, int64_t count, int64_t h, MLSTMBatch& batch) {
    for (int64_t i = 0; i < count; i++) {
        const Head<T> head{a, r + i, h};
        const int64_t from = a.in_prefix(r + i) ? -1 : leaving_slot(a, r + i);
        const Row<T> leaves = from < 0 ? Row<T>{} : Row<T>{head.k(from), head.v(from)};
        into_batch(head, new_row<T>(a, r + i, h), from < 0 ? nullptr : &leaves, batch, i);
    }
    mlstm_project(a, h, count, batch);
}

// Raw score of a token leaving the window, for scorers without state. stored_score: its score field. x, hidden:
// scratch.
template <class T>
KVPOP_INLINE float stateless_score(const Head<T>& head, const Row<T>& row, float stored_score, float* x, float* hidden) {
    const Scorer& s = head.a.scorer;
    const int64_t size = head.a.size;
    switch (s.kind) {
        case ScorerKind::Linear: head.read(row.key, row.value, x); return linear_score(s, head.h, x, 2 * size);
        case ScorerKind::MLP: head.read(row.key, row.value, x); return mlp_score(s, head.h, x, 2 * size, hidden);
        case ScorerKind::KeyNorm: return key_norm_score(row.key, size);
        case ScorerKind::AttentionMass:
        case ScorerKind::MomentResidual:
        case ScorerKind::Given: return stored_score;
        default: return 0;
    }
}

// Log of a step that is not taken back (UndoLog in verify.h).
struct NoLog {
    template <class T>
    KVPOP_INLINE void save(const Head<T>&, int64_t) const {}
};

// Runs the step without attention: scores, evictions, the new token. Returns the number of slots to attend
// to. batch: projected batch of an mLSTM, with the request as entry `number`. log: gets each slot before it is overwritten.
template <class T, class Log>
int64_t retain_of(const DecodeStep& a, int64_t r, int64_t h, const MLSTMBatch& batch, int64_t number, Pieces pieces, Log&& log) {
    const Head<T> head{a, r, h};
    const Scorer& s = a.scorer;
    if (a.in_prefix(r)) return 0;
    const int64_t q = a.position(r), slot = head.roles.ring_slot(q), from = leaving_slot(a, r);
    int64_t used = a.in_use(r, h), evicted = a.evicted(r, h, q);
    for (int64_t i = 0; i < used && a.searches(r, h); i += a.block_slots) prefetch_scores(a, r, h, i);
    float *x_u = pieces.take(2 * a.size), *hidden = pieces.take(s.hidden), *deviation = pieces.take(a.size);
    float inserted = a.given_score(r, h), read = 0;
    if (s.kind == ScorerKind::MLSTM) {
        const State state{a, r, h};
        if (q == 0) state.reset();
        read = mlstm_step(a, state, batch, number);
        if (!s.delayed) inserted = read;
    }
    if (from >= 0) {
        const Row<T> leaves{head.k(from), head.v(from)};
        float score = stateless_score(head, leaves, *head.score(from), x_u, hidden);
        if (s.kind == ScorerKind::MLSTM) score = s.delayed ? read : *head.score(from);
        float* factors = s.kind == ScorerKind::MomentResidual ? residuals_of<T>(a, r, h, from, used, pieces) : nullptr;
        const int64_t target = head.place(q - head.roles.window, score, used, q, factors);
        if (target < used && a.keeps_moments()) {
            const int64_t gone = target < 0 ? from : target;
            head.read(head.k(gone), head.v(gone), x_u);
            Moments(a, r, h).take_in(float(evicted + 1), x_u, deviation);
        }
        if (target >= 0) log.save(head, target), head.write(target, leaves.key, leaves.value, score, q - head.roles.window);
        if (target >= used) used = target + 1;
    }
    const Row<T> own = new_row<T>(a, r, h);
    log.save(head, slot);
    head.write(slot, own.key, own.value, inserted, q);
    if (slot >= used) used = slot + 1;
    *a.tokens_seen(r, h) = int32_t(q + 1);
    if (s.bounded) *a.filled(r, h) = int32_t(used > head.roles.first_long() ? used - head.roles.first_long() : 0);
    return used;
}

// Same for one request, whose token is projected here.
template <class T>
int64_t retain_alone(const DecodeStep& a, int64_t r, int64_t h, float* scratch) {
    Pieces pieces{scratch};
    MLSTMBatch batch(a, pieces);
    if (a.scorer.kind == ScorerKind::MLSTM) project_steps<T>(a, r, 1, h, batch);
    return retain_of<T>(a, r, h, batch, 0, pieces, NoLog{});
}
inline int64_t retain(const DecodeStep& a, int64_t r, int64_t h, float* scratch) {
    return a.cache_is_bf16 ? retain_alone<bf16>(a, r, h, scratch) : retain_alone<float>(a, r, h, scratch);
}

// Builds the state of request r's head from the last `replay` tokens of its prefix, slots of cartridges left out.
template <class T>
void begin_tail_of(const DecodeStep& a, int64_t r, int64_t h, int64_t replay, float* scratch) {
    Pieces pieces{scratch};
    MLSTMBatch batch(a, pieces);
    const Head<T> head{a, r, h};
    const State state{a, r, h};
    const int64_t end = a.prefix(r), to_v = a.block_slots * a.size;
    if (end) state.reset();
    for (int64_t t = end - replay > a.biased(r) ? end - replay : a.biased(r); t < end; t += BATCH) {
        const int64_t count = t + BATCH < end ? BATCH : end - t;
        for (int64_t i = 0; i < count; i++) {
            const T* key = seen_row<T>(a, r, h, t + i, end);
            head.read(key, key + to_v, batch.x + i * 2 * a.size);
            batch.reads[i] = false;
        }
        mlstm_project(a, h, count, batch);
        for (int64_t i = 0; i < count; i++) mlstm_step(a, state, batch, i);
    }
}
inline void begin_tail(const DecodeStep& a, int64_t r, int64_t h, int64_t replay, float* scratch) {
    a.cache_is_bf16 ? begin_tail_of<bf16>(a, r, h, replay, scratch) : begin_tail_of<float>(a, r, h, replay, scratch);
}

// Runs the whole step of head h of `count` requests from r on, at most BATCH.
template <class T>
void decode_heads_of(const DecodeStep& a, int64_t r, int64_t count, int64_t h, float* scratch) {
    Pieces pieces{scratch};
    MLSTMBatch batch(a, pieces);
    if (a.scorer.kind == ScorerKind::MLSTM) project_steps<T>(a, r, count, h, batch);
    for (int64_t i = 0; i < count; i++)
        attend(a, r + i, h, retain_of<T>(a, r + i, h, batch, i, pieces, NoLog{}), scratch + retain_scratch(a));
}

inline void decode_heads(const DecodeStep& a, int64_t r, int64_t count, int64_t h, float* scratch) {
    if (a.cache_is_bf16) decode_heads_of<bf16>(a, r, count, h, scratch);
    else decode_heads_of<float>(a, r, count, h, scratch);
}

}  // namespace kvpop::KVPOP_ISA
