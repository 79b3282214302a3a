"""Copies of blocks in words give the bytes of vLLM's copies."""

import pytest
import torch
from vllm.v1.worker import utils

from kvpop_vllm.vllm_glue.run.block_copies import copy_kv_cache_blocks_inplace

BLOCKS = 6
COPIES = [(0, 3), (5, 1), (3, 4)]
"""The third reads what the first writes: the content before all copies counts."""


def caches_of(kind: str) -> list[torch.Tensor]:
    """Return the caches of some layers, ``[BLOCKS or a multiple, ...]``."""
    if kind == "a storage per layer":
        return [torch.rand(BLOCKS, 2, 24), torch.rand(BLOCKS, 16).to(torch.float16)]
    if kind == "kernel blocks":
        return [torch.rand(2 * BLOCKS, 4, 8)]
    if kind == "no whole words":
        return [torch.randint(255, (BLOCKS, 13), dtype=torch.uint8)]
    storage = torch.rand(BLOCKS, 40)
    if kind == "layers of one storage":
        return [storage, storage[:, :24]]
    if kind == "padded pages only":
        return [storage[:, :24]]
    return [*torch.rand(2, BLOCKS, 24)]  # layers one after another in a storage


@pytest.mark.parametrize(
    "kind",
    [
        "a storage per layer",
        "kernel blocks",
        "no whole words",
        "layers of one storage",
        "padded pages only",
        "layers one after another",
    ],
)
def test_bytes_are_those_of_vllms_copies(kind, monkeypatch):
    torch.manual_seed(3)
    ours = caches_of(kind)
    torch.manual_seed(3)
    expected = caches_of(kind)
    before = [cache.clone() for cache in ours]
    utils.copy_kv_cache_blocks_inplace(expected, BLOCKS, COPIES)
    left_to_vllm = []

    def original(caches, *arguments):
        left_to_vllm.extend(caches)
        utils.copy_kv_cache_blocks_inplace(caches, *arguments)

    copy_kv_cache_blocks_inplace(original, ours, BLOCKS, COPIES)
    assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(ours, before, strict=True))
    assert bool(left_to_vllm) == (kind in ("no whole words", "layers one after another"))
