// Kernels for AVX-512 (F, BW, DQ, VL).

#if defined(__x86_64__)

#include "kvpop/kernel_table.h"  // includes all standard headers, before the target changes

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#define KVPOP_ISA avx512
#define KVPOP_VECTOR_BYTES 64
#define KVPOP_BF16_DOT 0
#define KVPOP_AMX 0
#include "kvpop/kernels.h"

#endif
