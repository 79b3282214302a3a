// All kernels of the instruction set KVPOP_ISA. Include once, after the target pragma.

#pragma once

#include "kvpop/simd.h"

#include "kvpop/gemm.h"
#if KVPOP_AMX
#include "kvpop/amx.h"
#endif

#include "kvpop/access.h"
#include "kvpop/score.h"

#include "kvpop/moments.h"

#include "kvpop/attend.h"

#include "kvpop/retain.h"

#include "kvpop/verify.h"

#include "kvpop/prefill.h"

namespace kvpop::KVPOP_ISA {

const Kernels kernels{scratch_floats, BATCH,          decode_heads,    retain,         partial_floats, attend_part,
                      merge_parts,    begin_tail,     verify_scratch, verify_head,
                      KVPOP_BF16_DOT, prefill_scratch, prefill_scores, prefill_attend};

}  // namespace kvpop::KVPOP_ISA
