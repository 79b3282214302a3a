// Arguments of the verification of drafts (kvpop_vllm/kernels/ops/serving.py, verify_step).

#pragma once

#include "kvpop/decode_step.h"

namespace kvpop {

// In `step` the first axis of q, k, v, out, lse and gate scores counts the tokens of all requests.
struct VerifyStep {
    DecodeStep step;
    const int64_t* first_tokens;  // [R]
    int64_t first_tokens_stride;
    const int32_t* drafts;  // [R], -1: the request only commits
    int64_t drafts_stride;
    int64_t most_drafts;                              // m
    int64_t staged_begin, staged_bytes, query_bytes;  // kvpop_vllm/cache/pages.py: place and sizes of staged drafts

    int64_t first_token(int64_t r) const { return first_tokens[r * first_tokens_stride]; }
    int64_t drafts_of(int64_t r) const { return drafts[r * drafts_stride]; }
    // Position after the request's last token.
    int64_t end(int64_t r) const { return step.position(r) + drafts_of(r) + 1; }
    // State block and byte at which staged draft i begins.
    int64_t place(int64_t i, int64_t& byte) const {
        const int64_t region = step.region_bytes, block = staged_begin / region, begin = staged_begin % region;
        const int64_t fit = (region - begin) / staged_bytes, per_block = region / staged_bytes;
        byte = i < fit ? begin + i * staged_bytes : (i - fit) % per_block * staged_bytes;
        return i < fit ? block : block + 1 + (i - fit) / per_block;
    }
    // Staged draft i of a head: K, V, queries, score and position.
    uint8_t* staged(int64_t r, int64_t h, int64_t i) const {
        int64_t byte;
        uint8_t* region = step.region(r, h, place(i, byte));
        return region + byte;
    }
    int64_t row_bytes() const { return step.size * step.item_bytes(); }
    float* staged_score(uint8_t* draft) const { return reinterpret_cast<float*>(draft + 2 * row_bytes() + query_bytes); }
    int32_t* staged_position(uint8_t* draft) const { return reinterpret_cast<int32_t*>(staged_score(draft) + 1); }
    // Number of staged drafts of a head that has seen `seen` tokens.
    int64_t staged_count(int64_t r, int64_t h, int64_t seen) const {
        int64_t i = 0;
        while (i < most_drafts && *staged_position(staged(r, h, i)) == seen + i) i++;
        return i;
    }
};

// Runs the step for all requests and heads in parallel. The arguments must have been checked.
void verify_step(const VerifyStep& verified);

}  // namespace kvpop
