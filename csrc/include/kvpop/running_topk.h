// Ranks of a static order and running rank of the k-th best token (kvpop_vllm/kernels/ops/training.py,
// running_topk).

#pragma once

#include <cstdint>

namespace kvpop {

// priority, rank, cutoff [rows, tokens], contiguous. No priority may be NaN. Rows take the k of topk [heads] in turn.
void running_topk(const double* priority, int64_t rows, int64_t tokens, int64_t sinks, int64_t window,
                  const int64_t* topk, int64_t heads, int32_t* rank, int32_t* cutoff);

}  // namespace kvpop
