"""Canonical and allocated bytes of a request and of a pool, counted by hand."""

import torch

from kvpop_vllm.cache.accounting import CacheBytes, PoolBytes, dense_request_bytes, pool_bytes, request_bytes
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.roles import Retention


def test_a_bounded_request():
    """A bounded request with 3 heads, D = 64, bfloat16 and 30 layers has the bytes counted by hand.

    A token takes 256 bytes of K and V and 8 bytes of score and position per head.
    """
    layout = PageLayout(3, 64, torch.bfloat16, 64, state_floats=64 * 64 + 64 + 1)  # the state fills a block
    assert request_bytes(layout, 30, 5000, Retention(1024, 4, 64)) == CacheBytes(
        1024 * 256 * 90, 17 * 64 * 264 * 90, 17
    )
    assert request_bytes(layout, 30, 65, Retention(1024, 4, 64)) == CacheBytes(65 * 256 * 90, 3 * 64 * 264 * 90, 3)


def test_staged_drafts_take_one_more_block_or_none():
    """Four drafts of 272 bytes lie in a block of their own after a full state, and in what is left of a larger one."""
    state = dict(state_floats=64 * 64 + 64 + 1, drafts=4)
    layout = PageLayout(3, 64, torch.bfloat16, 64, **state)
    assert layout.draft_bytes == 272
    assert request_bytes(layout, 30, 5000, Retention(1024, 4, 64)) == CacheBytes(
        1024 * 256 * 90, 18 * 64 * 264 * 90, 18
    )
    assert PageLayout(3, 64, torch.bfloat16, 128, **state).state_blocks == 1
    mass = PageLayout(3, 64, torch.bfloat16, 64, drafts=8, draft_query_bytes=4 * 128)  # h2o with four query heads
    assert request_bytes(mass, 30, 5000, Retention(1024, 4, 64)).blocks == 17


def test_a_dense_request_is_rounded_to_its_own_block_size():
    for block, blocks in ((128, 6), (64, 11), (16, 44)):
        expected = CacheBytes(700 * 256 * 90, blocks * block * 256 * 90, blocks)
        assert dense_request_bytes(30, 3, 64, torch.bfloat16, 700, block) == expected


def test_a_pool_holds_whole_requests():
    request = CacheBytes(canonical=900, allocated=1000, blocks=10)
    assert pool_bytes(request, 25) == PoolBytes(canonical=2 * 900, allocated=2500, requests=2.5)
    assert pool_bytes(request, 9) == PoolBytes(canonical=0, allocated=900, requests=0.9)
