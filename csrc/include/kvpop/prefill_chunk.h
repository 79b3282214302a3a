// Arguments of the prefill of one request's chunk (kvpop_vllm/kernels/ops/serving.py, prefill_chunk). The
// chunk is processed in pieces. Within a piece every retained slot and every new token is a key that is
// visible from its birth to its eviction. Keys and values are stored in tiles packed for matrix products,
// first the B slots in slot order, then the piece.

#pragma once

#include "kvpop/decode_step.h"

namespace kvpop {

constexpr int64_t PIECE = 128;       // tokens of a piece
constexpr int64_t TILE_KEYS = 64;    // keys of a packed tile
constexpr int64_t TILE_QUERIES = 16;  // query tokens processed together, for all query heads of a group
constexpr int32_t NEVER_GONE = INT32_MAX;

// A tile's keys are [words, TILE_KEYS] and its values [TILE_KEYS / per, D] 32-bit words. A word is one
// float (per = 1) or two bfloat16 (per = 2): adjacent channels of a key, or the same channel of adjacent
// values.
struct PackedTiles {
    int64_t size, per;
    int64_t words() const { return TILE_KEYS * size / per; }  // of a tile's keys, and of its values
};

// Scratch memory of one head.
struct PrefillHead {
    int64_t tiles;
    uint32_t *keys, *values;  // packed tiles
    const float* bias;        // per key, added to its logits; null: none
    int32_t *born, *gone;     // per key, relative to the piece's first token: visible while born <= i < gone
    float* leaving;           // raw scores of the tokens leaving the window in the piece, in order
    float* inserted;          // raw scores of the piece's tokens, for scorers that score at insertion
};

// Chunk [start, start + length) of one request. In `step` the request axis of q, k, v, out and lse counts
// the chunk's tokens. The page table, the budgets and the slots are those of request 0, whose prefix is not
// attended to here.
struct PrefillChunk {
    DecodeStep step;
    int64_t start, length;
    PackedTiles packed;
    PrefillHead* heads;

    int64_t slot_tiles(int64_t h) const {  // tiles of the slots that are in use at the end
        const int64_t end = start + length - step.prefix(0), budget = step.budget(0, h);
        return ((end < budget ? end : budget) + TILE_KEYS - 1) / TILE_KEYS;
    }
    int64_t first_new(int64_t h) const { return slot_tiles(h) * TILE_KEYS; }  // index of the first new key
};

// Tokens [a, b) of the sequence.
struct Piece {
    int64_t a, b;
    int64_t tokens() const { return b - a; }
};

// Runs the chunk. The arguments must have been checked.
void prefill_chunk(PrefillChunk& chunk);

// Runs attention of the chunk's queries over tokens [first, last) of its prefix. If causal, query i sees
// tokens up to first + i. Attention sinks count once, so only one of several calls for the same queries has them. The
// arguments must have been checked; start is 0.
void prefix_attention(PrefillChunk& chunk, int64_t first, int64_t last, bool causal);

}  // namespace kvpop
