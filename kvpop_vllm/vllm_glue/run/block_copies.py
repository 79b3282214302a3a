"""Copies of blocks whose bytes several layers share, as those of snapshots."""

from __future__ import annotations


def initialize_kv_cache(original, self, *args, **kwargs):
    """Wrap the making of a worker's caches, of which vLLM copies blocks of the first one at each address.

    Layers of several groups share bytes, and the block of a layer with padded pages is not all of them.
    """
    result = original(self, *args, **kwargs)
    self.kv_caches.sort(key=lambda cache: cache.numel() * cache.element_size(), reverse=True)
    return result
