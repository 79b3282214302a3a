// Kernels for AVX2 and FMA.

#if defined(__x86_64__)

#include "kvpop/kernel_table.h"  // includes all standard headers, before the target changes

#pragma GCC target("avx2,fma")

#define KVPOP_ISA avx2
#define KVPOP_VECTOR_BYTES 32
#define KVPOP_BF16_DOT 0
#define KVPOP_AMX 0
#include "kvpop/kernels.h"

#endif
