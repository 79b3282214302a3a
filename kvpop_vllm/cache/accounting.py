"""Canonical and allocated bytes of a request's cache and of a pool (docs/maintaining.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from kvpop_vllm.cache.pages import PageLayout, cdiv
from kvpop_vllm.cache.shares import Shares, divided_blocks
from kvpop_vllm.requests import Compression
from kvpop_vllm.roles import Retention


@dataclass(frozen=True)
class CacheBytes:
    """Bytes held by one request.

    Attributes:
        canonical: K and V of the held tokens only; compares methods.
        allocated: whole blocks, with scores, positions, scorer state and padding; the amount taken from the
            pool.
        blocks: pages of each layer.
    """

    canonical: int
    allocated: int
    blocks: int


@dataclass(frozen=True)
class PoolBytes:
    """Bytes of a pool filled with equal requests.

    Attributes:
        canonical: K and V of the tokens that the whole requests hold.
        allocated: all bytes of the pool.
        requests: number of requests that fit, not rounded; vLLM reports it as maximum concurrency.
    """

    canonical: int
    allocated: int
    requests: float


def kept_tokens(
    heads: int, length: int, retention: Retention, shares: Shares | None = None, protected: int = 0
) -> dict[int, int]:
    """Return numbers of held tokens, each with the number of KV heads that hold as many.

    They are slots in use. A policy that evicts while slots are free may hold fewer tokens.

    Args:
        heads: KV heads of all layers.
        length: tokens that the request has processed.
        retention: budget, sinks and window.
        shares: budgets of all heads, if they are unequal.
        protected: p, tokens of the protected prefix.
    """
    protected = min(protected, length)
    sinks = retention.sinks - retention.behind(protected).sinks
    held: Counter[int] = Counter()
    for budget, many in (shares.counts if shares else {retention.budget: heads}).items():
        held[protected + min(length - protected, budget - sinks)] += many
    return dict(held)


def request_bytes(
    layout: PageLayout,
    num_layers: int,
    length: int,
    retention: Retention,
    shares: Shares | None = None,
    protected: int = 0,
    divided: int = 0,
) -> CacheBytes:
    """Return the bytes of a request that has processed ``length`` tokens.

    Args:
        layout: page layout of a layer.
        num_layers: number of layers.
        length: tokens that the request has processed.
        retention: budget, sinks and window.
        shares: budgets of all heads, if they are unequal.
        protected: p, tokens of the protected prefix.
        divided: tokens of its prompt if its heads divide their slots by votes at the prompt's end, else 0.
    """
    protected = min(protected, length)
    own, tail = length - protected, retention.behind(protected)
    counts = kept_tokens(num_layers * layout.num_kv_heads, length, retention, shares, protected)
    held = sum(tokens * heads for tokens, heads in counts.items())
    blocks = cdiv(protected, layout.block_slots)
    if own and shares:
        blocks += shares.blocks(layout.state_blocks, layout.block_slots, own)
    elif divided > retention.budget:
        blocks += layout.state_blocks + divided_blocks(layout.num_kv_heads, tail.budget, layout.block_slots)
    elif own:
        blocks += layout.blocks(own, tail.budget)
    per_token = 2 * layout.head_size * layout.dtype.itemsize
    page = layout.num_kv_heads * layout.region_bytes * num_layers
    return CacheBytes(canonical=held * per_token, allocated=blocks * page, blocks=blocks)


def compressed_bytes(
    layout: PageLayout,
    num_layers: int,
    prompt: int,
    length: int,
    retention: Retention,
    compression: Compression,
    shares: Shares | None = None,
) -> CacheBytes:
    """Return the bytes of a request of ``length`` tokens behind the end of a prompt that has been compressed.

    Args:
        layout: page layout of a layer.
        num_layers: number of layers.
        prompt: number of prompt tokens.
        length: tokens that the request has processed.
        retention: budget, sinks and window.
        compression: way in which prompts are compressed.
        shares: budgets of all heads, if they are unequal.
    """
    divided = prompt if compression.adaptive_head_budgets else 0
    held = request_bytes(layout, num_layers, length, retention, shares, divided=divided)
    if not compression.makes_slots:
        return held
    after = compression.after(prompt, retention.budget, retention.window)
    tail = min(length - after.shift, retention.budget) - after.made
    blocks = cdiv(after.made, layout.block_slots) + cdiv(tail, layout.block_slots)
    page = layout.num_kv_heads * layout.region_bytes * num_layers
    return CacheBytes(held.canonical, blocks * page, blocks)


def compressing_bytes(
    layout: PageLayout,
    num_layers: int,
    prompt: int,
    retention: Retention,
    compression: Compression,
    shares: Shares | None = None,
) -> CacheBytes:
    """Return the bytes of a request at the end of a prompt that is compressed then: whole prompt, state and tail.

    Arguments are those of :func:`compressed_bytes`.
    """
    held = compressed_bytes(layout, num_layers, prompt, prompt, retention, compression, shares)
    heads, blocks = num_layers * layout.num_kv_heads, cdiv(prompt, layout.block_slots)
    if compression.makes_slots:  # the state is given up with the prompt
        blocks += layout.state_blocks
    whole = heads * prompt * 2 * layout.head_size * layout.dtype.itemsize
    page = layout.num_kv_heads * layout.region_bytes * num_layers
    return CacheBytes(held.canonical + whole, held.allocated + blocks * page, held.blocks + blocks)


def worst_prompts(longest: int, length: int, size: int) -> list[int]:
    """Return candidate numbers of protected tokens that include the worst case.

    In the worst case, a request of ``length`` tokens that protects up to ``longest`` tokens holds the most
    blocks of ``size`` slots. The result includes 0, for a request without protection. One more prefix block
    removes at most one block from the tail. Among the prompts that leave a tail, one of the longest ``size``
    is therefore a worst case.
    """
    last = min(longest, length - 1)
    return sorted({0, longest, *range(max(1, last - size + 1), last + 1)})


def dense_request_bytes(
    num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, length: int, block_size: int
) -> CacheBytes:
    """Return the bytes of a request of ``length`` tokens in a stock paged cache.

    ``block_size`` is the number of tokens per block (vLLM's default on a CPU is 128).
    """
    per_token = 2 * num_kv_heads * head_size * dtype.itemsize * num_layers
    blocks = cdiv(length, block_size)
    return CacheBytes(canonical=length * per_token, allocated=blocks * block_size * per_token, blocks=blocks)


def pool_bytes(request: CacheBytes, num_blocks: int) -> PoolBytes:
    """Return the bytes of a pool with ``num_blocks`` pages per layer, filled with requests like ``request``.

    ``request`` must hold at least one block.
    """
    requests = num_blocks / request.blocks
    return PoolBytes(int(requests) * request.canonical, num_blocks * request.allocated // request.blocks, requests)
