"""C++ implementation of ``prefill_chunk``: the tail's kernel, merged with attention to a protected prefix."""

import torch

from kvpop_vllm.cache.pages import Prefix
from kvpop_vllm.kernels.cpp.decode_step import check_dtype, packed, tensors_of
from kvpop_vllm.kernels.dispatch import load_extension
from kvpop_vllm.kernels.one_by_one import one_by_one
from kvpop_vllm.kernels.ops import StepOrderError

_C = load_extension()
Attended = tuple[torch.Tensor, torch.Tensor]
"""Outputs ``[L, Hq, D]`` and log-sum-exps ``[L, Hq]`` float32."""
PIECE = 8192
"""Number of protected tokens whose keys and values are copied at a time, which bounds the memory."""


@one_by_one
def prefill_chunk(
    q, k, v, pages, page_table, start, budgets, *, rule, scale, gate_scores=None, prefix=None, keys=None,
    sink_logits=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.prefill_chunk`.

    A chunk may begin within a protected prefix, end in it, or start after it. Its protected tokens are stored
    already. Sequential rules attend to the prefix token by token, others apart. Attention sinks are in the part that
    the others are merged with.
    """
    check_dtype(k, pages)
    slots, state, packed_rule = pages.layout.block_slots, pages.layout.state_blocks, packed(rule)
    protects = 0 if prefix is None else int(prefix.tokens[0])
    inside, outputs = min(max(protects - start, 0), len(q)), []
    if inside:
        among_prefix = _attend(q[:inside], prefix, start, start + inside, scale, True, sink_logits)
        outputs.append(_with_all(among_prefix, q[:inside], prefix, start, scale))
    if inside < len(q) or not inside:
        scores = None if gate_scores is None else gate_scores[inside:]
        place = pages.raw, slots, state, page_table, start + inside, budgets
        try:
            options = packed_rule, scale, scores, tensors_of(prefix), keys, sink_logits
            tail = _C.prefill_chunk(q[inside:], k[inside:], v[inside:], *place, *options)
        except _C.StepOrder as error:
            raise StepOrderError(str(error)) from None
        apart = protects if len(q) and not rule.sequential else 0
        outputs.append(_with_all(tail, q[inside:], prefix, apart, scale))
    return outputs[0] if len(outputs) == 1 else tuple(torch.cat(pair) for pair in zip(*outputs, strict=True))


def _with_all(attended: Attended, q: torch.Tensor, prefix: Prefix | None, end: int, scale: float) -> Attended:
    """Merge attention ``attended`` of q with that to the first ``end`` protected tokens, in float32."""
    if not end:
        return attended
    (out, lse), dtype = attended, attended[0].dtype
    for begin in range(0, end, PIECE):
        part, part_lse = _attend(q, prefix, begin, min(begin + PIECE, end), scale, False, None)
        merged = torch.logaddexp(lse, part_lse)
        out = torch.lerp(out.float(), part.float(), torch.exp(part_lse - merged).unsqueeze(-1))
        lse = merged
    return out.to(dtype), lse


def _attend(
    q: torch.Tensor, prefix: Prefix, begin: int, end: int, scale: float, causal: bool, sink_logits: torch.Tensor | None
) -> Attended:
    """Return attention of q to the protected tokens ``[begin, end)``.

    If ``causal``, there are as many tokens as queries, and query i sees the first i + 1 of them.
    """
    layout, raw, table = prefix.pages.layout, prefix.pages.raw, prefix.table[0]
    is_bf16, biased = layout.dtype is torch.bfloat16, 0 if prefix.biased is None else min(int(prefix.biased[0]), end)
    place = raw, layout.block_slots, table, begin, end, biased, causal, is_bf16
    return _C.prefix_attention(q, *place, scale, sink_logits)
