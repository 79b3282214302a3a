"""Bytes of a request's cache, counted two ways (SEMANTICS section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpop_vllm.kernels.pages import BLOCK_SLOTS, PageLayout, cdiv


@dataclass(frozen=True)
class CacheBytes:
    """Bytes one request holds.

    Attributes:
        canonical: K and V of the tokens held, nothing else; compares methods.
        allocated: whole blocks, with scores, positions, scorer state and padding; what leaves the pool.
        blocks: pages of each layer.
    """

    canonical: int
    allocated: int
    blocks: int


def request_bytes(layout: PageLayout, num_layers: int, length: int, budget: int) -> CacheBytes:
    """What a request of ``length`` tokens holds under ``budget`` tokens per KV head."""
    held = min(length, budget)
    blocks = layout.blocks(length, budget)
    per_token = 2 * layout.num_kv_heads * layout.head_size * layout.dtype.itemsize * num_layers
    page = layout.num_kv_heads * layout.region_bytes * num_layers
    return CacheBytes(canonical=held * per_token, allocated=blocks * page, blocks=blocks)


def dense_request_bytes(
    num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, length: int, block_size: int = BLOCK_SLOTS
) -> CacheBytes:
    """What a request of ``length`` tokens holds in a stock paged cache."""
    per_token = 2 * num_kv_heads * head_size * dtype.itemsize * num_layers
    blocks = cdiv(length, block_size)
    return CacheBytes(canonical=length * per_token, allocated=blocks * block_size * per_token, blocks=blocks)
