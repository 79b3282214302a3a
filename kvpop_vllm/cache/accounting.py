"""Canonical and allocated bytes of a request's cache and of a pool (docs/maintaining.md)."""

from collections import Counter
from dataclasses import dataclass

import torch

from kvpop_vllm.cache.divided_heads import divided_blocks
from kvpop_vllm.cache.pages import PageLayout, cdiv
from kvpop_vllm.cache.ranks import BlockCounts, Shares
from kvpop_vllm.requests import Compression, RequestSlots
from kvpop_vllm.roles import Retention

MOST_PADDING = 0.04
"""Part of a page that may be padding before the pages of other layers are made larger."""
FACTORS = 1, 2, 4
"""Factors by which they may be made larger; a chunk is a whole number of blocks then too."""


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
    # sinks of a request with a prefix lie in it
    sinks = retention.sinks - retention.after_prefix(protected).sinks
    counts: Counter[int] = Counter()
    for budget, many in (shares.counts if shares else {retention.budget: heads}).items():
        counts[protected + min(length - protected, budget - sinks)] += many
    return dict(counts)


def request_blocks(
    length: int,
    slots: RequestSlots,
    sizes: tuple[int, int, int, int],
    unequal: BlockCounts | None = None,
    compression: Compression | None = None,
) -> int:
    """Return the number of blocks of a request of ``length`` tokens, entries of a dropped prefix included.

    Args:
        length: tokens of the request.
        slots: its slots.
        sizes: sinks, slots per block, state blocks, and KV heads of a layer.
        unequal: numbers of blocks of tails, if heads have unequal budgets.
        compression: way in which prompts are compressed at their end, or None.
    """
    sinks, size, state, heads = sizes
    prefix, tokens = cdiv(min(length, slots.prefix), size), length - slots.prefix
    tail = slots.budget - sinks if slots.prefix else slots.budget
    if compression is not None and slots.prefix:
        # the state is claimed with the first of the queries that it keeps for the vote
        if tokens <= -compression.queries:
            return prefix
        prefix, after = cdiv(slots.prefix, size), compression.after(slots)
        # a prompt that fits the budget is not divided
        if compression.adaptive_head_budgets and tokens >= 0 and slots.prefix > slots.budget:
            return prefix + state + divided_blocks(heads, slots.budget, size)
        prefix, tail = prefix + cdiv(after.made_slots, size), after.budget
        tokens = length - after.shift - after.made_slots if tokens >= 0 else 0
    elif tokens <= 0:
        return prefix
    if unequal is not None:
        return prefix + unequal.blocks(state, size, tokens)
    return prefix + state + cdiv(min(tokens, tail), size)


def dropped_columns(slots: RequestSlots, size: int, state: int, compression: Compression) -> list[tuple[int, int]]:
    """Return the columns of a request's row that it no longer needs after the end of its prompt, first and last + 1.

    They are those of the prompt and, where slots were made of it, those of the state.

    Args:
        slots: slots of the request.
        size: slots per block.
        state: state blocks.
        compression: way in which prompts are compressed.
    """
    prefix = cdiv(slots.prefix, size)
    if not compression.makes_slots:
        return [(0, prefix)]
    first = prefix + cdiv(compression.after(slots).made_slots, size)
    return [(0, prefix), (first, first + state)]


def request_bytes(
    layout: PageLayout,
    num_layers: int,
    length: int,
    retention: Retention,
    shares: Shares | None = None,
    protected: int = 0,
    compression: Compression | None = None,
) -> CacheBytes:
    """Return the bytes of a request that has processed ``length`` tokens.

    Args:
        layout: page layout of a layer.
        num_layers: number of layers.
        length: tokens that the request has processed.
        retention: budget, sinks and window.
        shares: budgets of all heads, if they are unequal.
        protected: p, tokens of the protected prefix, or of a prompt that has been compressed.
        compression: way in which the prompt has been compressed, or None.
    """
    slots = RequestSlots(min(protected, length), 0, retention.budget, retention.window)
    prefix, heads = 0 if compression else slots.prefix, num_layers * layout.num_kv_heads
    counts = kept_tokens(heads, length, retention, shares, prefix)
    tokens_held = sum(tokens * many for tokens, many in counts.items())
    sizes = retention.sinks, layout.block_slots, layout.state_blocks, layout.num_kv_heads
    blocks = request_blocks(length, slots, sizes, shares and shares.block_counts, compression)
    # dropped blocks stay as entries of the row, but null blocks stand for them
    if compression is not None:
        dropped = dropped_columns(slots, layout.block_slots, layout.state_blocks, compression)
        blocks -= sum(last - first for first, last in dropped)
    per_token = 2 * layout.head_size * layout.dtype.itemsize
    return CacheBytes(tokens_held * per_token, blocks * heads * layout.region_bytes, blocks)


def compressing_bytes(
    layout: PageLayout,
    num_layers: int,
    prompt: int,
    retention: Retention,
    compression: Compression,
    shares: Shares | None = None,
) -> CacheBytes:
    """Return the bytes of a request at the end of a prompt that is compressed then: whole prompt, state and tail.

    Arguments are those of :func:`request_bytes`; ``prompt`` is the number of prompt tokens.
    """
    after = request_bytes(layout, num_layers, prompt, retention, shares, prompt, compression)
    blocks, heads = after.blocks + cdiv(prompt, layout.block_slots), num_layers * layout.num_kv_heads
    if compression.makes_slots:  # the state is given up with the prompt
        blocks += layout.state_blocks
    of_prompt = heads * prompt * 2 * layout.head_size * layout.dtype.itemsize
    return CacheBytes(after.canonical + of_prompt, blocks * heads * layout.region_bytes, blocks)


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


def common_pages(page: int, unit: int) -> tuple[int, int]:
    """Return sizes of the pages of two kinds of layers that share a pool, in which each page takes what the largest does.

    Ours is the largest. If more than MOST_PADDING of the others is padding, they are made larger.

    Args:
        page: bytes of a page of other layers.
        unit: bytes of the smallest page of ours.

    Returns:
        The factor by which pages of other layers are made larger, and how many times the smallest page ours is.
    """
    pairs = [(factor, cdiv(factor * page, unit)) for factor in FACTORS]
    padding = [1 - factor * page / (count * unit) for factor, count in pairs]
    few = (pair for pair, part in zip(pairs, padding, strict=True) if part < MOST_PADDING)
    return next(few, pairs[padding.index(min(padding))])


def pool_bytes(request: CacheBytes, num_blocks: int) -> PoolBytes:
    """Return the bytes of a pool with ``num_blocks`` pages per layer, filled with requests like ``request``.

    ``request`` must hold at least one block.
    """
    requests = num_blocks / request.blocks
    return PoolBytes(int(requests) * request.canonical, num_blocks * request.allocated // request.blocks, requests)
