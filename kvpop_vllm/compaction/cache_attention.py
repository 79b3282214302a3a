"""Attention over a compact cache and a request's own tokens, for transformers models loaded by :mod:`kvpop_vllm.model_hook`."""

import torch

from kvpop_vllm.local_attention import grouped_attention
from kvpop_vllm.model_hook import Attend, Dense, hidden_states

ROWS = 256
"""Queries whose mask is in memory at once."""


def log_probabilities(
    model, ids: list | torch.Tensor, positions: list | torch.Tensor, attend: Attend, index
) -> torch.Tensor:
    """Return log-probabilities ``[R, V]`` float32 that follow R of a row's tokens.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        ids: ``[T]``.
        positions: ``[T]``.
        attend: attention of the layers.
        index: which R of the tokens, a list or a slice.
    """
    hidden = hidden_states(model, ids, positions, attend)[index]
    return model.get_output_embeddings()(hidden).float().log_softmax(-1)


class Recorder(Dense):
    """Dense causal attention that keeps every layer's keys and values ``[H, T, D]``."""

    def __init__(self):
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of one layer. See :class:`kvpop_vllm.model_hook.Attend`."""
        self.layers.append((k[0], v[0]))
        return super().__call__(layer, q, k, v, scale)


def attend(q, k, v, scale, cache_k, cache_v, bias, segments=None) -> torch.Tensor:
    """Return the attention ``[1, Hq, R, D]`` of own tokens over a cache and over each other.

    Args:
        q: ``[1, Hq, R, D]``.
        k: own keys ``[1, H, R, D]``.
        v: own values ``[1, H, R, D]``.
        scale: factor on q . k.
        cache_k: ``[H, P, D]``.
        cache_v: ``[H, P, D]``.
        bias: ``[H, P]``, added to the scaled logits, or None.
        segments: ``[R]``, number of the sequence that each own token belongs to, None if all are one.
    """
    count, group = q.shape[2], q.shape[1] // k.shape[1]
    slots = cache_k.shape[1]
    keys = torch.cat([cache_k.to(k.dtype).unsqueeze(0), k], 2)
    values = torch.cat([cache_v.to(v.dtype).unsqueeze(0), v], 2)
    if segments is None:
        segments = torch.zeros(count, dtype=torch.int64, device=q.device)
    heads = k.shape[1] if bias is not None else 1
    outputs = []
    for a in range(0, count, ROWS):
        b = min(a + ROWS, count)
        order = torch.arange(a, b, device=q.device).unsqueeze(1) >= torch.arange(b, device=q.device)
        hidden = ~(order & (segments[a:b].unsqueeze(1) == segments[:b]))
        # bias and order are added in one mask, since torch takes a single one
        mask = q.new_zeros(heads, b - a, slots + b)
        if bias is not None:
            mask[:, :, :slots] = bias.to(q.dtype).unsqueeze(1)
        mask[:, :, slots:].masked_fill_(hidden, -torch.inf)
        # a mask has one head, or that of every query head
        if heads > 1 and group > 1:
            mask = mask.repeat_interleave(group, 0)
        outputs.append(
            grouped_attention(
                q[:, :, a:b], keys[:, :, : slots + b], values[:, :, : slots + b], scale, attn_mask=mask[None]
            )
        )
    return torch.cat(outputs, 2)
