"""Copies of blocks, as those of snapshots: of all bytes where several layers share them, and in words on a CPU."""

import torch


def initialize_kv_cache(original, self, *args, **kwargs):
    """Wrap the making of a worker's caches, of which vLLM copies blocks of the first one at each address.

    Layers of several groups share bytes, and the block of a layer with padded pages is not all of them.
    """
    result = original(self, *args, **kwargs)
    self.kv_caches.sort(key=lambda cache: cache.numel() * cache.element_size(), reverse=True)
    return result


def copy_kv_cache_blocks_inplace(original, kv_caches, num_blocks, kv_cache_block_copies):
    """Wrap the copies of blocks ``[(source, target)]`` of caches on a CPU.

    vLLM indexes elements, which takes torch several times as long for bytes as for words of eight. It gets words. A
    storage that holds one block after another is copied here, because vLLM takes its bytes whatever it gets.
    """
    storages, remaining = {}, []
    for cache in kv_caches:
        storage = cache.untyped_storage()
        holds_blocks = storage.nbytes() == cache.shape[0] * cache.stride(0) * cache.element_size()
        if holds_blocks and storage.nbytes() % (8 * num_blocks) == 0:
            storages[storage.data_ptr()] = storage
        elif storage.data_ptr() not in storages:
            remaining.append(_in_words(cache))
    source, target = torch.tensor(kv_cache_block_copies).reshape(-1, 2).unbind(1)
    for storage in storages.values():
        blocks = torch.empty(0, dtype=torch.int64).set_(storage).view(num_blocks, -1)
        blocks[target] = blocks[source]
    if remaining:
        original(remaining, num_blocks, kv_cache_block_copies)


def _in_words(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache as words of eight bytes, or as it is where its last dimension is not made of them."""
    count = 8 // cache.element_size()
    numbers = cache.shape[-1], cache.storage_offset(), *cache.stride()[:-1]
    divisible = cache.stride(-1) == 1 and not any(number % count for number in numbers)
    return cache.view(torch.int64) if divisible else cache
