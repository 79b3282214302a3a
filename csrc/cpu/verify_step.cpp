// Verification of drafts over all requests and heads.

#include "kvpop/verify_step.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "kvpop/isa.h"
#include "kvpop/scratch.h"

namespace kvpop {

namespace {

// True if head h of request r has an ordinary step: no drafts, and none to commit.
bool is_ordinary(const VerifyStep& verified, int64_t r, int64_t h) {
    const DecodeStep& step = verified.step;
    return verified.drafts_of(r) == 0 && (step.position(r) <= step.prefix(r) || *step.tokens_seen(r, h) == step.position(r));
}

// Returns the step with its tokens moved, so that request r has token r.
DecodeStep with_tokens_of(const VerifyStep& verified, int64_t r) {
    DecodeStep step = verified.step;
    const int64_t by = verified.first_token(r) - r, rows = by * step.heads * step.group, q_bytes = step.q_is_bf16 ? 2 : 4;
    step.q = static_cast<const uint8_t*>(step.q) + by * step.q_stride[0] * q_bytes;
    step.k = static_cast<const uint8_t*>(step.k) + by * step.k_stride[0] * step.item_bytes();
    step.v = static_cast<const uint8_t*>(step.v) + by * step.v_stride[0] * step.item_bytes();
    step.out = static_cast<uint8_t*>(step.out) + rows * step.size * q_bytes;
    step.lse += rows;
    if (step.given) step.given += by * step.given_stride[0];
    return step;
}

}  // namespace

void verify_step(const VerifyStep& verified) {
    const Kernels& kernels = *current_isa().kernels;
    const DecodeStep& step = verified.step;
    const int64_t floats = kernels.verify_scratch(verified);
    at::parallel_for(0, step.heads * step.requests, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t i = begin, count; i < end; i += count) {
            const int64_t r = i % step.requests, h = i / step.requests, most = std::min({end - i, step.requests - r, kernels.batch});
            // requests whose tokens follow one another share the products with scorer weights
            for (count = 0; count < most && is_ordinary(verified, r + count, h); count++)
                if (verified.first_token(r + count) != verified.first_token(r) + count) break;
            if (count == 0) {
                kernels.verify_head(verified, r, h, scratch), count = 1;
                continue;
            }
            kernels.decode_heads(with_tokens_of(verified, r), r, count, h, scratch);
            for (int64_t j = r; j < r + count && verified.most_drafts > 0; j++)  // what was staged has been refused
                if (step.position(j) >= step.prefix(j)) *verified.staged_position(verified.staged(j, h, 0)) = -1;
        }
    });
}

}  // namespace kvpop
