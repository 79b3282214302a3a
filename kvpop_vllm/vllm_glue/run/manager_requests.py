"""Wrappers of what block managers do with requests: ours are passed each request; vLLM itself passes only its name."""

from __future__ import annotations

from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetManager


def get_computed_blocks(original, self, request, *args, **kwargs):
    """Wrap the look-up of prefix hits, which precedes the allocation of a request's first blocks."""
    ours = [each for each in self.coordinator.single_type_managers if isinstance(each, FixedBudgetManager)]
    placed = [block for manager in ours for block in manager.admit(request)]
    snapshot = _snapshot_hit(self, request, placed)
    if snapshot is not None:
        return snapshot
    if placed:
        return _after_cartridges(self, request, placed)
    blocks, hit, boundary = original(self, request, *args, **kwargs)
    reusable = min((manager.reusable(request.request_id) for manager in ours), default=hit)
    if hit > reusable:  # blocks beyond its own prefix belong to another request's prompt
        hits, hit, _ = self.coordinator.find_longest_cache_hit(request.block_hashes, reusable)
        blocks, boundary = self.create_kv_cache_blocks(hits), 0
    size = self.coordinator.scheduler_block_size
    if ours and len(self.coordinator.single_type_managers) > len(ours):
        boundary = reusable // size * size  # windows keep what a hit of this length needs
    return blocks, hit, boundary


def cache_blocks(original, self, request, num_computed_tokens, *args, **kwargs):
    """Wrap the hashing of a request's full blocks, of all cache groups: it ends with the protected prefix.

    Later tokens have seen what evictions left, so keys and values of the same tokens differ between requests, also in
    layers that the policy does not act on.
    """
    for manager in self.single_type_managers:
        if isinstance(manager, FixedBudgetManager):
            slots = manager.requests.get(request.request_id)
            num_computed_tokens = min(num_computed_tokens, 0 if slots is None else slots.prefix)
    return original(self, request, num_computed_tokens, *args, **kwargs)


def free_request(original, self, request, *args, **kwargs):
    """Wrap the end of a request: take a snapshot of it."""
    for manager in self.kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager, FixedBudgetManager) and manager.snapshots is not None:
            manager.snapshots.take(request)
    return original(self, request, *args, **kwargs)


def _after_cartridges(self, request, placed: list):
    """Return the blocks of a request's cartridges, and those after them that the prefix cache has."""
    (manager,) = self.coordinator.single_type_managers
    blocks = [*placed]
    if self.prefix_cache_lookup_enabled(request):
        blocks = _prefix_blocks(self, request, placed, request.num_tokens - 1)
    blocks = blocks[: manager.reusable(request.request_id) // manager.block_size]
    return self.create_kv_cache_blocks((blocks,)), len(blocks) * manager.block_size, 0


def _prefix_blocks(self, request, placed: list, length: int) -> list:
    """Return the blocks of a request's cartridges and those after them that the prefix cache has, of ``length`` tokens at most."""
    (manager,) = self.coordinator.single_type_managers
    first = len(placed)
    rest = length - first * manager.block_size
    (found,), _, _ = self.coordinator.find_longest_cache_hit(request.block_hashes[first:], rest)
    return [*placed, *found]


def _snapshot_hit(self, request, placed: list):
    """Return the blocks of the longest snapshot that a request can go on from, its length, and no boundary; None without one."""
    manager = self.coordinator.single_type_managers[0]
    snapshots = getattr(manager, "snapshots", None)
    if snapshots is None or not self.prefix_cache_lookup_enabled(request):
        return None
    snapshots.begin(request)
    snapshot = snapshots.longest(request)
    if snapshot is None:
        return None
    full = snapshot.key.slots.prefix // manager.block_size
    prefix = _prefix_blocks(self, request, placed, full * manager.block_size)[:full] if full else []
    if len(prefix) < full:
        return None
    blocks = [*prefix, *snapshot.blocks]
    snapshots.share(request.request_id, snapshot, True)
    needed = manager.get_num_blocks_to_allocate(request.request_id, request.num_tokens, blocks) + self.watermark_blocks
    if not snapshots.share(request.request_id, snapshot, needed <= self.block_pool.get_num_free_blocks()):
        return None
    return self.create_kv_cache_blocks((blocks,)), snapshot.length, 0
