// Commits, token and drafts of one request and head, by ordinary steps. What drafts overwrite is logged and put back. Each
// tile of the slots is then read once for the token and all drafts, unless the rule reads attention within a step.

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

    // Begins to log draft i, from 1 on.
    void begin(int64_t i) {
        draft_ = i;
        if (i > 1) return;
        used_ = a_.in_use(0, h_);
        copy_state([](float* pages, float* copy, int64_t bytes) { __builtin_memcpy(copy, pages, size_t(bytes)); });
        if (a_.scorer.coupled())
            copy_masses([](float* pages, float* copy, int64_t bytes) { __builtin_memcpy(copy, pages, size_t(bytes)); });
        if (a_.scorer.bounded) filled_ = *a_.filled(0, h_);
    }
    // Logs the row of a slot, before it is overwritten.
    void save(const Head<T>& head, int64_t slot) {
        if (draft_ == 0) return;
        float* row = rows_ + count_++ * row_floats(a_);
        const int32_t numbers[2] = {int32_t(slot), int32_t(draft_)};
        __builtin_memcpy(row, head.k(slot), row_bytes());
        __builtin_memcpy(reinterpret_cast<uint8_t*>(row) + row_bytes(), head.v(slot), row_bytes());
        __builtin_memcpy(row + row_floats(a_) - 4, head.score(slot), 4);
        __builtin_memcpy(row + row_floats(a_) - 3, position(slot), 4);
        __builtin_memcpy(row + row_floats(a_) - 2, numbers, sizeof numbers);
    }
    // Puts everything back. The log then holds what drafts have written to slots.
    void put_back() {
        change_back(0, INT64_MAX);
        copy_state([](float* pages, float* copy, int64_t bytes) { __builtin_memcpy(pages, copy, size_t(bytes)); });
        if (a_.scorer.coupled())
            copy_masses([](float* pages, float* copy, int64_t bytes) { __builtin_memcpy(pages, copy, size_t(bytes)); });
        if (a_.scorer.bounded) *a_.filled(0, h_) = filled_;
    }
    // True if draft i writes to one of the slots [from, to).
    bool changes(int64_t i, int64_t from, int64_t to) const {
        bool any = false;
        for (int64_t row = 0; row < count_; row++) any |= writes(row, i, from, to);
        return any;
    }
    // Exchanges the rows of slots [from, to) that draft i writes with the log.
    void change(int64_t i, int64_t from, int64_t to) const {
        for (int64_t row = 0; row < count_; row++)
            if (writes(row, i, from, to)) exchange(row);
    }
    // Exchanges those of all drafts back.
    void change_back(int64_t from, int64_t to) const {
        for (int64_t row = count_; row-- > 0;)
            if (slot_of(row) >= from && slot_of(row) < to) exchange(row);
    }

  private:
    static int64_t state_floats(const DecodeStep& a) {
        return a.scorer.state_floats() + (a.keeps_moments() ? Moments::floats(a.size) : 0);
    }
    static int64_t row_floats(const DecodeStep& a) { return 2 * a.size * int64_t(sizeof(T)) / 4 + 4; }  // K, V, score, position, slot, draft
    size_t row_bytes() const { return size_t(a_.size) * sizeof(T); }
    int32_t number(int64_t row, int64_t from_end) const {
        int32_t value;
        __builtin_memcpy(&value, rows_ + (row + 1) * row_floats(a_) - from_end, 4);
        return value;
    }
    int64_t slot_of(int64_t row) const { return number(row, 2); }
    bool writes(int64_t row, int64_t i, int64_t from, int64_t to) const {
        return number(row, 1) == i && slot_of(row) >= from && slot_of(row) < to;
    }
    // Exchanges a row of the log with that of its slot.
    void exchange(int64_t row) const {
        const Head<T> head{a_, 0, h_};
        const int64_t slot = slot_of(row);
        uint8_t* log = reinterpret_cast<uint8_t*>(rows_ + row * row_floats(a_));
        exchange_bytes(head.k(slot), log, row_bytes());
        exchange_bytes(head.v(slot), log + row_bytes(), row_bytes());
        exchange_bytes(head.score(slot), log + 2 * row_bytes(), 4);
        exchange_bytes(position(slot), log + 2 * row_bytes() + 4, 4);
    }
    // bytes: a multiple of 4.
    static void exchange_bytes(void* one, uint8_t* two, size_t bytes) {
        uint8_t* first = static_cast<uint8_t*>(one);
        for (size_t at = 0; at < bytes; at += 4) {
            uint32_t a, b;
            __builtin_memcpy(&a, first + at, 4), __builtin_memcpy(&b, two + at, 4);
            __builtin_memcpy(first + at, &b, 4), __builtin_memcpy(two + at, &a, 4);
        }
    }
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
    int32_t filled_ = 0;
    int64_t draft_ = 0, used_ = 0, count_ = 0;  // draft_ is 0 before the first
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
            // a step that only commits drafts has no scores of its own, and no pointer to them
            if (all.scorer.kind == ScorerKind::Given) step.given = v.staged_score(draft);
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

// Tokens that attend in one step: slots that each sees, and what it writes to them before (sum_slots in attend.h).
template <class T>
struct TokensOfTail {
    const UndoLog<T>& log;
    int64_t count;
    int64_t* ends;

    int64_t end(int64_t i) const { return ends[i]; }
    bool changes(int64_t i, int64_t from, int64_t to) const { return log.changes(i, from, to); }
    void change(int64_t i, int64_t from, int64_t to) const { log.change(i, from, to); }
    void change_back(int64_t from, int64_t to) const { log.change_back(from, to); }
};

// Largest number of tokens of a request that attend in one step; committed ones do if masses are kept.
inline int64_t most_attending(const VerifyStep& v) { return 1 + v.most_drafts * (v.step.scorer.coupled() ? 2 : 1); }
inline int64_t verify_scratch(const VerifyStep& v) {
    const DecodeStep& a = v.step;
    const int64_t log = a.cache_is_bf16 ? UndoLog<bf16>::words(v) : UndoLog<float>::words(v);
    const int64_t rows = a.heads * a.group, most = most_attending(v);
    return scratch_floats(a) + Pieces::round(rows * a.size) + Pieces::round(rows) + log + Pieces::round(2 * most) +
           begun_floats(a, most * a.group);
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
    const bool attends_within = a.scorer.coupled() || a.corrects;  // attention reads or writes what a step leaves
    const int64_t c = tokens.c, end = v.end(r), drafts = v.drafts_of(r);
    const bool logs = drafts > 0 && end > tokens.prefix;
    float* attention = scratch + retain_scratch(a);
    Pieces pieces{scratch}, more{scratch + scratch_floats(a)};
    MLSTMBatch batch(a, pieces);
    float *outputs = more.take(a.heads * a.group * a.size), *log_sums = more.take(a.heads * a.group);
    UndoLog<T> log(v, a, h, more);
    const int64_t attending = a.scorer.coupled() ? tokens.begin() : c;  // first token that attends
    const TokensOfTail<T> seen{log, end - attending, reinterpret_cast<int64_t*>(more.take(2 * most_attending(v)))};
    with_attention(a, [&](auto way) {
        using A = decltype(way);
        const Begun begun = Begun::at(a, seen.count * a.group, more.next);
        for (int64_t i = 0; i < seen.count; i++) {
            tokens.at(attending + i, outputs, log_sums);
            begin_sums<A>(a, 0, h, begun.from(a, i * a.group));
            seen.ends[i] = a.prefix_seen(0);
        }
        if (attends_within && tokens.prefix > 0 && seen.count > 0) sum_slots<A>(a, 0, h, 0, seen, false, begun, nullptr);
        for (int64_t first = tokens.begin(), count; first < end; first += count) {
            count = end - first < BATCH ? end - first : BATCH;
            if (recurrent) project_tokens(tokens, first, count, batch);
            for (int64_t i = 0; i < count; i++) {
                const int64_t t = first + i;
                tokens.at(t, outputs, log_sums);
                if (logs && t > c) log.begin(t - c);
                const int64_t used = retain_of<T>(a, 0, h, batch, i, pieces, log);
                if (t < attending) continue;
                const Begun own = begun.from(a, (t - attending) * a.group);
                if (attends_within) attend(a, 0, h, used, attention, &own);
                else seen.ends[t - attending] += used;
            }
        }
        if (logs) log.put_back();
        if (attends_within || seen.count == 0) return;
        sum_slots<A>(a, 0, h, 0, seen, true, begun, nullptr);
        for (int64_t i = 0; i < seen.count; i++) {
            tokens.at(attending + i, nullptr, nullptr);
            finish_attention<A>(a, 0, h, 0, begun.from(a, i * a.group).sums, nullptr, attention);
        }
    });
    if (c + (drafts > 0 ? drafts : 0) < tokens.prefix) return;  // no page of the tail has been claimed
    if (logs) *a.tokens_seen(0, h) = int32_t(c + 1);
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
