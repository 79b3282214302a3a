"""How vLLM counts and hands out the blocks of a fixed-budget cache. Importing this module registers it: the engine core
does so when it unpickles a worker's spec."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from kvpop_vllm.cache.accounting import worst_prompts
from kvpop_vllm.config import protected_tokens
from kvpop_vllm.kernels.regions import Shares, divided_blocks
from kvpop_vllm.requests import of_params
from kvpop_vllm.vllm_glue import manager_requests

logger = init_logger("vllm.kvpop_vllm")

TYPICAL = 1024
"""Tokens of a prompt, for what is said of concurrency beside vLLM's own line, which is of the worst case."""


class FixedBudgetManager(SingleTypeKVCacheManager):
    """Claims the blocks of a request as it grows: of its protected prefix, which vLLM's prefix cache shares, then of its state
    and tail, which are its own and bounded."""

    def __init__(self, kv_cache_spec, *args, **kwargs):
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.requests: dict[str, tuple[int, int]] = {}  # p and B of each
        manager_requests.apply()
        if kv_cache_spec.protect and not kv_cache_spec.votes:
            protected = protected_tokens(kv_cache_spec.protect, TYPICAL)
            length = TYPICAL + kv_cache_spec.budget
            fit = (self.block_pool.num_gpu_blocks - 1) / kv_cache_spec.blocks(length, protected)
            logger.info("%.1f requests fit whose prompts have %d tokens, %d of them protected", fit, TYPICAL, protected)

    def admit(self, request) -> None:
        """Remember what a request asked for, or else gets."""
        spec, asked = self.kv_cache_spec, of_params(request.sampling_params)
        own = protected_tokens(spec.protect, request.num_prompt_tokens), spec.budget
        self.requests[request.request_id] = own if asked is None else (asked.protected, asked.budget)

    def protected(self, request_id: str) -> int:
        """Return p of a request, in tokens."""
        return self.requests.get(request_id, (0, 0))[0]

    def _blocks(self, request_id: str, num_tokens: int) -> int:
        return self.kv_cache_spec.blocks(num_tokens, *self.requests.get(request_id, (0, None)))

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
        held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        evictable = self._get_num_evictable_blocks(new_computed_blocks)
        return max(0, self._blocks(request_id, num_tokens) - held) + evictable

    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        held = self.req_to_blocks[request_id]
        missing = self._blocks(request_id, num_tokens) - len(held)
        if missing <= 0:
            return []
        blocks = self.block_pool.get_new_blocks(missing)
        held.extend(blocks)
        return blocks

    def reusable(self, request_id: str) -> int:
        """Return the tokens of a request's prompt that it may take from the prefix cache: all that are protected but the last, which it
        computes itself, in an earlier step than that in which the tail begins (the blocks of a hit may be those of a request of the
        same step); where prompts are compressed, those before the queries that vote."""
        return max(0, self.protected(request_id) - max(1, self.kv_cache_spec.votes))

    def remove_skipped_blocks(self, request_id, processed_computed_tokens, num_prompt_tokens=None) -> None:
        """Give up the prefix of a prompt that has been compressed; full blocks of it stay in the prefix cache."""
        prompt = self.protected(request_id)
        if self.kv_cache_spec.votes and 0 < prompt <= processed_computed_tokens:
            self._remove_blocks_in_range(request_id, 0, cdiv(prompt, self.block_size))

    def allocate_external_computed_blocks(
        self, request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing=True
    ):
        if num_external_computed_tokens > 0:
            raise RuntimeError("a fixed-budget cache cannot take in KV blocks from outside: remove the KV connector")

    def cache_blocks(self, request, num_tokens, retention_interval=None, *, replay_boundaries=()):
        """Hash the full blocks of the protected prefix, as far as it has been scheduled."""
        prefix = min(num_tokens, self.protected(request.request_id))
        super().cache_blocks(request, prefix, retention_interval, replay_boundaries=replay_boundaries)

    def pop_blocks_for_free(self, request_id):
        self.requests.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
    ):
        """Look prefix blocks up as full attention does, whose code takes a spec of its own only."""
        dense = FullAttentionSpec(
            block_size=kv_cache_spec.block_size,
            num_kv_heads=kv_cache_spec.num_kv_heads,
            head_size=kv_cache_spec.head_size,
            dtype=kv_cache_spec.dtype,
        )
        look = FullAttentionManager.find_longest_cache_hit
        return look(block_hashes, max_length, kv_cache_group_ids, block_pool, dense, *args, **kwargs)


# The registry fills itself only while it is empty: registering first would hide the built-in specs.
KVCacheSpecRegistry._ensure_registered()


@register_kv_cache_spec(manager_class=FixedBudgetManager)
@dataclass(frozen=True, kw_only=True)
class FixedBudgetSpec(AttentionSpec):
    """A layer whose request of n tokens, p of them protected, holds ``cdiv(min(n, p), N)`` prefix blocks and, once n exceeds p,
    ``state_blocks + cdiv(min(n - p, T), N)`` blocks of its own; T = B - s behind a prefix, B without. Where heads have
    unequal ``shares``, tails are counted by these, rounded up (:class:`kvpop_vllm.kernels.regions.Shares`).

    ``block_size`` is N, slots per block; ``state_content_bytes`` is C, bytes per slot and head; ``protect`` is what
    ``--kv-protect-prompt`` says, True for whole prompts; ``max_budget`` and ``max_protect`` bound what a request may ask for.

    Where prompts are compressed at their end, ``votes`` is the number of last queries that vote, and a request of a prompt of p tokens
    holds its prefix and, from the first of these on, its state; at the prompt's end a tail with B slots as well; from then on no prefix,
    whose entries in its row of the block table are null blocks. Where its heads ``divide`` their slots (at the end of a prompt longer
    than the budget), each head's last page may be filled in part.
    """

    budget: int
    sinks: int
    state_blocks: int
    protect: bool | int
    max_budget: int
    max_protect: bool | int
    votes: int = 0
    divides: bool = False
    shares: Shares | None = None

    def blocks(self, length: int, protected: int = 0, budget: int | None = None) -> int:
        """Return the blocks of a request of ``length`` tokens, the first ``protected`` of them never evicted, with this budget or
        the server's. Entries of a dropped prefix are counted among them."""
        prefix, own = cdiv(min(length, protected), self.block_size), length - protected
        sinks = self.sinks if protected else 0
        if self.votes and protected:
            if length <= protected - self.votes:
                return prefix
            if self.divides and length >= protected > self.budget:
                tail = divided_blocks(self.num_kv_heads, self.budget, self.block_size)
                return cdiv(protected, self.block_size) + self.state_blocks + tail
            prefix, own, sinks = cdiv(protected, self.block_size), length if length >= protected else 0, 0
        elif own <= 0:
            return prefix
        if self.shares is not None:
            return prefix + self.shares.blocks(self.state_blocks, self.block_size, own)
        return prefix + self.state_blocks + cdiv(min(own, (budget or self.budget) - sinks), self.block_size)

    def most_blocks(self, length: int) -> int:
        """Return the most blocks that a request of ``length`` tokens can hold, whatever its prompt and what it asks for."""
        if self.votes:  # at the end of a prompt that is all of it
            return self.blocks(length, length, self.max_budget)
        longest = protected_tokens(self.max_protect, length)  # a prompt may be all of it
        prompts = worst_prompts(longest, length, self.block_size)
        return max(self.blocks(length, protected, self.max_budget) for protected in prompts)

    def max_memory_usage_bytes(self, vllm_config) -> int:
        return self.most_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config, max_len: int) -> int:
        # Model runner V1 computes a slot mapping for every position from this row, without bounds checks; the mapping is
        # not used here, but a row narrower than the positions would make it read a neighbour's.
        return max(cdiv(max_len, self.block_size), self.most_blocks(max_len))

    @property
    def prefix_cacheable(self) -> bool:
        return bool(self.max_protect)
