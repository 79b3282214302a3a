// Pieces of working memory.

#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace kvpop {

// Built with AddressSanitizer, pieces lie apart, and nobody may touch what lies between them.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t FORBIDDEN = 16;  // floats behind every piece
inline void forbid(const float* from, int64_t floats) { ASAN_POISON_MEMORY_REGION(from, size_t(floats) * 4); }
inline void allow(const float* from, int64_t floats) { ASAN_UNPOISON_MEMORY_REGION(from, size_t(floats) * 4); }
#else
constexpr int64_t FORBIDDEN = 0;
inline void forbid(const float*, int64_t) {}
inline void allow(const float*, int64_t) {}
#endif

// Hands out pieces of a buffer, each a whole number of cache lines.
struct Pieces {
    float* next;
    static int64_t round(int64_t n) { return (n + 15) / 16 * 16 + FORBIDDEN; }
    float* take(int64_t n) {
        float* p = next;
        next += round(n);
        allow(p, next - FORBIDDEN - p);  // it may have been cut otherwise before
        forbid(next - FORBIDDEN, FORBIDDEN);
        return p;
    }
};

}  // namespace kvpop
