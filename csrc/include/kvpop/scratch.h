// Scratch memory of a thread, kept between calls.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvpop/pieces.h"

namespace kvpop {

// Start of the first cache line at or after p, at most 15 floats further on.
inline float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

// The result is aligned to cache lines; its content is undefined. With AddressSanitizer the memory is new,
// filled with NaN, and has an exact end.
inline float* scratch_of_this_thread(int64_t floats) {
    thread_local std::vector<float> buffer;
    const size_t padded = size_t(floats) + 16;
    if (FORBIDDEN) buffer = std::vector<float>(padded, std::numeric_limits<float>::quiet_NaN());
    else if (buffer.size() < padded) buffer.resize(padded);
    float* start = aligned(buffer.data());
    if (FORBIDDEN) forbid(start + floats, buffer.data() + padded - (start + floats));
    return start;
}

}  // namespace kvpop
