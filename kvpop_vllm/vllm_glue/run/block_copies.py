"""Copies of blocks whose bytes several layers share, as those of snapshots."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def copy_kv_cache_blocks_inplace(original, kv_caches: Iterable[torch.Tensor], *args, **kwargs) -> None:
    """Wrap the copying of blocks, which copies those of the first layer at each address.

    Layers of several groups share bytes, and the block of a layer with padded pages is not all of them.
    """
    largest_first = sorted(kv_caches, key=lambda cache: cache.numel() * cache.element_size(), reverse=True)
    original(largest_first, *args, **kwargs)
