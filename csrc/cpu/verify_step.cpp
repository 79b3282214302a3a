// Verification of drafts over all requests and heads.

#include "kvpop/verify_step.h"

#include <ATen/Parallel.h>

#include "kvpop/isa.h"
#include "kvpop/scratch.h"

namespace kvpop {

void verify_step(const VerifyStep& verified) {
    const Kernels& kernels = *current_isa().kernels;
    const DecodeStep& step = verified.step;
    const int64_t floats = kernels.verify_scratch(verified);
    at::parallel_for(0, step.heads * step.requests, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t i = begin; i < end; i++) kernels.verify_head(verified, i % step.requests, i / step.requests, scratch);
    });
}

}  // namespace kvpop
