// The decode step over all requests and heads.

#include "kvpop/decode_step.h"

#include <ATen/Parallel.h>

#include "kvpop/isa.h"
#include "kvpop/scratch.h"

namespace kvpop {

void decode_step(const DecodeStep& step) {
    const Kernels& kernels = *current_isa().kernels;
    const int64_t floats = kernels.scratch_floats(step);
    // Heads outermost, so that a head's scorer weights stay in the cache from one request to the next.
    at::parallel_for(0, step.heads * step.requests, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t i = begin; i < end; i++) kernels.decode_head(step, i % step.requests, i / step.requests, scratch);
    });
}

}  // namespace kvpop
