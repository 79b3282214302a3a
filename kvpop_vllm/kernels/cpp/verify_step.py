"""C++ implementation of ``verify_step``."""

from kvpop_vllm.kernels.cpp.decode_step import check_dtype, packed, tensors_of
from kvpop_vllm.kernels.dispatch import load_extension
from kvpop_vllm.kernels.ops import StepOrderError

_C = load_extension()


def verify_step(
    q, k, v, pages, page_table, positions, first_tokens, drafts, budgets, *, rule, scale, gate_scores=None, prefix=None,
    keys=None, windows, sink_logits=None, out=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.verify_step`."""
    check_dtype(k, pages)
    layout = pages.layout
    staging = layout.draft_places, layout.draft_query_bytes
    place = pages.raw, layout.block_slots, layout.state_blocks, *staging, page_table
    requests = positions, first_tokens, drafts, budgets, windows
    try:
        optional = gate_scores, tensors_of(prefix), keys, sink_logits, out
        return _C.verify_step(q, k, v, *place, *requests, packed(rule), scale, *optional)
    except _C.StepOrder as error:
        raise StepOrderError(str(error)) from None
