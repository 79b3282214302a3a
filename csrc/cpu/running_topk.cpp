// Tokens are only added, so the k best tokens so far form a heap with the worst one on top. The sort takes
// O(S log S), each query O(log k). The Fenwick tree of the paper would also give cutoffs for other k.

#include "kvpop/running_topk.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>
#include <queue>
#include <vector>

namespace kvpop {
namespace {

void one_row(const double* priority, int64_t tokens, int64_t sinks, int64_t window, int64_t topk, int32_t* rank,
             int32_t* cutoff) {
    std::vector<int32_t> best_first(static_cast<size_t>(tokens));
    std::iota(best_first.begin(), best_first.end(), 0);
    std::sort(best_first.begin(), best_first.end(), [&](int32_t a, int32_t b) {
        return priority[a] != priority[b] ? priority[a] > priority[b] : a > b;
    });
    for (int64_t i = 0; i < tokens; i++) rank[best_first[size_t(i)]] = int32_t(i);

    std::priority_queue<int32_t> kept;
    for (int64_t q = 0; q < tokens; q++) {
        const int64_t leaving = q - window;
        if (leaving >= sinks && topk > 0) {
            kept.push(rank[leaving]);
            if (int64_t(kept.size()) > topk) kept.pop();
        }
        const bool surplus = leaving - sinks + 1 > topk;
        cutoff[q] = topk == 0 ? -1 : surplus ? kept.top() : int32_t(tokens - 1);
    }
}

}  // namespace

void running_topk(const double* priority, int64_t rows, int64_t tokens, int64_t sinks, int64_t window,
                  const int64_t* topk, int64_t heads, int32_t* rank, int32_t* cutoff) {
    at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const int64_t at = r * tokens;
            one_row(priority + at, tokens, sinks, window, topk[r % heads], rank + at, cutoff + at);
        }
    });
}

}  // namespace kvpop
