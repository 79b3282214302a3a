// Prefill chunk, piece by piece: scores, evictions, attention, and writing the survivors into the slots.

#include "kvpop/prefill_chunk.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kvpop/isa.h"
#include "kvpop/online_topk.h"
#include "kvpop/scratch.h"

namespace kvpop {

namespace {

float as_float(const uint8_t* item, bool is_bf16) {
    uint32_t bits = 0;
    std::memcpy(is_bf16 ? reinterpret_cast<uint8_t*>(&bits) + 2 : reinterpret_cast<uint8_t*>(&bits), item, is_bf16 ? 2 : 4);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Memory that a PrefillHead points to.
struct Memory {
    std::vector<uint32_t> keys, values;
    std::vector<int32_t> born, gone;
    std::vector<float> leaving, inserted, bias;

    PrefillHead allocate(int64_t tiles, int64_t words, int64_t longest, int64_t leaving_most) {
        keys.assign(size_t(tiles * words), 0);  // unwritten values must not be infinite or NaN
        values.assign(size_t(tiles * words), 0);
        born.resize(size_t(tiles * TILE_KEYS));
        gone.resize(size_t(tiles * TILE_KEYS));
        leaving.resize(size_t(leaving_most));
        inserted.resize(size_t(longest));
        return {tiles, keys.data(), values.data(), nullptr, born.data(), gone.data(), leaving.data(), inserted.data()};
    }
};

// Packs key k and value v, in the cache's type, at `index` of a head's packed tokens.
void pack_token(const PackedTiles& packed, const PrefillHead& work, int64_t index, const uint8_t* k, const uint8_t* v, bool is_bf16) {
    const int64_t column = index % TILE_KEYS, tile = index / TILE_KEYS * packed.words(), item = is_bf16 ? 2 : 4;
    uint32_t *keys = work.keys + tile + column, *values = work.values + tile;
    if (packed.per == 2) {
        for (int64_t w = 0; w < packed.size / 2; w++) std::memcpy(keys + w * TILE_KEYS, k + 4 * w, 4);
        uint16_t* halves = reinterpret_cast<uint16_t*>(values + column / 2 * packed.size) + column % 2;
        for (int64_t e = 0; e < packed.size; e++) std::memcpy(halves + 2 * e, v + 2 * e, 2);
        return;
    }
    for (int64_t e = 0; e < packed.size; e++) {
        const float key_item = as_float(k + e * item, is_bf16), value_item = as_float(v + e * item, is_bf16);
        std::memcpy(keys + e * TILE_KEYS, &key_item, 4);
        std::memcpy(values + column * packed.size + e, &value_item, 4);
    }
}

// State of one head of the chunk between its stages.
class HeadOfChunk {
  public:
    HeadOfChunk(PrefillChunk& chunk, int64_t h)
        : chunk_(chunk), a_(chunk.step), roles_(a_.roles_of(0)), work_(chunk.heads[h]), h_(h), budget_(a_.budget(0, h)),
          topk_(budget_ - roles_.first_long()) {}

    // Allocates memory and packs the retained tokens.
    void load(Memory& memory) {
        const int64_t longest = std::min(PIECE, chunk_.length);
        const int64_t tiles = chunk_.slot_tiles(h_) + (longest + TILE_KEYS - 1) / TILE_KEYS;
        work_ = memory.allocate(tiles, chunk_.packed.words(), longest, longest);
        for (int64_t slot = 0; slot < in_use(chunk_.start); slot++) pack(slot, key(slot), value(slot));
    }

    // Packs the piece's tokens and computes the birth and eviction time of every key.
    void plan(const Piece& piece) {
        const int64_t held = in_use(piece.a), first_new = chunk_.first_new(h_);
        std::fill_n(work_.born, work_.tiles * TILE_KEYS, 0);
        std::fill_n(work_.gone, work_.tiles * TILE_KEYS, 0);
        for (int64_t slot = 0; slot < held; slot++) work_.gone[slot] = NEVER_GONE;
        for (int64_t i = 0; i < piece.tokens(); i++) {
            pack(first_new + i, new_key(piece.a + i), new_value(piece.a + i));
            work_.born[first_new + i] = int32_t(i);
            work_.gone[first_new + i] = NEVER_GONE;
        }
        evict(piece, std::max(int64_t(0), held - roles_.first_long()));
    }

    // Writes survivors that left the window to free long-range slots, and the newest tokens to sinks and
    // ring.
    void commit(const Piece& piece) {
        const int64_t u0 = left(piece.a), u1 = left(piece.b);
        int64_t slot = roles_.first_long();
        for (int64_t u = u0; u < u1; u++) {
            if (work_.gone[place(u, piece)] != NEVER_GONE) continue;
            while (slot < in_use(piece.a) && work_.gone[slot] == NEVER_GONE) slot++;
            const bool held = u < piece.a;
            const int64_t from = roles_.ring_slot(u);
            write(slot++, held ? key(from) : new_key(u), held ? value(from) : new_value(u), work_.leaving[u - u0], u);
        }
        for (int64_t t = piece.a; t < std::min(piece.b, roles_.first_evictable()); t++)
            write(roles_.ring_slot(t), new_key(t), new_value(t), work_.inserted[t - piece.a], t);
        for (int64_t t = std::max({piece.a, piece.b - roles_.window, roles_.first_evictable()}); t < piece.b; t++)
            write(roles_.ring_slot(t), new_key(t), new_value(t), work_.inserted[t - piece.a], t);
        *a_.tokens_seen(0, h_) = int32_t(piece.b);
    }

  private:
    // Slots in use before the token at `position`.
    int64_t in_use(int64_t position) const { return std::min(position - roles_.first, budget_); }
    // Tokens [p + s, left(position)) have left the window before `position`.
    int64_t left(int64_t position) const { return std::max(roles_.first_evictable(), position - roles_.window); }
    int64_t row_bytes() const { return a_.size * a_.item_bytes(); }
    uint8_t* key(int64_t slot) const { return a_.slot_region(0, h_, slot) + slot % a_.block_slots * row_bytes(); }
    uint8_t* value(int64_t slot) const { return key(slot) + a_.block_slots * row_bytes(); }
    const uint8_t* token(const void* base, const int64_t* stride, int64_t t) const {
        return static_cast<const uint8_t*>(base) + ((t - chunk_.start) * stride[0] + h_ * stride[1]) * a_.item_bytes();
    }
    const uint8_t* new_key(int64_t t) const { return token(a_.k, a_.k_stride, t); }
    const uint8_t* new_value(int64_t t) const { return token(a_.v, a_.v_stride, t); }

    // Index of window and piece tokens among the packed keys.
    int64_t place(int64_t t, const Piece& piece) const {
        return t < piece.a ? roles_.ring_slot(t) : chunk_.first_new(h_) + t - piece.a;
    }

    void evict(const Piece& piece, int64_t held) {
        const int64_t first = roles_.first_long(), u0 = left(piece.a);
        const int64_t arrivals = left(piece.b) - u0, total = held + arrivals;
        if (total <= topk_) return;
        std::vector<float> score(static_cast<size_t>(total));
        std::vector<int64_t> position(static_cast<size_t>(total)), evicted_at(static_cast<size_t>(total));
        for (int64_t i = 0; i < held; i++) {
            uint8_t* region = a_.slot_region(0, h_, first + i);
            score[size_t(i)] = a_.scores(region)[(first + i) % a_.block_slots];
            position[size_t(i)] = a_.slot_positions(region)[(first + i) % a_.block_slots];
        }
        for (int64_t i = 0; i < arrivals; i++) {
            score[size_t(held + i)] = work_.leaving[i];
            position[size_t(held + i)] = u0 + i;
        }
        const uint64_t key = a_.keys ? a_.draw_key(0, h_) : 0;
        OnlineTopk simulation(score.data(), position.data(), total, a_.log_gamma[h_], a_.decay_step, roles_.window, a_.scorer.ages,
                              a_.keys ? &key : nullptr);
        simulation.run(total, held, topk_, evicted_at.data());
        for (int64_t i = 0; i < total; i++) {
            if (evicted_at[size_t(i)] == std::numeric_limits<int64_t>::max()) continue;
            const int64_t at = i < held ? first + i : place(u0 + i - held, piece);
            work_.gone[at] = int32_t(evicted_at[size_t(i)] - piece.a);
        }
    }

    void write(int64_t slot, const uint8_t* k, const uint8_t* v, float score, int64_t position) {
        uint8_t* region = a_.slot_region(0, h_, slot);
        std::memcpy(key(slot), k, size_t(row_bytes()));
        std::memcpy(value(slot), v, size_t(row_bytes()));
        a_.scores(region)[slot % a_.block_slots] = score;
        a_.slot_positions(region)[slot % a_.block_slots] = int32_t(position);
        pack(slot, k, v);
    }

    void pack(int64_t index, const uint8_t* k, const uint8_t* v) {
        pack_token(chunk_.packed, work_, index, k, v, a_.cache_is_bf16);
    }

    PrefillChunk& chunk_;
    const DecodeStep& a_;
    const Roles roles_;
    PrefillHead& work_;
    int64_t h_, budget_, topk_;
};

// Returns `step` for token i alone: the first axis of q, k, v, out, lse and gate scores counts tokens.
DecodeStep only_token(const DecodeStep& whole, int64_t i) {
    DecodeStep step = whole;
    const int64_t q_bytes = whole.q_is_bf16 ? 2 : 4, query_heads = i * whole.heads * whole.group;
    const auto token = [](const void* base, int64_t items, int64_t bytes) {
        return static_cast<const uint8_t*>(base) + items * bytes;
    };
    step.q = token(whole.q, i * whole.q_stride[0], q_bytes);
    step.k = token(whole.k, i * whole.k_stride[0], whole.item_bytes());
    step.v = token(whole.v, i * whole.v_stride[0], whole.item_bytes());
    step.out = static_cast<uint8_t*>(whole.out) + query_heads * whole.size * q_bytes;
    step.lse = whole.lse + query_heads;
    if (whole.given) step.given = whole.given + i * whole.given_stride[0];
    return step;
}

// Runs one decode step per token, head by head.
void token_by_token(const PrefillChunk& chunk, const Kernels& kernels) {
    const DecodeStep& whole = chunk.step;
    const int64_t floats = kernels.scratch_floats(whole);
    at::parallel_for(0, whole.heads, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t h = begin; h < end; h++)
            for (int64_t i = 0; i < chunk.length; i++) {
                DecodeStep step = only_token(whole, i);
                const int64_t position = chunk.start + i;
                step.positions = &position, step.positions_stride = 0;
                kernels.decode_heads(step, 0, 1, h, scratch);
            }
    });
}

// Runs attention of the piece's queries over the packed keys.
void attend_piece(const PrefillChunk& chunk, const Kernels& kernels, const Piece& piece, int64_t floats) {
    const int64_t tiles = (piece.tokens() + TILE_QUERIES - 1) / TILE_QUERIES;
    at::parallel_for(0, chunk.step.heads * tiles, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t i = begin; i < end; i++) {
            const int64_t first = i % tiles * TILE_QUERIES;
            kernels.prefill_attend(chunk, piece, i / tiles, first, std::min(TILE_QUERIES, piece.tokens() - first), scratch);
        }
    });
}

// Returns the packing that the kernels multiply.
PackedTiles packed_for(const DecodeStep& step, const Kernels& kernels) {
    return {step.size, kernels.bf16_words && step.cache_is_bf16 && step.q_is_bf16 ? 2 : 1};
}

}  // namespace

void prefix_attention(PrefillChunk& chunk, int64_t first, int64_t last, bool causal) {
    const Kernels& kernels = *current_isa().kernels;
    const DecodeStep& step = chunk.step;
    const int64_t keys = last - first, row = step.size * step.item_bytes();
    chunk.packed = packed_for(step, kernels);
    std::vector<PrefillHead> heads(static_cast<size_t>(step.heads));
    std::vector<Memory> memory(heads.size());
    chunk.heads = heads.data();
    at::parallel_for(0, step.heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; h++) {
            PrefillHead& work = heads[size_t(h)];
            work = memory[size_t(h)].allocate((keys + TILE_KEYS - 1) / TILE_KEYS, chunk.packed.words(), 0, 0);
            for (int64_t i = 0; i < work.tiles * TILE_KEYS; i++) {
                work.born[i] = causal ? int32_t(i) : 0, work.gone[i] = i < keys ? NEVER_GONE : 0;
                if (i >= keys) continue;
                const uint8_t* k = step.prefix_region(0, h, first + i) + (first + i) % step.block_slots * row;
                pack_token(chunk.packed, work, i, k, k + step.block_slots * row, step.cache_is_bf16);
            }
            if (step.biased(0) <= first) continue;
            std::vector<float>& bias = memory[size_t(h)].bias;
            bias.assign(size_t(work.tiles * TILE_KEYS), 0);
            for (int64_t i = 0; i < std::min(keys, step.biased(0) - first); i++) bias[size_t(i)] = *step.prefix_bias(0, h, first + i);
            work.bias = bias.data();
        }
    });
    attend_piece(chunk, kernels, {0, chunk.length}, kernels.prefill_scratch(step));
}

void prefill_chunk(PrefillChunk& chunk) {
    const Kernels& kernels = *current_isa().kernels;
    const DecodeStep& step = chunk.step;
    if (step.sequential()) return token_by_token(chunk, kernels);
    const int64_t floats = kernels.prefill_scratch(step);
    chunk.packed = packed_for(step, kernels);
    std::vector<PrefillHead> heads(static_cast<size_t>(step.heads));
    std::vector<Memory> memory(heads.size());
    chunk.heads = heads.data();
    at::parallel_for(0, step.heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; h++) HeadOfChunk(chunk, h).load(memory[size_t(h)]);
    });
    for (int64_t a = chunk.start; a < chunk.start + chunk.length; a += PIECE) {
        const Piece piece{a, std::min(a + PIECE, chunk.start + chunk.length)};
        at::parallel_for(0, step.heads, 1, [&](int64_t begin, int64_t end) {
            float* scratch = scratch_of_this_thread(floats);
            for (int64_t h = begin; h < end; h++) {
                kernels.prefill_scores(chunk, piece, h, scratch);
                HeadOfChunk(chunk, h).plan(piece);
            }
        });
        attend_piece(chunk, kernels, piece, floats);
        at::parallel_for(0, step.heads, 1, [&](int64_t begin, int64_t end) {
            for (int64_t h = begin; h < end; h++) HeadOfChunk(chunk, h).commit(piece);
        });
    }
}

}  // namespace kvpop
