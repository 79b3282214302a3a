// Commits, token and drafts of one request and head, by ordinary steps. What drafts overwrite is logged and put back.

#pragma once

namespace kvpop::KVPOP_ISA {

// What drafts overwrite: the state, the score fields that attention writes, counts, and rows of slots in the order in
// which they are written.
template <class T>
class UndoLog {
  public:
    static int64_t words(const VerifyStep& v) {
        const DecodeStep& a = v.step;
        return Pieces::round(state_floats(a)) + Pieces::round(a.mass_row) + Pieces::round(2 * v.most_drafts * row_floats(a));
    }
    UndoLog(const VerifyStep& v, const DecodeStep& a, int64_t h, Pieces& pieces)
        : a_(a), h_(h), state_(pieces.take(state_floats(a))), masses_(pieces.take(a.mass_row)),
          rows_(pieces.take(2 * v.most_drafts * row_floats(a))) {}

    // Begins to log, before the first draft.
    void begin() {
        on_ = true;
        used_ = a_.in_use(0, h_);
        copy_state([](float* pages, float* copy, int64_t bytes) { __builtin_memcpy(copy, pages, size_t(bytes)); });
        if (a_.scorer.coupled())
            copy_masses([](float* pages, float* copy, int64_t bytes) { __builtin_memcpy(copy, pages, size_t(bytes)); });
        if (a_.scorer.bounded) filled_ = *a_.filled(0, h_);
    }
    // Logs the row of a slot, before it is overwritten.
    void save(const Head<T>& head, int64_t slot) {
        if (!on_) return;
        float* row = rows_ + count_ * row_floats(a_);
        const int32_t index = int32_t(slot);
        count_++;
        __builtin_memcpy(row, head.k(slot), row_bytes());
        __builtin_memcpy(reinterpret_cast<uint8_t*>(row) + row_bytes(), head.v(slot), row_bytes());
        __builtin_memcpy(row + 2 * row_bytes() / 4, head.score(slot), 4);
        __builtin_memcpy(row + 2 * row_bytes() / 4 + 1, position(slot), 4);
        __builtin_memcpy(row + 2 * row_bytes() / 4 + 2, &index, 4);
    }
    // Puts everything back.
    void put_back() {
        const Head<T> head{a_, 0, h_};
        while (count_ > 0) {
            const float* row = rows_ + --count_ * row_floats(a_);
            int32_t slot;
            __builtin_memcpy(&slot, row + 2 * row_bytes() / 4 + 2, 4);
            __builtin_memcpy(head.k(slot), row, row_bytes());
            __builtin_memcpy(head.v(slot), reinterpret_cast<const uint8_t*>(row) + row_bytes(), row_bytes());
            __builtin_memcpy(head.score(slot), row + 2 * row_bytes() / 4, 4);
            __builtin_memcpy(position(slot), row + 2 * row_bytes() / 4 + 1, 4);
        }
        copy_state([](float* pages, float* copy, int64_t bytes) { __builtin_memcpy(pages, copy, size_t(bytes)); });
        if (a_.scorer.coupled())
            copy_masses([](float* pages, float* copy, int64_t bytes) { __builtin_memcpy(pages, copy, size_t(bytes)); });
        if (a_.scorer.bounded) *a_.filled(0, h_) = filled_;
    }

  private:
    static int64_t state_floats(const DecodeStep& a) {
        return a.scorer.state_floats() + (a.keeps_moments() ? Moments::floats(a.size) : 0);
    }
    static int64_t row_floats(const DecodeStep& a) { return 2 * a.size * int64_t(sizeof(T)) / 4 + 3; }  // K, V, score, position, slot
    size_t row_bytes() const { return size_t(a_.size) * sizeof(T); }
    int32_t* position(int64_t slot) const { return a_.slot_positions(a_.slot_region(0, h_, slot)) + slot % a_.block_slots; }
    template <class F>
    void copy_state(const F& f) const {
        const State state{a_, 0, h_};
        const int64_t floats = state_floats(a_);
        for (int64_t at = 0, count; at < floats; at += count) {
            float* words = state.words(at, floats - at, count);
            f(words, state_ + at, 4 * count);
        }
    }
    template <class F>
    void copy_masses(const F& f) const {
        for (int64_t slot = 0; slot < used_; slot += a_.block_slots) {
            const int64_t count = used_ - slot < a_.block_slots ? used_ - slot : a_.block_slots;
            f(a_.scores(a_.slot_region(0, h_, slot)), masses_ + slot, 4 * count);
        }
    }

    const DecodeStep& a_;
    const int64_t h_;
    float *state_, *masses_, *rows_;
    bool on_ = false;
    int32_t filled_ = 0;
    int64_t used_ = 0, count_ = 0;
};

// Tokens of one request and head, by position: staged ones before c, then those of the step. `step` is the ordinary step
// of the token that `at` has chosen, as of a batch of one request.
template <class T>
struct TokensOfHead {
    const VerifyStep& v;
    const int64_t r, h;
    int64_t position;
    DecodeStep step;
    int64_t c, prefix, seen;  // seen: tokens that the head has seen before

    TokensOfHead(const VerifyStep& verified, int64_t request, int64_t head)
        : v(verified), r(request), h(head), position(v.step.position(r)), step(v.step), c(position) {
        step.requests = 1;
        step.positions = &position, step.positions_stride = 0;
        step.page_table += r * step.table_stride[0];
        step.budgets += r * step.budgets_stride[0];
        if (step.prefix_raw) step.prefix_table += r * step.prefix_table_stride[0], step.prefix_tokens += r * step.prefix_tokens_stride;
        if (step.prefix_biased) step.prefix_biased += r * step.prefix_biased_stride;
        if (step.windows) step.windows += r * step.windows_stride;
        if (step.keys) step.keys += r * step.keys_stride[0];
        prefix = step.prefix(0);
        seen = c > prefix ? *step.tokens_seen(0, h) : c;
    }
    TokensOfHead(const TokensOfHead&) = delete;  // `step` points to `position`

    int64_t begin() const { return c <= prefix ? c : seen > prefix ? seen : prefix; }
    // Chooses the token at position t. outputs, log_sums: [Hq, D] and [Hq], which get the results of committed tokens.
    void at(int64_t t, float* outputs, float* log_sums) {
        const DecodeStep& all = v.step;
        const int64_t q_bytes = all.q_is_bf16 ? 2 : 4;
        position = t;
        if (t < c) {
            uint8_t* draft = v.staged(r, h, t - seen);
            step.k = draft, step.v = draft + v.row_bytes();
            step.k_stride[1] = step.v_stride[1] = step.given_stride[1] = 0;
            step.q = draft + 2 * v.row_bytes() - h * step.group * step.size * q_bytes, step.q_stride[1] = step.size;
            if (all.given) step.given = v.staged_score(draft);
            step.out = outputs, step.lse = log_sums;
            return;
        }
        const int64_t token = v.first_token(r) + t - c, rows = token * all.heads * all.group;
        step.q = static_cast<const uint8_t*>(all.q) + token * all.q_stride[0] * q_bytes;
        step.k = static_cast<const T*>(all.k) + token * all.k_stride[0];
        step.v = static_cast<const T*>(all.v) + token * all.v_stride[0];
        if (all.given) step.given = all.given + token * all.given_stride[0];
        step.q_stride[1] = all.q_stride[1], step.k_stride[1] = all.k_stride[1], step.v_stride[1] = all.v_stride[1];
        step.given_stride[1] = all.given_stride[1];
        step.out = static_cast<uint8_t*>(all.out) + rows * all.size * q_bytes, step.lse = all.lse + rows;
    }
    // Stages the chosen token as draft i.
    void stage(int64_t i) const {
        uint8_t* draft = v.staged(r, h, i);
        const Row<T> row = new_row<T>(step, 0, h);
        __builtin_memcpy(draft, row.key, size_t(v.row_bytes()));
        __builtin_memcpy(draft + v.row_bytes(), row.value, size_t(v.row_bytes()));
        const int64_t head_bytes = step.size * (step.q_is_bf16 ? 2 : 4);
        for (int64_t g = 0; g < step.group && step.scorer.coupled(); g++) {
            const uint8_t* q = static_cast<const uint8_t*>(step.q) + (h * step.group + g) * step.q_stride[1] * (step.q_is_bf16 ? 2 : 4);
            __builtin_memcpy(draft + 2 * v.row_bytes() + g * head_bytes, q, size_t(head_bytes));
        }
        *v.staged_score(draft) = step.given_score(0, h);
        *v.staged_position(draft) = int32_t(position);
    }
};

// Largest number of tokens of a request that attend in one step after a prefix; committed ones do if masses are kept.
inline int64_t most_attending(const VerifyStep& v) {
    if (!v.step.prefix_raw) return 0;
    return 1 + v.most_drafts * (v.step.scorer.coupled() ? 2 : 1);
}
inline int64_t verify_scratch(const VerifyStep& v) {
    const DecodeStep& a = v.step;
    const int64_t log = a.cache_is_bf16 ? UndoLog<bf16>::words(v) : UndoLog<float>::words(v);
    const int64_t rows = a.heads * a.group;
    return scratch_floats(a) + Pieces::round(rows * a.size) + Pieces::round(rows) + log + most_attending(v) * begun_floats(a);
}

// Projects tokens [first, first + count) of a head, at most BATCH, for the mLSTM, before any of them has been processed.
template <class T>
void project_tokens(TokensOfHead<T>& tokens, int64_t first, int64_t count, MLSTMBatch& batch) {
    const DecodeStep& a = tokens.step;
    for (int64_t i = 0; i < count; i++) {
        tokens.at(first + i, nullptr, nullptr);
        const Head<T> head{a, 0, tokens.h};
        const Row<T> row = new_row<T>(a, 0, tokens.h);
        const int64_t from = a.in_prefix(0) ? -1 : leaving_slot(a, 0), u = first + i - head.roles.window;
        Row<T> leaves{};
        if (from >= 0 && u < first) leaves = {head.k(from), head.v(from)};
        if (from >= 0 && u >= first) {
            tokens.at(u, nullptr, nullptr);
            leaves = new_row<T>(a, 0, tokens.h);
        }
        into_batch(head, row, from < 0 ? nullptr : &leaves, batch, i);
    }
    mlstm_project(a, tokens.h, count, batch);
}

// Runs the whole step of request r and head h.
template <class T>
void verify_head_of(const VerifyStep& v, int64_t r, int64_t h, float* scratch) {
    TokensOfHead<T> tokens(v, r, h);
    const DecodeStep& a = tokens.step;
    const bool recurrent = a.scorer.kind == ScorerKind::MLSTM;
    const int64_t c = tokens.c, end = v.end(r), drafts = v.drafts_of(r);
    const bool logs = drafts > 0 && end > tokens.prefix;
    float* attention = scratch + retain_scratch(a);
    Pieces pieces{scratch}, more{scratch + scratch_floats(a)};
    MLSTMBatch batch(a, pieces);
    float *outputs = more.take(a.heads * a.group * a.size), *log_sums = more.take(a.heads * a.group);
    UndoLog<T> log(v, a, h, more);
    const int64_t attending = a.scorer.coupled() ? tokens.begin() : c;  // first token that attends
    float* begun = tokens.prefix > 0 && c >= tokens.prefix ? more.next : nullptr;
    for (int64_t t = attending; begun && t < end; t++) {
        tokens.at(t, outputs, log_sums);
        begin_token(a, h, begun + (t - attending) * begun_floats(a));
    }
    if (begun && attending < end) sum_prefix(a, h, begun, end - attending);
    for (int64_t first = tokens.begin(), count; first < end; first += count) {
        count = end - first < BATCH ? end - first : BATCH;
        if (recurrent) project_tokens(tokens, first, count, batch);
        for (int64_t i = 0; i < count; i++) {
            const int64_t t = first + i;
            tokens.at(t, outputs, log_sums);
            if (logs && t == c + 1) log.begin();
            const int64_t used = retain_of<T>(a, 0, h, batch, i, pieces, log);
            if (t < attending) continue;
            attend(a, 0, h, used, attention, begun ? begun + (t - attending) * begun_floats(a) : nullptr);
        }
    }
    if (c + (drafts > 0 ? drafts : 0) < tokens.prefix) return;  // no page of the tail has been claimed
    if (logs) {
        log.put_back();
        *a.tokens_seen(0, h) = int32_t(c + 1);
    }
    int64_t staged = 0;
    for (; staged < drafts; staged++) {
        tokens.at(c + 1 + staged, nullptr, nullptr);
        tokens.stage(staged);
    }
    if (staged < v.most_drafts) *v.staged_position(v.staged(r, h, staged)) = -1;
}

inline void verify_head(const VerifyStep& v, int64_t r, int64_t h, float* scratch) {
    if (v.step.cache_is_bf16) verify_head_of<bf16>(v, r, h, scratch);
    else verify_head_of<float>(v, r, h, scratch);
}

}  // namespace kvpop::KVPOP_ISA
