"""How vLLM counts and hands out the blocks of a fixed-budget cache. Importing this module registers it: the engine core
does so when it unpickles a worker's spec."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from kvpop_vllm.kernels.regions import Shares


class FixedBudgetManager(SingleTypeKVCacheManager):
    """Claims blocks as a sequence grows, up to its budget; nothing is shared between requests."""

    def get_num_blocks_to_allocate(
        self,
        request_id,
        num_tokens,
        new_computed_blocks,
        total_computed_tokens,
        num_local_computed_tokens,
        num_tokens_main_model,
        apply_admission_cap=False,
        prefill_end=0,
    ) -> int:
        held = len(self.req_to_blocks.get(request_id, ()))
        return max(0, self.kv_cache_spec.blocks(num_tokens) - held)

    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        held = self.req_to_blocks[request_id]
        missing = self.kv_cache_spec.blocks(num_tokens) - len(held)
        if missing <= 0:
            return []
        blocks = self.block_pool.get_new_blocks(missing)
        held.extend(blocks)
        return blocks

    def allocate_external_computed_blocks(
        self, request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing=True
    ):
        if num_external_computed_tokens > 0:
            raise RuntimeError("a fixed-budget cache cannot take in KV blocks from outside: remove the KV connector")

    def add_local_computed_blocks(
        self, request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
    ):
        if new_computed_blocks:
            raise RuntimeError("a fixed-budget cache shares no prefixes: start with --no-enable-prefix-caching")

    def cache_blocks(self, request, num_tokens, retention_interval=None, *, replay_boundaries=()):
        return

    @classmethod
    def find_longest_cache_hit(cls, block_hashes, max_length, kv_cache_group_ids, *args, **kwargs):
        return tuple([] for _ in kv_cache_group_ids), 0


# The registry fills itself only while it is empty: registering first would hide the built-in specs.
KVCacheSpecRegistry._ensure_registered()


@register_kv_cache_spec(manager_class=FixedBudgetManager)
@dataclass(frozen=True, kw_only=True)
class FixedBudgetSpec(AttentionSpec):
    """A layer whose request holds ``state_blocks + cdiv(min(length, budget), block_size)`` blocks or, where heads have
    unequal ``shares``, the same number on average, rounded up (:class:`kvpop_vllm.kernels.regions.Shares`).

    ``block_size`` is N, slots per block; ``state_content_bytes`` is C, bytes per slot and head.
    """

    budget: int
    state_blocks: int
    shares: Shares | None = None

    def blocks(self, length: int) -> int:
        """Return the blocks of a request of ``length`` tokens; 0 for an empty one."""
        if length == 0:
            return 0
        if self.shares is not None:
            return self.shares.blocks(self.state_blocks, self.block_size, length)
        return self.state_blocks + cdiv(min(length, self.budget), self.block_size)

    def max_memory_usage_bytes(self, vllm_config) -> int:
        return self.blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config, max_len: int) -> int:
        # Model runner V1 computes a slot mapping for every position from this row, without bounds checks; the mapping is
        # not used here, but a row narrower than the positions would make it read a neighbour's.
        return max(cdiv(max_len, self.block_size), self.blocks(max_len))

    @property
    def prefix_cacheable(self) -> bool:
        return False
