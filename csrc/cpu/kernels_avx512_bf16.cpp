// Kernels for AVX-512 with BF16.

#if defined(__x86_64__)

#include <immintrin.h>

#include "kvpop/kernel_table.h"  // includes all standard headers, before the target changes

#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#define KVPOP_ISA avx512_bf16
#define KVPOP_VECTOR_BYTES 64
#define KVPOP_BF16_DOT 1
#define KVPOP_AMX 0
#include "kvpop/kernels.h"

#endif
