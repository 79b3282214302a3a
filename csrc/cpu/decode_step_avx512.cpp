// The decode step for AVX-512 (F, BW, DQ, VL).

#if defined(__x86_64__)

#include "kvpop/decode_step.h"  // and with it all standard headers, before the target changes

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

#define KVPOP_ISA avx512
#define KVPOP_VECTOR_BYTES 64
#include "kvpop/simd.h"

#include "kvpop/attend.h"
#include "kvpop/score.h"

#include "kvpop/retain.h"

#endif
