"""C++ implementation of ``prefill_chunk``."""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.chunks import one_by_one
from kvpop_vllm.kernels.cpp.decode_step import check_dtype, packed, tensors_of
from kvpop_vllm.kernels.dispatch import load_extension
from kvpop_vllm.kernels.ops import StepOrderError
from kvpop_vllm.kernels.prefix_attention import with_prefix

_C = load_extension()


@one_by_one
def prefill_chunk(q, k, v, pages, page_table, start, budgets, *, rule, scale, gate_scores=None, prefix=None, keys=None):
    """Implement :func:`kvpop_vllm.kernels.ops.prefill_chunk`."""
    check_dtype(k, pages)
    slots, state, told = pages.layout.block_slots, pages.layout.state_blocks, packed(rule)

    def run(q, k, v, start, gate_scores):
        place = pages.raw, slots, state, page_table, start, budgets
        try:
            return _C.prefill_chunk(q, k, v, *place, told, scale, gate_scores, tensors_of(prefix), keys)
        except _C.StepOrder as error:
            raise StepOrderError(str(error)) from None

    return with_prefix(run, q, k, v, start, gate_scores, prefix, scale, attends=rule.sequential, attend=_attend)


def _attend(q, prefix, begin, end, scale, causal):
    """Return attention of ``q`` to protected tokens, see :func:`with_prefix`."""
    layout, raw, table = prefix.pages.layout, prefix.pages.raw, prefix.table[0]
    is_bf16 = layout.dtype is torch.bfloat16
    return _C.prefix_attention(q, raw, layout.block_slots, table, begin, end, causal, is_bf16, scale)
