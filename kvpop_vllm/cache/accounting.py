"""Bytes of a request's cache and of a pool, each counted two ways (DESIGN "Accounting")."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.regions import Shares, divided_blocks
from kvpop_vllm.roles import Retention


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


@dataclass(frozen=True)
class PoolBytes:
    """Bytes of a pool that is full of equal requests.

    Attributes:
        canonical: K and V of the tokens that the whole requests hold. allocated: all of the pool.
        requests: how many fit, not rounded, which is what vLLM reports as maximum concurrency.
    """

    canonical: int
    allocated: int
    requests: float


def request_bytes(
    layout: PageLayout,
    num_layers: int,
    length: int,
    retention: Retention,
    shares: Shares | None = None,
    protected: int = 0,
    divided: int = 0,
) -> CacheBytes:
    """Return what a request holds whose cache has taken in ``length`` tokens; ``shares``: of its heads, where they are unequal;
    ``protected``: p, tokens of its protected prefix; ``divided``: tokens of its prompt, at whose end its heads divide their slots by votes."""
    protected = min(protected, length)
    own, tail = length - protected, retention.behind(protected)
    heads, sinks = num_layers * layout.num_kv_heads, retention.sinks - tail.sinks
    counts = shares.counts if shares else {retention.budget: heads}
    held = heads * protected + sum(many * min(own, budget - sinks) for budget, many in counts.items())
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


def compressing_bytes(
    layout: PageLayout,
    num_layers: int,
    prompt: int,
    retention: Retention,
    shares: Shares | None = None,
    divides: bool = False,
) -> CacheBytes:
    """Return what a request holds at the end of a prompt of so many tokens that is compressed then: all of it, and its tail; ``divides``:
    its heads divide their slots by votes."""
    tail = request_bytes(layout, num_layers, prompt, retention, shares, divided=prompt if divides else 0)
    heads, blocks = num_layers * layout.num_kv_heads, cdiv(prompt, layout.block_slots)
    whole = heads * prompt * 2 * layout.head_size * layout.dtype.itemsize
    page = layout.num_kv_heads * layout.region_bytes * num_layers
    return CacheBytes(tail.canonical + whole, tail.allocated + blocks * page, tail.blocks + blocks)


def worst_prompts(longest: int, length: int, size: int) -> list[int]:
    """Return numbers of protected tokens, up to ``longest``, among which is one with which a request of ``length`` tokens holds most
    blocks of ``size`` slots, a request that protects nothing among them: another block of prefix costs the tail a block at most, so of prompts that leave a tail it is one
    of the longest ``size``."""
    last = min(longest, length - 1)
    return sorted({0, longest, *range(max(1, last - size + 1), last + 1)})


def dense_request_bytes(
    num_layers: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, length: int, block_size: int
) -> CacheBytes:
    """What it would hold in a stock paged cache of ``block_size`` tokens per block (vLLM's default on a CPU is 128)."""
    per_token = 2 * num_kv_heads * head_size * dtype.itemsize * num_layers
    blocks = cdiv(length, block_size)
    return CacheBytes(canonical=length * per_token, allocated=blocks * block_size * per_token, blocks=blocks)


def pool_bytes(request: CacheBytes, num_blocks: int) -> PoolBytes:
    """A pool of ``num_blocks`` pages of each layer, full of requests that hold what ``request`` does, at least a block."""
    requests = num_blocks / request.blocks
    return PoolBytes(int(requests) * request.canonical, num_blocks * request.allocated // request.blocks, requests)
