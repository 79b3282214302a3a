// The decode step for AVX2 and FMA.

#if defined(__x86_64__)

#include "kvpop/decode_step.h"  // and with it all standard headers, before the target changes

#pragma GCC target("avx2,fma")

#define KVPOP_ISA avx2
#define KVPOP_VECTOR_BYTES 32
#include "kvpop/simd.h"

#include "kvpop/attend.h"
#include "kvpop/score.h"

#include "kvpop/retain.h"

#endif
