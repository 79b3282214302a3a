"""A prefill chunk in C++."""

from __future__ import annotations

from kvpop_vllm.kernels.cpp.decode_step import check_dtype, packed
from kvpop_vllm.kernels.dispatch import load_extension
from kvpop_vllm.kernels.ops import StepOrderError

_C = load_extension()


def prefill_chunk(q, k, v, pages, page_table, start, budgets, *, rule, scale, given=None):
    """See :func:`kvpop_vllm.kernels.ops.prefill_chunk`."""
    check_dtype(k, pages)
    slots, state, told = pages.layout.block_slots, pages.layout.state_blocks, packed(rule)
    try:
        return _C.prefill_chunk(q, k, v, pages.raw, slots, state, page_table, start, budgets, told, scale, given)
    except _C.StepOrder as error:
        raise StepOrderError(str(error)) from None
