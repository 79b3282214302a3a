// Arguments of the verification of drafts (kvpop_vllm/kernels/ops/serving.py, verify_step).

#pragma once

#include <utility>

#include "kvpop/decode_step.h"

namespace kvpop {

// In `step` the first axis of q, k, v, out, lse and gate scores counts the tokens of all requests.
struct VerifyStep {
    DecodeStep step;
    const int64_t* first_tokens;  // [R]
    int64_t first_tokens_stride;
    const int32_t* drafts;  // [R], -1: the request only commits
    int64_t drafts_stride;
    int64_t most_drafts;  // m
    const std::pair<int64_t, int64_t>* places;  // [m], state block and byte at which staged draft i begins
    int64_t query_bytes;                        // bytes of the queries of a staged draft

    int64_t first_token(int64_t r) const { return first_tokens[r * first_tokens_stride]; }
    int64_t drafts_of(int64_t r) const { return drafts[r * drafts_stride]; }
    // Position after the request's last token.
    int64_t end(int64_t r) const { return step.position(r) + drafts_of(r) + 1; }
    // Staged draft i of a head: K, V, queries, score and position (kvpop_vllm/cache/pages.py).
    uint8_t* staged(int64_t r, int64_t h, int64_t i) const { return step.region(r, h, places[i].first) + places[i].second; }
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
