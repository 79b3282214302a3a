// Working memory of a thread, kept from call to call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpop {

// Aligned to cache lines; what it held before is undefined.
inline float* scratch_of_this_thread(int64_t floats) {
    thread_local std::vector<float> buffer;
    const size_t padded = size_t(floats) + 16;
    if (buffer.size() < padded) buffer.resize(padded);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);
}

}  // namespace kvpop
