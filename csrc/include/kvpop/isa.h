// Choice of the instruction set at run time. Not to be included by code compiled for a particular one.

#pragma once

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvpop/kernel_table.h"

namespace kvpop {

struct Isa {
    const char* name;
    const Kernels* kernels;
};

// What this processor runs, slowest first.
inline const std::vector<Isa>& isa_levels() {
    static const std::vector<Isa> levels = [] {
        std::vector<Isa> found{{"baseline", &baseline::kernels}};
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back({"avx2", &avx2::kernels});
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            found.push_back({"avx512", &avx512::kernels});
        if (found.back().kernels == &avx512::kernels && __builtin_cpu_supports("avx512bf16"))
            found.push_back({"avx512_bf16", &avx512_bf16::kernels});
#endif
        return found;
    }();
    return levels;
}

inline std::atomic<const Isa*>& isa_choice() {
    static std::atomic<const Isa*> choice{&isa_levels().back()};
    return choice;
}

inline const Isa& current_isa() { return *isa_choice().load(std::memory_order_relaxed); }

inline void set_isa(const std::string& name) {
    std::string known;
    for (const Isa& level : isa_levels()) {
        if (name == level.name) {
            isa_choice() = &level;
            return;
        }
        known += (known.empty() ? "" : ", ") + std::string(level.name);
    }
    throw std::invalid_argument("instruction set '" + name + "' is unknown or not supported by this processor: use " +
                                "one of " + known);
}

}  // namespace kvpop
