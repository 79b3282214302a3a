"""Wrappers of what block managers do with requests: ours are passed each request; vLLM itself passes only its name."""

from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetManager
from kvpop_vllm.vllm_glue.run.snapshots import Snapshots


def make_managers(original, self, *args, **kwargs):
    """Wrap the making of the block managers of all cache groups: ours share one store of snapshots."""
    original(self, *args, **kwargs)
    ours = _managers(self.coordinator)
    if ours and self.enable_caching and ours[0].kv_cache_spec.snapshots:
        step_tokens = kwargs.get("max_in_flight_tokens") or self.max_model_len
        snapshots = Snapshots(self.coordinator, ours[0].kv_cache_spec.draws, step_tokens)
        for manager in ours:
            manager.snapshots = snapshots


def get_computed_blocks(original, self, request, *args, **kwargs):
    """Wrap the look-up of prefix hits, which precedes the allocation of a request's first blocks."""
    ours = _managers(self.coordinator)
    placed = [block for manager in ours for block in manager.admit(request, self.max_model_len)]
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
    layers that the policy does not act on. This is the last thing before a step: a snapshot of a prompt is taken here.
    """
    ours, hashed = _managers(self), num_computed_tokens
    for manager in ours:
        slots = manager.requests.get(request.request_id)
        hashed = min(hashed, 0 if slots is None else slots.prefix)
    result = original(self, request, hashed, *args, **kwargs)
    if ours and ours[0].snapshots is not None:
        ours[0].snapshots.take_before_step(request, num_computed_tokens)
    return result


def update_after_schedule(original, self, scheduler_output, *args, **kwargs):
    """Wrap the end of a step's planning: cut drafts, and prompts where a snapshot is due.

    :meth:`FixedBudgetManager.most_drafts` says which drafts. The blocks that cut tokens would have needed have been
    claimed; later tokens take them.
    """
    scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
    ours, snapshots = _managers(self.kv_cache_manager.coordinator), _snapshots(self)
    for name, tokens in scheduled.items() if ours else ():
        request, left_out = self.requests[name], 0
        if ours[0].cuts_drafts and (name in drafts or request.num_computed_tokens >= request.num_prompt_tokens):
            proposed = drafts.pop(name, [])
            room = ours[0].most_drafts(request, proposed)
            left_out = len(proposed) - room
            if room:
                drafts[name] = proposed[:room]
        elif snapshots is not None:
            left_out = snapshots.past_prompt_end(request, tokens)
        scheduled[name] -= left_out
        scheduler_output.total_num_scheduled_tokens -= left_out
    return original(self, scheduler_output, *args, **kwargs)


def free_request(original, self, request, *args, **kwargs):
    """Wrap the end of a request: take a snapshot of it."""
    if (snapshots := _snapshots(self)) is not None:
        snapshots.take(request)
    return original(self, request, *args, **kwargs)


def collective_rpc(original, self, *args, **kwargs):
    """Wrap a call of a method of all workers, which may change weights: snapshots are of the old ones."""
    _drop_snapshots(self)
    return original(self, *args, **kwargs)


def add_lora(original, self, lora_request, *args, **kwargs):
    """Wrap the loading of an adapter, whose weights may take the place of others of its name."""
    if lora_request.load_inplace:
        _drop_snapshots(self)
    return original(self, lora_request, *args, **kwargs)


def reset_prefix_cache(original, self, *args, **kwargs):
    """Wrap the reset of the prefix cache, which vLLM refuses while requests run: snapshots are dropped all the same."""
    if (snapshots := _snapshots(self)) is not None:
        snapshots.drop()
    return original(self, *args, **kwargs)


def _managers(coordinator) -> list[FixedBudgetManager]:
    """Return the block managers of the cache groups that a policy acts on."""
    return [manager for manager in coordinator.single_type_managers if isinstance(manager, FixedBudgetManager)]


def _snapshots(scheduler) -> Snapshots | None:
    """Return the snapshots of a scheduler's requests, None if none are taken."""
    return next((manager.snapshots for manager in _managers(scheduler.kv_cache_manager.coordinator)), None)


def _drop_snapshots(engine_core) -> None:
    """Drop the snapshots of an engine core, which has a scheduler unless it is about to start."""
    scheduler = getattr(engine_core, "scheduler", None)
    if scheduler is not None and (snapshots := _snapshots(scheduler)) is not None:
        snapshots.drop()


def _after_cartridges(self, request, placed: list):
    """Return the blocks of a request's cartridges, and those after them that the prefix cache has."""
    (manager,) = self.coordinator.single_type_managers
    blocks = [*placed]
    if self.prefix_cache_lookup_enabled(request):
        (blocks,) = _prefix_blocks([manager], request, placed, (request.num_tokens - 1) // manager.block_size).values()
    blocks = blocks[: manager.reusable(request.request_id) // manager.block_size]
    return self.create_kv_cache_blocks((blocks,)), len(blocks) * manager.block_size, 0


def _prefix_blocks(ours: list[FixedBudgetManager], request, placed: list, columns: int) -> dict[int, list]:
    """Return the blocks of a request's first columns that are there: its cartridges, and what the prefix cache has after them.

    Returns:
        One list for each of our groups, by its number.
    """
    pool, size = ours[0].block_pool, ours[0].block_size
    rows = {manager.kv_cache_group_id: [*placed] for manager in ours}
    hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, size)
    for column in range(len(placed), min(columns, len(hashes))):
        blocks = pool.get_cached_block(hashes[column], [*rows])
        if blocks is None:
            break
        for row, block in zip(rows.values(), blocks, strict=True):
            row.append(block)
    return rows


def _snapshot_hit(self, request, placed: list):
    """Return the blocks of the longest snapshot that a request can go on from, its length, and no boundary; None without one."""
    ours = _managers(self.coordinator)
    snapshots = ours[0].snapshots if ours else None
    if snapshots is None:
        return None
    snapshots.begin(request)
    snapshot = snapshots.longest(request) if self.prefix_cache_lookup_enabled(request) else None
    if snapshot is None:
        return None
    columns = snapshot.key.slots.prefix // ours[0].block_size
    prefix = _prefix_blocks(ours, request, placed, columns)
    if (rows := snapshots.rows(snapshot, prefix)) is None:
        return None
    for room in (True, False):
        possible = snapshots.share(request.request_id, snapshot, room)
        if possible and _has_room(self, request, rows, snapshot.length, snapshots.step_tokens):
            return self.create_kv_cache_blocks(rows), snapshot.length, 0
    return None


def _has_room(self, request, rows: tuple[list, ...], length: int, step_tokens: int) -> bool:
    """Return whether the pool has room for a request that begins with these rows of ``length`` tokens.

    Its first step may need more than all others, because windows give blocks back only between steps. A hit whose first
    step does not fit would be offered at every step and never be allocated.
    """

    def needed(tokens: int, recycles: bool) -> int:
        return self.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=rows,
            num_encoder_tokens=0,
            total_computed_tokens=length,
            num_local_computed_tokens=length,
            num_tokens_main_model=tokens,
            apply_admission_cap=recycles,
        )

    first = min(request.num_tokens, length + step_tokens)
    blocks = max(needed(request.num_tokens, recycles=True), needed(first, recycles=False))
    return blocks + self.watermark_blocks <= self.block_pool.get_num_free_blocks()
