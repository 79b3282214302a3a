// Eviction times of all heads.

#include "kvpop/online_topk.h"

#include <ATen/Parallel.h>

namespace kvpop {

void online_topk(const float* score, const int64_t* position, int64_t heads, int64_t tokens, int64_t held, int64_t topk,
                 int64_t window, const double* log_gamma, int64_t decay_step, bool ages, const int64_t* keys, int64_t* evicted_at) {
    at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; h++) {
            OnlineTopk simulation(score + h * tokens, position + h * tokens, tokens, log_gamma[h], decay_step, window, ages,
                                  reinterpret_cast<const uint64_t*>(keys ? keys + h : nullptr));
            simulation.run(tokens, held, topk, evicted_at + h * tokens);
        }
    });
}

}  // namespace kvpop
