// Kernels for AVX-512 with BF16 and AMX.

#include "kvpop/kernel_table.h"  // includes all standard headers, before the target changes

#if KVPOP_HAS_AMX

#include <immintrin.h>

#pragma GCC target("amx-bf16,amx-tile,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#define KVPOP_ISA amx_bf16
#define KVPOP_VECTOR_BYTES 64
#define KVPOP_BF16_DOT 1
#define KVPOP_AMX 1
#include "kvpop/kernels.h"

#endif
