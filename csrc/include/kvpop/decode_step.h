// What the decode step needs, as raw pointers. Axes as in kvpop_vllm/kernels/ops/serving.py: R requests, H KV heads,
// G query heads per KV head, D head size, N slots per block, F features, Dv value width, M hidden width of the MLP.
// Strides are in elements unless a name says bytes.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpop {

struct bf16 {
    uint16_t bits;
};

constexpr float STATE_M_START = -1e30f;  // stabiliser of an empty mLSTM state
constexpr float READOUT_EPS = 1e-6f;
constexpr float NORM_EPS = 1e-6f;

constexpr float GENERATED = 0x1p100f;  // score of a token that leaves the window after the prompt, where votes rank

enum class ScorerKind { None, Linear, MLP, MLSTM, KeyNorm, AttentionMass, MomentResidual, Given, Votes };

// Weights of all heads, contiguous float32; head h's part starts at h times a head's number of elements.
struct Scorer {
    ScorerKind kind = ScorerKind::None;
    const float* weight = nullptr;  // linear [H, 2D]
    const float* bias = nullptr;    // linear [H]
    int64_t hidden = 0;             // M
    const float* fc1_weight = nullptr;  // [H, 2D, M]
    const float* fc1_bias = nullptr;    // [H, M]
    const float* fc2_weight = nullptr;  // [H, M]
    const float* fc2_bias = nullptr;    // [H]
    int64_t columns = 0;                // Fp, columns of q_proj and k_proj
    int64_t features = 0;               // F
    int64_t values = 0;                 // Dv
    const float* q_proj = nullptr;      // [H, 2D, Fp]
    const float* k_proj = nullptr;      // [H, 2D, Fp]
    const float* v_proj = nullptr;      // [H, 2D, Dv], null: the value itself
    const float* igate_weight = nullptr;  // [H, 2D]
    const float* igate_bias = nullptr;    // [H]
    const float* fgate_weight = nullptr;
    const float* fgate_bias = nullptr;
    const float* out_weight = nullptr;   // [H, Dv]
    const float* out_bias = nullptr;     // [H]
    const float* norm_weight = nullptr;  // [H, Dv] or null
    const float* skip_weight = nullptr;  // [H, 2D] or null
    float softcap = 0;                   // 0: none
    bool hedgehog = true;
    bool delayed = true;
    bool mean = false;  // of an attention mass: over all queries, not the newest one's
    bool ages = false;  // a given score is multiplied by the token's age
    bool bounded = false;  // a token of a given score below `threshold` is evicted though slots are free
    double threshold = 0;
    int64_t pool = 1;  // of votes: neighbours

    // Scores depend on what earlier queries saw.
    bool coupled() const {
        return kind == ScorerKind::AttentionMass || kind == ScorerKind::MomentResidual || kind == ScorerKind::Votes;
    }
    int64_t state_floats() const { return kind == ScorerKind::MLSTM ? features * (values + 1) + 1 : 0; }
};

// Roles of the slots, and when tokens are decided upon (kvpop_vllm/roles.py, SlotRoles).
struct Roles {
    int64_t sinks, window, decide_every, phase = 0;

    int64_t ring() const { return window + decide_every - 1; }
    int64_t first_long() const { return sinks + ring(); }
    int64_t ring_slot(int64_t t) const { return t < sinks ? t : sinks + (t - sinks) % ring(); }
    // Tokens that have been scored before `position`, and the end of those that have been decided upon.
    int64_t taken(int64_t position) const { return position - (position + phase) % decide_every; }
    int64_t decided(int64_t position) const {
        const int64_t end = taken(position) - window;
        return end > sinks ? end : sinks;
    }
    bool decides_at(int64_t q) const { return taken(q + 1) == q + 1; }
    // The first position from q on where decisions fall.
    int64_t decision_after(int64_t q) const { return taken(q) + decide_every - 1; }
    // Slots [0, extent) are in use before `position`.
    int64_t extent(int64_t position, int64_t budget) const {
        const int64_t long_range = decided(position) - sinks, end = first_long() + long_range;
        return long_range == 0 ? position : (end < budget ? end : budget);
    }
    // Whether this is a ring slot whose token had been decided upon before `position`.
    bool stale(int64_t slot, int64_t position) const {
        if (slot < sinks || slot >= first_long()) return false;
        const int64_t last = position - 1, back = (last - slot) % ring();
        return last - (back < 0 ? back + ring() : back) < decided(position);
    }
};

// Slots [begin[i], end[i]), i < count.
struct Runs {
    int64_t begin[3], end[3];
    int count;
    void add(int64_t from, int64_t to) {
        if (from < to) begin[count] = from, end[count++] = to;
    }
    // The slots of one of `parts` about equal parts, cut at multiples of `unit`.
    Runs part(int64_t index, int64_t parts, int64_t unit) const {
        const int64_t units = (end[count - 1] + unit - 1) / unit;
        const int64_t from = units * index / parts * unit, to = units * (index + 1) / parts * unit;
        Runs found{{}, {}, 0};
        for (int i = 0; i < count; i++) found.add(begin[i] > from ? begin[i] : from, end[i] < to ? end[i] : to);
        return found;
    }
};

// Those of the slots [0, held) that are not stale before `position`.
inline Runs fresh_runs(const Roles& roles, int64_t position, int64_t held) {
    const int64_t decided = roles.decided(position), stale = roles.ring() - (position - decided);
    Runs runs{{}, {}, 0};
    if (decided == roles.sinks || stale == 0) {
        runs.add(0, held);
        return runs;
    }
    const int64_t first = roles.ring_slot(position), end = first + stale, over = end - roles.first_long();
    if (over <= 0) {
        runs.add(0, first), runs.add(end, held);
    } else {
        runs.add(0, roles.sinks), runs.add(roles.sinks + over, first), runs.add(roles.first_long(), held);
    }
    return runs;
}

struct DecodeStep {
    int64_t requests, heads, group, size;  // R, H, G, D
    bool cache_is_bf16, q_is_bf16;
    const void *q, *k, *v;
    int64_t q_stride[2], k_stride[2], v_stride[2];  // request, head
    void* out;                                      // [R, Hq, D] contiguous
    float* lse;                                     // [R, Hq] contiguous

    uint8_t* raw;  // [num_blocks, H, N * C]
    int64_t block_stride_bytes, head_stride_bytes;
    int64_t region_bytes, block_slots, state_blocks;  // N * C, N

    const int32_t* page_table;
    int64_t table_stride[3];
    const int64_t* positions;
    int64_t positions_stride;
    const int32_t *valid, *budgets;
    int64_t valid_stride[2], budgets_stride[2];
    int64_t mass_row;  // where attention masses are asked for: most slots of a head by the end, in whole blocks

    const float* given;  // scores [R, H], or null
    int64_t given_stride[2];
    const int64_t* prompts;  // [R], or null
    int64_t prompts_stride;

    float scale;
    Roles roles;  // but for the phase of a request: see roles_of
    int64_t decay_step;
    const double* log_gamma;  // [H]
    Scorer scorer;
    bool corrects;  // outputs by the moments of the evicted tokens
    int64_t share_pages;  // more than 0: heads divide the layer's budget, see shared_heads.h

    bool keeps_moments() const { return corrects || scorer.kind == ScorerKind::MomentResidual; }
    // Whether a token's step needs that of the token before it, so that a chunk's are done one by one.
    bool sequential() const { return corrects || scorer.coupled() || scorer.bounded || share_pages > 0; }
    // Whether the data decide how many slots a head has filled.
    bool counts_slots() const { return scorer.bounded || share_pages > 0; }
    int64_t prompt(int64_t r) const { return prompts[r * prompts_stride]; }
    // Roles of a request: where votes rank, decisions fall on the first token after its prompt.
    Roles roles_of(int64_t r) const {
        Roles own = roles;
        if (scorer.kind == ScorerKind::Votes) own.phase = roles.decide_every - 1 - prompt(r) % roles.decide_every;
        return own;
    }
    float given_score(int64_t r, int64_t h) const { return given ? given[r * given_stride[0] + h * given_stride[1]] : 0; }
    // Slots in use before the step.
    int64_t in_use(int64_t r, int64_t h) const {
        if (!counts_slots()) return valid_slots(r, h);
        const int64_t q = position(r);
        return roles_of(r).decided(q) > roles.sinks ? roles.first_long() + int64_t(*filled(r, h)) : q;
    }
    // How many of the tokens that were decided upon before `position` have been evicted.
    int64_t evicted(int64_t r, int64_t h, int64_t position) const {
        const int64_t arrived = roles_of(r).decided(position) - roles.sinks, room = budget(r, h) - roles.first_long();
        if (arrived == 0) return 0;
        return arrived - (counts_slots() ? int64_t(*filled(r, h)) : arrived < room ? arrived : room);
    }

    int64_t item_bytes() const { return cache_is_bf16 ? 2 : 4; }
    uint8_t* region(int64_t r, int64_t h, int64_t entry) const {
        const int64_t block = page_table[r * table_stride[0] + h * table_stride[1] + entry * table_stride[2]];
        return raw + block * block_stride_bytes + h * head_stride_bytes;
    }
    uint8_t* slot_region(int64_t r, int64_t h, int64_t slot) const {
        return region(r, h, state_blocks + slot / block_slots);
    }
    float* scores(uint8_t* region) const {
        return reinterpret_cast<float*>(region + 2 * block_slots * size * item_bytes());
    }
    int32_t* slot_positions(uint8_t* region) const {
        return reinterpret_cast<int32_t*>(scores(region) + block_slots);
    }
    int64_t valid_slots(int64_t r, int64_t h) const { return valid[r * valid_stride[0] + h * valid_stride[1]]; }
    int64_t budget(int64_t r, int64_t h) const { return budgets[r * budgets_stride[0] + h * budgets_stride[1]]; }
    int64_t position(int64_t r) const { return positions[r * positions_stride]; }
    // Whether the step looks for a victim.
    bool searches(int64_t r, int64_t h) const {
        return valid_slots(r, h) == budget(r, h) && roles_of(r).decides_at(position(r));
    }
    // Where the data decide how many long-range slots are filled, that number: the score word of slot 0, or one of the share's.
    float* filled(int64_t r, int64_t h) const { return share_pages ? share_word(r, h, 1) : scores(slot_region(r, h, 0)); }
    // A head's share behind its state and moments: long-range slots, how many are filled, numbers of its pages.
    float* share_word(int64_t r, int64_t h, int64_t i) const {
        const int64_t at = scorer.state_floats() + (keeps_moments() ? size * (size + 2) : 0) + i, region_floats = region_bytes / 4;
        return reinterpret_cast<float*>(region(r, h, at / region_floats)) + at % region_floats;
    }
    // tokens_seen of head h: the position word of slot 0.
    int32_t* tokens_seen(int64_t r, int64_t h) const { return slot_positions(slot_region(r, h, 0)); }
};

// Replaces the votes of all tokens that a decision at q ranks by their means over neighbours; `used` slots are in use.
void pool_votes(const DecodeStep& step, int64_t r, int64_t h, int64_t q, int64_t used);

// Runs the step for all requests and heads in parallel. The arguments have been checked.
void decode_step(const DecodeStep& step);

}  // namespace kvpop
