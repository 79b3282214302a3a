"""Numbers of requests' caches, counted by the scheduler: reports in responses, and the source of the metrics.

The scheduler knows length, prefix, budget and blocks of each request. How many tokens a head holds follows from these,
since a head's slots in use are its held tokens. Policies that evict while slots are free (``drops_early``) are an
exception: theirs are not counted.
"""

from dataclasses import dataclass, replace

from kvpop_vllm.cache.accounting import kept_tokens
from kvpop_vllm.policies import Policy
from kvpop_vllm.requests import REPORT, of_request, wants_report
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetManager, FixedBudgetSpec
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

STATS = "kvpop"
"""Key of ``SchedulerStats.kv_connector_stats`` under which the numbers travel to the front end."""


@dataclass(frozen=True)
class CacheUse:
    """Cache of one request at one time.

    Attributes:
        tokens: number that the cache has processed, accepted drafts included that are still staged.
        protected: p, tokens of the protected prefix among them.
        heads_by_tokens: number of KV heads by the number of tokens that they hold, None if it is not known.
        blocks: blocks that the request holds, shared ones included, in all cache groups of the policy's layers.
        bound: most blocks that it can come to hold.
        from_snapshot: tokens that it did not process because it went on from a snapshot.
    """

    tokens: int
    protected: int
    heads_by_tokens: dict[int, int] | None
    blocks: int
    bound: int
    from_snapshot: int

    @property
    def mean_kept(self) -> float | None:
        """Mean number of held tokens per KV head, or None if it is not known."""
        if self.heads_by_tokens is None:
            return None
        return sum(tokens * heads for tokens, heads in self.heads_by_tokens.items()) / sum(
            self.heads_by_tokens.values()
        )


def bytes_of(blocks: int, scheduler) -> int:
    """Return the bytes of blocks of the policy's layers on all ranks together, as many in each of their cache groups."""
    model, managers = engine_policy(scheduler.vllm_config).model, managers_of(scheduler)
    spec = managers[0].kv_cache_spec
    # ranks beyond the number of KV heads hold copies
    heads = max(model.num_kv_heads, scheduler.vllm_config.parallel_config.tensor_parallel_size)
    slot_bytes = model.num_layers * heads * spec.state_content_bytes
    return blocks * spec.block_size * slot_bytes // len(managers)


def dense_bytes_per_token(policy: Policy, spec: FixedBudgetSpec) -> int:
    """Return the bytes of a token's keys and values in all layers of the policy, which a dense cache holds at least."""
    return policy.model.num_layers * policy.model.num_kv_heads * 2 * spec.head_size * spec.kv_dtype.itemsize


def blocks_held(manager: FixedBudgetManager, request_id: str) -> int:
    """Return the number of blocks that a request holds. Null blocks of a compressed prompt do not count."""
    row = manager.req_to_blocks.get(request_id, ())
    if row and row[0].is_null:
        dropped = manager.kv_cache_spec.dropped(manager.requests[request_id])
        return len(row) - sum(last - first for first, last in dropped)
    return len(row)


def tokens_seen(request) -> int:
    """Return the tokens that a request's cache has processed, without those of steps that still run.

    Accepted drafts are among them, but for those after the end of the answer.
    """
    return max(0, min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens))


def most_blocks(scheduler, manager: FixedBudgetManager, request) -> int:
    """Return the most blocks that a request can come to hold."""
    length = manager.longest(request, scheduler.max_model_len)
    return len(managers_of(scheduler)) * manager.kv_cache_spec.blocks(length, manager.slots(request))


def use_of(scheduler, manager: FixedBudgetManager, request) -> CacheUse:
    """Return what a request holds now."""
    policy, spec, tokens = engine_policy(scheduler.vllm_config), manager.kv_cache_spec, tokens_seen(request)
    slots = manager.slots(request)
    prefix = min(slots.prefix, tokens)
    if spec.compression is not None and tokens >= slots.prefix:
        prefix = 0  # the prompt has been compressed
    heads_by_tokens = None
    if not policy.drops_early:
        heads = policy.model.num_layers * policy.model.num_kv_heads
        shares = None if spec.shares is None else spec.shares.all_heads(slots.budget, slots.window)
        heads_by_tokens = kept_tokens(heads, tokens, replace(policy.retention, budget=slots.budget), shares, prefix)
    blocks = len(managers_of(scheduler)) * blocks_held(manager, request.request_id)
    from_snapshot = 0 if manager.snapshots is None else manager.snapshots.lengths.get(request.request_id, 0)
    protected = prefix if spec.compression is None else 0
    return CacheUse(tokens, protected, heads_by_tokens, blocks, most_blocks(scheduler, manager, request), from_snapshot)


def kept_by_head(tokens: int, lowest: int, mean: float, highest: int) -> dict:
    """Return how many of so many tokens heads hold and have evicted, as reports have it."""
    return {
        "kept_tokens_per_head": {"min": lowest, "mean": mean, "max": highest},
        "evicted_tokens_per_head": {"min": tokens - highest, "mean": tokens - mean, "max": tokens - lowest},
    }


def report(scheduler, manager: FixedBudgetManager, request, use: CacheUse) -> dict:
    """Return the report of a request, as documented in ``docs/operating.md``."""
    policy, spec = engine_policy(scheduler.vllm_config), manager.kv_cache_spec
    slots = of_request(request.sampling_params, spec, request.num_prompt_tokens)
    by_head = dict.fromkeys(("kept_tokens_per_head", "evicted_tokens_per_head"))
    if use.heads_by_tokens is not None:
        by_head = kept_by_head(use.tokens, min(use.heads_by_tokens), use.mean_kept, max(use.heads_by_tokens))
        if policy.adaptive_head_budgets and use.tokens > spec.budget:
            # heads have divided their slots by votes, which only the workers know
            by_head = {name: numbers | {"min": None, "max": None} for name, numbers in by_head.items()}
    return by_head | {
        "policy": policy.name,
        "budget": slots.budget,
        "layers": policy.model.num_layers,
        "model_layers": policy.model.model_layers,
        "prompt_tokens": request.num_prompt_tokens,
        "cartridge_tokens": slots.made_slots,
        "protected_tokens": use.protected,
        "generated_tokens": request.num_output_tokens,
        "seen_tokens": use.tokens,
        "snapshot_tokens": use.from_snapshot,
        "blocks": use.blocks,
        "blocks_bound": use.bound,
        "bytes": bytes_of(use.blocks, scheduler),
        "dense_bytes": use.tokens * dense_bytes_per_token(policy, spec),
    }


def managers_of(scheduler) -> list[FixedBudgetManager]:
    """Return the block managers of the cache groups of a policy's layers, each of which holds as many blocks of a request."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in managers if isinstance(manager, FixedBudgetManager)]


def manager_of(scheduler) -> FixedBudgetManager | None:
    """Return the first of these block managers, None without a policy."""
    return next(iter(managers_of(scheduler)), None)


def free_request(original, self, request, *args, **kwargs):
    """Wrap the end of a request: keep the numbers of its cache, and report them if it asks."""
    if (manager := manager_of(self)) is None:
        return original(self, request, *args, **kwargs)
    asks = wants_report(request.sampling_params)
    use = use_of(self, manager, request) if asks or self.log_stats else None
    connector, *results = original(self, request, *args, **kwargs)
    if self.log_stats and use.tokens:
        manager.ended.append((use.tokens, use.mean_kept, use.protected))
    if asks:
        connector = {**(connector or {}), REPORT: report(self, manager, request, use)}
    return connector, *results


def make_stats(original, self, *args, **kwargs):
    """Wrap the making of a scheduler's statistics: add the numbers of its requests' caches."""
    stats, manager = original(self, *args, **kwargs), manager_of(self)
    if stats is None or manager is None:
        return stats
    policy, spec = engine_policy(self.vllm_config), manager.kv_cache_spec
    groups = len(managers_of(self))
    blocks = groups * sum(blocks_held(manager, request.request_id) for request in self.running)
    for request in self.running:
        if request.request_id not in manager.bounds:
            manager.bounds[request.request_id] = most_blocks(self, manager, request)
    numbers = {
        "blocks_held": blocks,
        "blocks_bound": sum(manager.bounds.values()),
        "bytes_held": bytes_of(blocks, self),
        "dense_bytes": sum(map(tokens_seen, self.running)) * dense_bytes_per_token(policy, spec),
        "ended": manager.ended,
        "snapshots": {} if manager.snapshots is None else manager.snapshots.take_counts(),
    }
    manager.ended = []
    stats.kv_connector_stats = {STATS: numbers}  # connectors are refused, so nobody else uses this field
    return stats
