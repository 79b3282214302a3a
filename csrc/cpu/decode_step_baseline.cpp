// The decode step for any processor.

#include "kvpop/decode_step.h"  // and with it all standard headers, before the target changes

#define KVPOP_ISA baseline
#define KVPOP_VECTOR_BYTES 16
#include "kvpop/simd.h"

#include "kvpop/attend.h"
#include "kvpop/score.h"

#include "kvpop/retain.h"
