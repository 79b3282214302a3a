"""Attention of layers whose queries see a sliding window, or their chunk, on which a policy does not act."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpop_vllm.kernels.reference.masked_attention import masked_attention
from kvpop_vllm.supported import SLIDING

QUERIES = 512
"""Queries that attend together, which bounds the memory of masks."""


def grouped_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, **mask) -> torch.Tensor:
    """Return torch's attention ``[B, Hq, Q, D]`` of queries that share KV heads, without an array of all logits.

    Args:
        q: ``[B, Hq, Q, D]``.
        k: ``[B, H, S, D]``.
        v: ``[B, H, S, D]``.
        scale: factor on q . k.
        mask: ``attn_mask`` or ``is_causal`` of torch's function.
    """
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.is_cuda and q.dtype is torch.float32:
        # the one kernel for float32 on a GPU that forms no [S, S] takes no groups
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=group > 1, **mask)


class Part(NamedTuple):
    """Queries that attend together.

    Attributes:
        queries: their columns.
        keys: columns of the keys that they may see.
        mask: ``[R, 1, Q, T]`` booleans, True for keys that a query sees. R may be 1.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor


def parts_of(kind: str, size: int, queries: torch.Tensor, keys: torch.Tensor) -> Iterator[Part]:
    """Yield the parts of a pass.

    Args:
        kind: kind of the layers, as in transformers' configs.
        size: tokens of a window, the query's own included, or of a chunk.
        queries: ``[R, L]`` int64, positions of the queries, which are the last keys, -1 for pads.
        keys: ``[R, T]``, positions of the keys, likewise.
    """
    length, before = queries.shape[1], keys.shape[1] - queries.shape[1]
    columns = torch.arange(keys.shape[1], device=keys.device)
    for begin in range(0, length, QUERIES):
        now = slice(begin, begin + QUERIES)
        # keys that the first query of the part may see, up to its last query
        near = slice(max(0, before + begin - size + 1), before + begin + QUERIES)
        q, t = queries[:, now].unsqueeze(2), keys[:, near].unsqueeze(1)
        inside = q - t < size if kind == SLIDING else q // size == t // size
        mask = inside & (t <= q) & (t >= 0)
        mask |= columns[near] == columns[before:][now].unsqueeze(1)  # a pad sees itself
        yield Part(now, near, mask.unsqueeze(1))


def attend_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    parts: Iterable[Part],
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention ``[R, Hq, L, D]`` of q ``[R, Hq, L, D]`` to k, v ``[R, H, T, D]``, part by part.

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: factor on q . k.
        parts: from :func:`parts_of`.
        sink_logits: ``[Hq]``, logits of the model's attention sinks, which have no gradient, or None.
    """
    outputs = []
    for part in parts:
        inputs = q[:, :, part.queries], k[:, :, part.keys], v[:, :, part.keys]
        if sink_logits is None:
            outputs.append(grouped_attention(*inputs, scale, attn_mask=part.mask))
        else:
            outputs.append(_attend_with_sinks(*inputs, part.mask, scale, sink_logits))
    return torch.cat(outputs, 2)


def _attend_with_sinks(q, k, v, mask: torch.Tensor, scale: float, sink_logits: torch.Tensor) -> torch.Tensor:
    """Return the attention of a part, with the sinks in the softmax. Arguments as of :class:`Part`."""
    rows, heads = k.shape[:2]
    # rows and KV heads become one axis, and each group of query heads lies together: [R * H, G, L, D]
    by_head = q.unflatten(1, (heads, -1)).flatten(0, 1)
    visible = mask.expand(rows, heads, -1, -1).flatten(0, 1)
    sinks = sink_logits.detach().view(heads, -1).repeat(rows, 1)
    out, _ = masked_attention(by_head, k.flatten(0, 1), v.flatten(0, 1), visible, scale, sink_logits=sinks)
    return out.to(q.dtype).view_as(q)


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    kind: str,
    size: int,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention ``[R, Hq, L, D]`` of rows without pads that begin at position 0.

    Args:
        q: ``[R, Hq, L, D]``. There may be fewer queries than keys. They are the last ones.
        k: ``[R, H, T, D]``.
        v: ``[R, H, T, D]``.
        scale: factor on q . k.
        kind: as in :func:`parts_of`.
        size: as in :func:`parts_of`.
        sink_logits: as in :func:`attend_parts`.
    """
    keys = torch.arange(k.shape[2], device=q.device).unsqueeze(0)
    parts = parts_of(kind, size, keys[:, k.shape[2] - q.shape[2] :], keys)
    return attend_parts(q, k, v, scale, parts, sink_logits)
