// Table of the kernels that every instruction set provides.

#pragma once

#include "kvpop/pieces.h"
#include "kvpop/prefill_chunk.h"
#include "kvpop/verify_step.h"

namespace kvpop {

// Kernels of one instruction set. decode_heads runs the whole step of head h of `count` requests from r on,
// at most `batch`, whose scorers share their products. retain runs the step of request r without attention;
// attend_part and merge_parts then run attention (attend.h). begin_tail builds a state from a prefix.
// verify_head runs the whole verification of head h of request r (verify.h). For the others see prefill.h.
struct Kernels {
    int64_t (*scratch_floats)(const DecodeStep&);
    int64_t batch;
    void (*decode_heads)(const DecodeStep&, int64_t r, int64_t count, int64_t h, float* scratch);
    int64_t (*retain)(const DecodeStep&, int64_t r, int64_t h, float* scratch);
    int64_t (*partial_floats)(const DecodeStep&);
    void (*attend_part)(const DecodeStep&, int64_t r, int64_t h, int64_t used, int64_t part, int64_t parts, float* sums,
                        float* scratch);
    void (*merge_parts)(const DecodeStep&, int64_t r, int64_t h, int64_t parts, float* sums);
    void (*begin_tail)(const DecodeStep&, int64_t r, int64_t h, int64_t replay, float* scratch);
    int64_t (*verify_scratch)(const VerifyStep&);
    void (*verify_head)(const VerifyStep&, int64_t r, int64_t h, float* scratch);
    bool bf16_words;  // packed tiles of bfloat16 can be multiplied directly
    int64_t (*prefill_scratch)(const DecodeStep&);
    void (*prefill_scores)(PrefillChunk&, const Piece&, int64_t h, float* scratch);
    void (*prefill_attend)(const PrefillChunk&, const Piece&, int64_t h, int64_t first, int64_t queries, float* scratch);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512_bf16 {
extern const Kernels kernels;
}
#if defined(__x86_64__) && __GNUC__ >= 11
#define KVPOP_HAS_AMX 1  // the compiler supports AMX
namespace amx_bf16 {
extern const Kernels kernels;
}
#endif

}  // namespace kvpop
