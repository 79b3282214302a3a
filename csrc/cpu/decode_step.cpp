// Decode step over all requests and heads.

#include "kvpop/decode_step.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kvpop/isa.h"
#include "kvpop/scratch.h"

namespace kvpop {

namespace {

constexpr int64_t LEAST_PART = 256;  // slots; smaller parts are not worth a thread

constexpr int64_t MOST_PARTS = 4;    // limit for two or more heads per thread, because parts must be merged

// Returns the number of parts into which each head's slots are split so that all threads have work. Heads
// that are split cannot share the products of several requests. The longest share of a thread must
// therefore become a tenth shorter. From 8 heads per thread on this is hardly possible.
int64_t parts_of_a_head(const DecodeStep& step) {
    const int64_t heads = step.requests * step.heads, threads = at::get_num_threads();
    if (heads == 0 || heads >= 8 * threads || threads == 1 || step.sequential()) return 1;
    int64_t longest = 0;
    for (int64_t r = 0; r < step.requests; r++)
        for (int64_t h = 0; h < step.heads; h++) longest = std::max(longest, step.prefix_seen(r) + step.in_use(r, h));
    // Threads get equal shares of the parts, rounded up. Choose the number of parts with the smallest
    // largest share of the work.
    const int64_t whole = (heads + threads - 1) / threads;
    int64_t best = 1, best_share = whole;
    const int64_t most = heads < 2 * threads ? 2 * threads : MOST_PARTS;
    for (int64_t parts = 2; parts <= std::min(longest / LEAST_PART, most); parts++)
        if (const int64_t share = (heads * parts + threads - 1) / threads; share * best < best_share * parts)
            best = parts, best_share = share;
    return 10 * best_share <= 9 * whole * best ? best : 1;
}

void in_parts(const DecodeStep& step, const Kernels& kernels, int64_t parts) {
    const int64_t heads = step.requests * step.heads, floats = kernels.scratch_floats(step);
    const int64_t sums = kernels.partial_floats(step);
    std::vector<int64_t> used(static_cast<size_t>(heads));
    const std::unique_ptr<float[]> memory(new float[static_cast<size_t>(heads * parts * sums + 16)]);
    float* partial = aligned(memory.get());
    at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t i = begin; i < end; i++)
            used[size_t(i)] = kernels.retain(step, i % step.requests, i / step.requests, scratch);
    });
    at::parallel_for(0, heads * parts, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t j = begin; j < end; j++) {
            const int64_t i = j / parts;
            kernels.attend_part(step, i % step.requests, i / step.requests, used[size_t(i)], j % parts, parts,
                                partial + j * sums, scratch);
        }
    });
    at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
            kernels.merge_parts(step, i % step.requests, i / step.requests, parts, partial + i * parts * sums);
    });
}

}  // namespace

void begin_tail(const DecodeStep& step, int64_t replay) {
    const Kernels& kernels = *current_isa().kernels;
    const int64_t floats = kernels.scratch_floats(step);
    at::parallel_for(0, step.heads * step.requests, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t i = begin; i < end; i++) kernels.begin_tail(step, i % step.requests, i / step.requests, replay, scratch);
    });
}

void decode_step(const DecodeStep& step) {
    const Kernels& kernels = *current_isa().kernels;
    if (const int64_t parts = parts_of_a_head(step); parts > 1) return in_parts(step, kernels, parts);
    const int64_t floats = kernels.scratch_floats(step);
    // Heads are the outer loop, so that a head's scorer weights stay in the cache from one request to the
    // next.
    at::parallel_for(0, step.heads * step.requests, 1, [&](int64_t begin, int64_t end) {
        float* scratch = scratch_of_this_thread(floats);
        for (int64_t i = begin, count; i < end; i += count) {
            const int64_t r = i % step.requests;
            count = std::min({end - i, step.requests - r, kernels.batch});
            kernels.decode_heads(step, r, count, i / step.requests, scratch);
        }
    });
}

}  // namespace kvpop
