"""Attention of a chunk to a protected prefix, for prefill kernels that attend to the tail alone."""

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
    attend: Callable[..., Attended],
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
            protected tokens ``[begin, end)``. If ``causal``, there are as many tokens as queries, and query i sees the
            first i + 1 of them.

    Returns:
        Outputs ``[L, Hq, D]`` and log-sum-exps ``[L, Hq]`` float32.
    """
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
