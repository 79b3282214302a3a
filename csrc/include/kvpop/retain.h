// One step of one request and head: score the token that leaves the window, evict, write the new token, attend.

#pragma once

namespace kvpop::KVPOP_ISA {

constexpr int DL = VL / 2;  // doubles per vector

KVPOP_INLINE vd splat(double x) { return x - vd{}; }

// a * b with its own rounding, never contracted into a fused multiply-add: effective scores are then the same on every
// instruction set.
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

// The lowest effective score among slots [first, end); of equal ones the oldest token. factors: of raw scores by slot, or null.
inline Victim lowest(const DecodeStep& a, int64_t r, int64_t h, int64_t first, int64_t end, int64_t q, const float* factors) {
    const double log_gamma = a.log_gamma[h];
    vd iota;
    for (int i = 0; i < DL; i++) iota[i] = i;
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

    T* k(int64_t slot) const {
        return reinterpret_cast<T*>(a.slot_region(r, h, slot)) + slot % a.block_slots * a.size;
    }
    T* v(int64_t slot) const { return k(slot) + a.block_slots * a.size; }
    float* score(int64_t slot) const { return a.scores(a.slot_region(r, h, slot)) + slot % a.block_slots; }

    // Slot 0's position word holds tokens_seen instead.
    void write(int64_t slot, const T* key, const T* value, float score_, int64_t position) const {
        __builtin_memcpy(k(slot), key, a.size * sizeof(T));
        __builtin_memcpy(v(slot), value, a.size * sizeof(T));
        *score(slot) = score_;
        if (slot > 0) a.slot_positions(a.slot_region(r, h, slot))[slot % a.block_slots] = int32_t(position);
    }
    // Key and value as one float row.
    void read(const T* key, const T* value, float* x) const {
        for (int64_t e = 0; e < a.size; e++) x[e] = to_float(key[e]);
        for (int64_t e = 0; e < a.size; e++) x[a.size + e] = to_float(value[e]);
    }
    // The slot for token u that leaves the window: the next free one, or that of a worse token; -1 drops u.
    int64_t place(int64_t u, float score_, int64_t valid, int64_t q, const float* factors) const {
        const int64_t first = a.roles.first_long(), free = valid > first ? valid : first;
        if (a.scorer.bounded && score_ < a.scorer.threshold) return -1;
        if (free < a.budget(r, h)) return free;
        const Victim victim = lowest(a, r, h, first, valid, q, factors);
        double decay = double((q - u) / a.decay_step) * a.log_gamma[h];
#if defined(__x86_64__)
        __asm__("" : "+x"(decay));  // as in rounded_product
#endif
        double raw = a.scorer.mean ? double(score_) / double(q - u) : double(score_);
        if (a.scorer.ages) raw *= double(q - u);
        if (factors) raw *= double(factors[a.roles.ring_slot(u)]);
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

// The row of request r, head h, that the step adds.
template <class T>
KVPOP_INLINE Row<T> new_row(const DecodeStep& a, int64_t r, int64_t h) {
    return {static_cast<const T*>(a.k) + r * a.k_stride[0] + h * a.k_stride[1],
            static_cast<const T*>(a.v) + r * a.v_stride[0] + h * a.v_stride[1]};
}

// Token t of request r as number i of a batch: `row` is taken in, and it or the one that leaves the window is read out.
template <class T>
KVPOP_INLINE void into_batch(const Head<T>& head, const Row<T>& row, const Row<T>* leaves, MLSTMBatch& batch, int64_t i) {
    const int64_t wide = 2 * head.a.size;
    head.read(row.key, row.value, batch.x + i * wide);
    const Row<T>* read = head.a.scorer.delayed ? leaves : &row;
    batch.reads[i] = read != nullptr;
    if (read) head.read(read->key, read->value, batch.x_read + i * wide);
}

// Tokens [t, end) of a request from number i on, out of its slots but for the newest, which is `own`.
template <class T>
void batch_of(const Head<T>& head, int64_t t, int64_t end, int64_t q, const Row<T>& own, MLSTMBatch& batch, int64_t i) {
    const Roles& roles = head.a.roles;
    for (; t < end; t++, i++) {
        const int64_t at = roles.ring_slot(t), u = t - roles.window, from = u >= roles.sinks ? roles.ring_slot(u) : 0;
        const Row<T> row = t == q ? own : Row<T>{head.k(at), head.v(at)}, leaves{head.k(from), head.v(from)};
        into_batch(head, row, u >= roles.sinks ? &leaves : nullptr, batch, i);
    }
}

// Raw score of a token that leaves the window, of scorers without a state. parked: its score word; x, hidden: scratch.
template <class T>
KVPOP_INLINE float stateless_score(const Head<T>& head, const Row<T>& row, float parked, float* x, float* hidden) {
    const Scorer& s = head.a.scorer;
    const int64_t size = head.a.size;
    switch (s.kind) {
        case ScorerKind::Linear: head.read(row.key, row.value, x); return linear_score(s, head.h, x, 2 * size);
        case ScorerKind::MLP: head.read(row.key, row.value, x); return mlp_score(s, head.h, x, 2 * size, hidden);
        case ScorerKind::KeyNorm: return key_norm_score(row.key, size);
        case ScorerKind::AttentionMass:
        case ScorerKind::MomentResidual:
        case ScorerKind::Given:
        case ScorerKind::Votes: return parked;
        default: return 0;
    }
}

// What a token that leaves the window scores lies in its score word afterwards, and the state has taken in what it is to, where
// decisions fall; returns the score of the new token at its insertion. projected: which of the batch's tokens is the request's,
// or -1 if none is yet.
template <class T>
float score_of(const DecodeStep& a, int64_t r, int64_t h, MLSTMBatch& batch, int64_t projected, Pieces pieces) {
    const Head<T> head{a, r, h};
    const Scorer& s = a.scorer;
    const Roles roles = a.roles_of(r);
    const int64_t q = a.position(r), first = q + 1 - roles.decide_every;
    float inserted = a.given_score(r, h);
    if (!roles.decides_at(q)) return inserted;
    const Row<T> own = new_row<T>(a, r, h);
    float *x_u = pieces.take(2 * a.size), *hidden = pieces.take(s.hidden);
    const State state{a, r, h};
    const bool generated = s.kind == ScorerKind::Votes && q > a.prompt(r);
    if (s.kind == ScorerKind::Votes && !generated) pool_votes(a, r, h, q, a.in_use(r, h));
    for (int64_t t = first; t <= q; t++) {
        const int64_t u = t - roles.window;
        const bool leaving = u >= roles.sinks;
        const int64_t from = leaving ? roles.ring_slot(u) : 0;
        const Row<T> leaves{head.k(from), head.v(from)};
        float score = leaving ? stateless_score(head, leaves, generated ? GENERATED : *head.score(from), x_u, hidden) : 0;
        if (s.kind == ScorerKind::MLSTM) {
            const int64_t number = (t - first) % BATCH, end = t + BATCH < q + 1 ? t + BATCH : q + 1;
            if (projected < 0 && number == 0) {
                batch_of(head, t, end, q, own, batch, 0);
                mlstm_project(a, h, end - t, batch);
            }
            if (t == 0) state.reset();
            const float read = mlstm_step(a, state, batch, projected < 0 ? number : projected);
            (s.delayed ? score : inserted) = read;
            if (t < q) *head.score(roles.ring_slot(t)) = inserted;
            if (!s.delayed && leaving) score = *head.score(from);
        }
        if (leaving) *head.score(from) = score;
    }
    return inserted;
}

// The rest of the step but attention: evictions, slot moves, the new token; returns the slots to attend over.
template <class T>
Runs place_of(const DecodeStep& a, int64_t r, int64_t h, float inserted, Pieces pieces) {
    const Head<T> head{a, r, h};
    const Roles roles = a.roles_of(r);
    const int64_t q = a.position(r), slot = roles.ring_slot(q);
    int64_t valid = a.in_use(r, h), evicted = a.evicted(r, h, q);
    const Row<T> own = new_row<T>(a, r, h);
    float *x_u = pieces.take(2 * a.size), *deviation = pieces.take(a.size), *factors = nullptr;
    const Moments moments(a, r, h);
    if (a.scorer.kind == ScorerKind::MomentResidual && a.evicted(r, h, q + 1) > evicted)
        factors = residuals_of<T>(a, r, h, q, valid, pieces);
    for (int64_t t = q + 1 - roles.decide_every; t <= q && roles.decides_at(q); t++) {
        const int64_t u = t - roles.window;
        if (u < roles.sinks) continue;
        const int64_t from = roles.ring_slot(u), target = head.place(u, *head.score(from), valid, q, factors);
        if (target < valid && a.keeps_moments()) {
            const int64_t gone = target < 0 ? from : target;
            head.read(head.k(gone), head.v(gone), x_u);
            moments.take_in(float(++evicted), x_u, deviation);
        }
        if (target < 0) continue;
        if (factors) factors[target] = factors[from];
        head.write(target, head.k(from), head.v(from), *head.score(from), u);
        valid = target < valid ? valid : target + 1;
    }
    head.write(slot, own.key, own.value, inserted, q);
    *a.tokens_seen(r, h) = int32_t(q + 1);
    if (a.counts_slots()) *a.filled(r, h) = float(valid > roles.first_long() ? valid - roles.first_long() : 0);
    return fresh_runs(roles, q + 1, slot < valid ? valid : slot + 1);
}

// All of the step but attention.
template <class T>
Runs retain_of(const DecodeStep& a, int64_t r, int64_t h, MLSTMBatch& batch, int64_t projected, Pieces pieces) {
    const int64_t valid = a.valid_slots(r, h);
    for (int64_t i = 0; i < valid && a.searches(r, h); i += a.block_slots) prefetch_scores(a, r, h, i);
    const float inserted = score_of<T>(a, r, h, batch, projected, pieces);
    return place_of<T>(a, r, h, inserted, pieces);
}

// Evicts the `count` lowest long-range tokens; the last ones move into their slots.
template <class T>
void shrink_of(const DecodeStep& a, int64_t r, int64_t h, int64_t count, Pieces pieces) {
    const Head<T> head{a, r, h};
    const int64_t q = a.position(r), first = a.roles.first_long();
    int64_t used = a.in_use(r, h), evicted = a.evicted(r, h, q);
    float *x = pieces.take(2 * a.size), *deviation = pieces.take(a.size);
    const Moments moments(a, r, h);
    for (; count > 0; count--) {
        const int64_t lowest_slot = int64_t(lowest(a, r, h, first, used, q, nullptr).slot), last = --used;
        const int64_t gone = lowest_slot < 0 ? last : lowest_slot;  // no score is a number
        if (a.keeps_moments()) {
            head.read(head.k(gone), head.v(gone), x);
            moments.take_in(float(++evicted), x, deviation);
        }
        if (gone == last) continue;
        const int64_t position = a.slot_positions(a.slot_region(r, h, last))[last % a.block_slots];
        head.write(gone, head.k(last), head.v(last), *head.score(last), position);
    }
    *a.filled(r, h) = float(used > first ? used - first : 0);
}

// The step of a head in three, for heads that have to wait for each other between them.
inline float score(const DecodeStep& a, int64_t r, int64_t h, float* scratch) {
    Pieces pieces{scratch};
    MLSTMBatch batch(a, pieces);
    return a.cache_is_bf16 ? score_of<bf16>(a, r, h, batch, -1, pieces) : score_of<float>(a, r, h, batch, -1, pieces);
}
inline void shrink(const DecodeStep& a, int64_t r, int64_t h, int64_t count, float* scratch) {
    a.cache_is_bf16 ? shrink_of<bf16>(a, r, h, count, {scratch}) : shrink_of<float>(a, r, h, count, {scratch});
}
inline void finish(const DecodeStep& a, int64_t r, int64_t h, float inserted, float* scratch) {
    const Runs runs = a.cache_is_bf16 ? place_of<bf16>(a, r, h, inserted, {scratch}) : place_of<float>(a, r, h, inserted, {scratch});
    attend(a, r, h, runs, scratch + retain_scratch(a));
}

inline Runs retain(const DecodeStep& a, int64_t r, int64_t h, float* scratch) {
    Pieces pieces{scratch};
    MLSTMBatch batch(a, pieces);
    return a.cache_is_bf16 ? retain_of<bf16>(a, r, h, batch, -1, pieces) : retain_of<float>(a, r, h, batch, -1, pieces);
}

// The whole step of head h of `count` requests from r on, at most BATCH.
template <class T>
void decode_heads_of(const DecodeStep& a, int64_t r, int64_t count, int64_t h, float* scratch) {
    Pieces pieces{scratch};
    MLSTMBatch batch(a, pieces);
    const bool together = a.scorer.kind == ScorerKind::MLSTM && a.roles.decide_every == 1;
    if (together) {
        for (int64_t i = 0; i < count; i++) {
            const int64_t q = a.position(r + i);
            batch_of(Head<T>{a, r + i, h}, q, q + 1, q, new_row<T>(a, r + i, h), batch, i);
        }
        mlstm_project(a, h, count, batch);
    }
    for (int64_t i = 0; i < count; i++) {
        const Runs runs = retain_of<T>(a, r + i, h, batch, together ? i : -1, pieces);
        attend(a, r + i, h, runs, scratch + retain_scratch(a));
    }
}

inline void decode_heads(const DecodeStep& a, int64_t r, int64_t count, int64_t h, float* scratch) {
    if (a.cache_is_bf16) decode_heads_of<bf16>(a, r, count, h, scratch);
    else decode_heads_of<float>(a, r, count, h, scratch);
}

}  // namespace kvpop::KVPOP_ISA
