// Selection of the instruction set at run time. Code compiled for a particular instruction set must not
// include this.

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

#if defined(__x86_64__)
// True if the processor has AMX tiles for bfloat16 and the operating system grants them to this process.
inline bool may_use_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & (1u << 22)) || !(d & (1u << 24))) return false;
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2)
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

// Instruction sets that this processor supports, slowest first.
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
#if KVPOP_HAS_AMX
        if (found.back().kernels == &avx512_bf16::kernels && may_use_amx()) found.push_back({"amx_bf16", &amx_bf16::kernels});
#endif
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
