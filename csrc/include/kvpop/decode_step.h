// Arguments of the decode step as raw pointers. Axes as in kvpop_vllm/kernels/ops/serving.py: R requests, H
// KV heads, G query heads per KV head, D head size, N slots per block, F features, Dv value width, M hidden
// width of the MLP. Strides are in elements unless a name says bytes.

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

enum class ScorerKind { None, Linear, MLP, MLSTM, KeyNorm, AttentionMass, MomentResidual, Given, Draw };

// Counter-based random draws (kvpop_vllm/kernels/draws.py).
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}
// draw_base: for a head's key and position q. draw_of: for one token.
inline uint64_t draw_base(uint64_t key, int64_t q) { return mix(key + uint64_t(q)); }
inline double draw_of(uint64_t base, int64_t t) { return double(mix(base + uint64_t(t) * GOLDEN) >> 11); }

// Weights of all heads, contiguous float32. The part of head h starts at h times the number of elements per
// head.
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
    bool mean = false;  // of an attention mass: over all queries, not only the newest
    bool ages = false;  // a gate score is multiplied by the token's age
    bool bounded = false;  // a token with a gate score below `threshold` is evicted even if slots are free
    double threshold = 0;

    // True if scores depend on the attention of earlier queries.
    bool coupled() const { return kind == ScorerKind::AttentionMass || kind == ScorerKind::MomentResidual; }
    int64_t state_floats() const { return kind == ScorerKind::MLSTM ? features * (values + 1) + 1 : 0; }
};

// Roles of the slots (kvpop_vllm/roles.py, Retention).
struct Roles {
    int64_t sinks, window, first = 0;

    int64_t first_long() const { return sinks + window; }
    int64_t first_evictable() const { return first + sinks; }
    int64_t ring_slot(int64_t t) const {
        const int64_t at = t - first_evictable();
        return at < 0 ? t - first : sinks + at % window;
    }
    Roles behind(int64_t prefix) const { return prefix ? Roles{0, window, prefix} : *this; }
};

struct DecodeStep {
    int64_t requests, heads, group, size;  // R, H, G, D
    bool cache_is_bf16, q_is_bf16, has_drafts;  // has_drafts: pages have room for drafts
    const void *q, *k, *v;
    int64_t q_stride[2], k_stride[2], v_stride[2];  // request, head
    void* out;                                      // [R, Hq, D] contiguous
    float* lse;                                     // [R, Hq] contiguous

    uint8_t* raw;  // [num_blocks, H, N * C]
    int64_t block_stride_bytes, head_stride_bytes;
    const uint8_t* prefix_raw;  // prefix pages, same layout; null: no request has a prefix
    int64_t prefix_block_stride_bytes, prefix_head_stride_bytes;
    int64_t region_bytes, block_slots, state_blocks;  // N * C, N

    const int32_t* page_table;
    int64_t table_stride[3];
    const int32_t* prefix_table;  // [R, F]
    int64_t prefix_table_stride[2];
    const int64_t* prefix_tokens;  // [R]
    int64_t prefix_tokens_stride;
    const int64_t* prefix_biased;  // [R], leading tokens of each prefix whose logits get a bias; null: none
    int64_t prefix_biased_stride;
    const int64_t* positions;
    int64_t positions_stride;
    const int32_t* budgets;
    int64_t budgets_stride[2];
    const int32_t* windows;  // [R], or null: window of `roles`
    int64_t windows_stride;
    int64_t mass_row;  // if attention masses are used: most slots of a head after the step, in whole blocks

    const float* given;  // gate scores [R, H], or null
    int64_t given_stride[2];
    const int64_t* keys;  // keys of draws [R, H], or null
    int64_t keys_stride[2];

    const float* sink_logits;  // [Hq] contiguous, or null: no attention sinks

    float scale;
    Roles roles;  // of a request without a prefix and with the default window, see roles_of
    int64_t decay_step;
    const double* log_gamma;  // [H]
    Scorer scorer;
    bool corrects;  // outputs are corrected by the moments of the evicted tokens

    bool keeps_moments() const { return corrects || scorer.kind == ScorerKind::MomentResidual; }
    // True if each step depends on the previous one, so that the tokens of a chunk are processed one by
    // one.
    bool sequential() const { return corrects || scorer.coupled() || scorer.bounded; }
    uint64_t draw_key(int64_t r, int64_t h) const { return uint64_t(keys[r * keys_stride[0] + h * keys_stride[1]]); }
    float given_score(int64_t r, int64_t h) const { return given ? given[r * given_stride[0] + h * given_stride[1]] : 0; }
    // prefix: protected tokens of a request. biased: the first of them whose score fields hold a bias.
    // prefix_seen: those that its token sees. in_prefix: its token is protected.
    int64_t prefix(int64_t r) const { return prefix_raw ? prefix_tokens[r * prefix_tokens_stride] : 0; }
    int64_t biased(int64_t r) const { return prefix_biased ? prefix_biased[r * prefix_biased_stride] : 0; }
    int64_t prefix_seen(int64_t r) const { return position(r) < prefix(r) ? position(r) + 1 : prefix(r); }
    bool in_prefix(int64_t r) const { return position(r) < prefix(r); }
    int64_t window(int64_t r) const { return windows ? windows[r * windows_stride] : roles.window; }
    Roles roles_of(int64_t r) const { return Roles{roles.sinks, window(r)}.behind(prefix(r)); }

    // Slots in use before the step.
    int64_t in_use(int64_t r, int64_t h) const {
        const int64_t since = position(r) - prefix(r), first = roles_of(r).first_long();
        if (since <= 0) return 0;
        if (scorer.bounded && since > first) return first + *filled(r, h);
        return since < budget(r, h) ? since : budget(r, h);
    }
    // Tokens that have been evicted once the head has seen `seen` tokens.
    int64_t evicted(int64_t r, int64_t h, int64_t seen) const {
        const int64_t first = roles_of(r).first_long(), left = seen - prefix(r) - first, room = budget(r, h) - first;
        if (left <= 0) return 0;
        return left - (scorer.bounded ? *filled(r, h) : left < room ? left : room);
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
    // Slots of a head; after a prefix without the sinks.
    int64_t budget(int64_t r, int64_t h) const {
        return budgets[r * budgets_stride[0] + h * budgets_stride[1]] - (roles.sinks - roles_of(r).sinks);
    }
    const uint8_t* prefix_region(int64_t r, int64_t h, int64_t token) const {
        const int64_t block = prefix_table[r * prefix_table_stride[0] + token / block_slots * prefix_table_stride[1]];
        return prefix_raw + block * prefix_block_stride_bytes + h * prefix_head_stride_bytes;
    }
    // Bias of a token's logit, the score field of its slot. Those of the tokens after it in the block follow.
    const float* prefix_bias(int64_t r, int64_t h, int64_t token) const {
        const uint8_t* scores = prefix_region(r, h, token) + 2 * block_slots * size * item_bytes();
        return reinterpret_cast<const float*>(scores) + token % block_slots;
    }
    int64_t position(int64_t r) const { return positions[r * positions_stride]; }
    // True if the step searches for a victim.
    bool searches(int64_t r, int64_t h) const { return position(r) - prefix(r) >= budget(r, h); }
    // With a threshold, the number of filled long-range slots: the position field of slot 1.
    int32_t* filled(int64_t r, int64_t h) const { return slot_positions(slot_region(r, h, 1)) + 1; }
    // tokens_seen of head h: the position field of slot 0.
    int32_t* tokens_seen(int64_t r, int64_t h) const { return slot_positions(slot_region(r, h, 0)); }
};

// Runs the step for all requests and heads in parallel. The arguments must have been checked.
void decode_step(const DecodeStep& step);

// Builds the mLSTM states from the last `replay` tokens of each prefix. The arguments must have been
// checked.
void begin_tail(const DecodeStep& step, int64_t replay);

}  // namespace kvpop
