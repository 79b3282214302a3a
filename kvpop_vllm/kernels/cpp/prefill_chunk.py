"""A prefill chunk in torch, its eviction times in C++."""

from __future__ import annotations

from kvpop_vllm.kernels.cpp.online_topk import online_topk
from kvpop_vllm.kernels.reference.prefill_chunk import prefill_with


def prefill_chunk(q, k, v, pages, page_table, start, budgets, *, rule, scale):
    """See :func:`kvpop_vllm.kernels.ops.prefill_chunk`."""
    return prefill_with(online_topk, q, k, v, pages, page_table, start, budgets, rule=rule, scale=scale)
