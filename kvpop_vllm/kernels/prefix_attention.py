"""Attention of a chunk to a protected prefix, for prefill kernels that attend to the tail alone.

The attention runs on torch's kernels unless the implementation provides its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpop_vllm.kernels.pages import Prefix

Attended = tuple[torch.Tensor, torch.Tensor]
"""Outputs ``[L, Hq, D]`` and log-sum-exps ``[L, Hq]`` float32."""
PIECE = 8192
"""Number of protected tokens whose keys and values are copied at a time, which bounds the memory."""


def with_prefix(
    run_tail: Callable[..., Attended],
    q,
    k,
    v,
    start: int,
    gate_scores,
    prefix: Prefix | None,
    scale: float,
    *,
    attends: bool,
    attend: Callable[..., Attended] | None = None,
) -> Attended:
    """Run a chunk that may begin within a protected prefix, end in it, or lie behind it.

    Args:
        run_tail: function ``(q, k, v, start, given)`` that runs the tokens behind the prefix, as
            :func:`kvpop_vllm.kernels.ops.prefill_chunk` does.
        q, k, v, start, given, prefix, scale: the chunk, as in ``prefill_chunk``; its own protected tokens are
            stored in the prefix pages already.
        attends: True if ``run_tail`` attends to the prefix too; otherwise its results are merged with
            attention to the prefix.
        attend: function ``(q, prefix, begin, end, scale, causal)`` that returns attention of ``q`` to the
            protected tokens ``[begin, end)``; torch's by default.

    Returns:
        Outputs ``[L, Hq, D]`` and log-sum-exps ``[L, Hq]`` float32.
    """
    attend = attend or _attend
    protects = 0 if prefix is None else int(prefix.tokens[0])
    inside, parts = min(max(protects - start, 0), len(q)), []
    if inside:
        own = attend(q[:inside], prefix, start, start + inside, scale, True)
        parts.append(_with_all(attend, own, q[:inside], prefix, start, scale))
    if inside < len(q) or not inside:
        scores = None if gate_scores is None else gate_scores[inside:]
        tail = run_tail(q[inside:], k[inside:], v[inside:], start + inside, scores)
        parts.append(tail if attends or not len(q) else _with_all(attend, tail, q[inside:], prefix, protects, scale))
    return parts[0] if len(parts) == 1 else tuple(torch.cat(pair) for pair in zip(*parts, strict=True))


def _with_all(attend, found: Attended, q: torch.Tensor, prefix: Prefix | None, end: int, scale: float) -> Attended:
    """Merge attention ``found`` of q with that to the first ``end`` protected tokens, in float32."""
    if not end:
        return found
    (out, lse), dtype = found, found[0].dtype
    for begin in range(0, end, PIECE):
        part, part_lse = attend(q, prefix, begin, min(begin + PIECE, end), scale, False)
        merged = torch.logaddexp(lse, part_lse)
        out = torch.lerp(out.float(), part.float(), torch.exp(part_lse - merged).unsqueeze(-1))
        lse = merged
    return out.to(dtype), lse


def _attend(q: torch.Tensor, prefix: Prefix, begin: int, end: int, scale: float, causal: bool) -> Attended:
    """Return softmax attention of ``q [L, Hq, D]`` to the protected tokens ``[begin, end)``.

    If ``causal``, there are as many tokens as queries, and query i sees the first i + 1 of them.
    """
    keys, values = prefix.gather(0, begin, end)
    heads, group = keys.shape[0], q.shape[1] // keys.shape[0]
    rows = q.transpose(0, 1).unflatten(0, (heads, group))
    keys, values = (x.to(q.dtype).unsqueeze(1).expand(-1, group, -1, -1) for x in (keys, values))
    out, lse = _fused(rows, keys, values, scale, causal)
    return out.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1).T.float()


def _fused(q, k, v, scale, causal) -> Attended:
    """Return attention ``[H, G, L, D]`` and natural log-sum-exps ``[H, G, L]``.

    The kernel is torch's for the device and dtype.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]
