// Working memory of a thread, kept from call to call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvpop/pieces.h"

namespace kvpop {

// The first cache line that begins in or after p; up to 15 floats further on.
inline float* aligned(float* p) { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

// Aligned to cache lines; what it held before is undefined. With AddressSanitizer it is new and NaN, and ends where it ends.
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
