// Pieces of scratch memory.

#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace kvpop {

// With AddressSanitizer there are gaps between the pieces, and access to the gaps is an error.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t FORBIDDEN = 16;  // floats after every piece
inline void forbid(const float* from, int64_t floats) { ASAN_POISON_MEMORY_REGION(from, size_t(floats) * 4); }
inline void allow(const float* from, int64_t floats) { ASAN_UNPOISON_MEMORY_REGION(from, size_t(floats) * 4); }
#else
constexpr int64_t FORBIDDEN = 0;
inline void forbid(const float*, int64_t) {}
inline void allow(const float*, int64_t) {}
#endif

// Splits a buffer into pieces, each a whole number of cache lines.
struct Pieces {
    float* next;
    static int64_t round(int64_t n) { return (n + 15) / 16 * 16 + FORBIDDEN; }
    float* take(int64_t n) {
        float* p = next;
        next += round(n);
        allow(p, next - FORBIDDEN - p);  // an earlier user may have split the buffer differently
        forbid(next - FORBIDDEN, FORBIDDEN);
        return p;
    }
};

}  // namespace kvpop
