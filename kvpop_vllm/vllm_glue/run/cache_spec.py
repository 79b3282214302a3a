"""Cache spec and block manager of a fixed-budget cache."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpop_vllm.cache.accounting import dropped_columns, request_blocks, worst_prompts
from kvpop_vllm.cache.divided_heads import divided_blocks
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.cache.ranks import Division
from kvpop_vllm.config import protected_tokens
from kvpop_vllm.requests import Compression, RequestSlots, of_request
from kvpop_vllm.rules.rounds import room_for_drafts
from kvpop_vllm.vllm_glue.run.draft_pauses import DraftPauses

if TYPE_CHECKING:
    from kvpop_vllm.vllm_glue.run.snapshots import Snapshots

logger = init_logger("vllm.kvpop_vllm")

TYPICAL = 1024
"""Prompt length, in tokens, of the logged concurrency; vLLM's own line is for the worst case."""


def longest_prefix(length: int, max_protect: bool | int, cartridges: Sequence[int], loads: bool) -> int:
    """Return the most tokens of a request that are protected, slots of cartridges included.

    Args:
        length: tokens of the request.
        max_protect: most tokens that a request may protect, True for whole prompts.
        cartridges: slots of each cartridge.
        loads: True if others may be loaded.
    """
    return length if loads else min(length, protected_tokens(max_protect, length) + sum(cartridges))


class FixedBudgetManager(SingleTypeKVCacheManager):
    """Block manager that claims the blocks of a request as it grows.

    It claims blocks of the protected prefix first, which vLLM's prefix cache shares, then those of state and
    tail, which are private and bounded.
    """

    def __init__(self, kv_cache_spec, *args, **kwargs):
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.requests: dict[str, RequestSlots] = {}
        self.final: dict[str, int] = {}  # largest length of each request
        self.pauses: dict[str, DraftPauses] = defaultdict(DraftPauses)
        self.cuts_drafts = bool(kv_cache_spec.drafts) and (current_platform.is_cpu() or bool(kv_cache_spec.rounds))
        self.largest_claims: dict[str, int] = {}  # most blocks of each request, 0 where all are claimed at once
        self.placed: set[str] = set()  # requests that begin with cartridges
        self.waits: set[str] = set()  # requests for whose cartridges there is no room now
        self.cartridges = None  # set by the engine, after the scheduler is made
        self.inspector = None  # likewise, where what requests hold is recorded
        self.bounds: dict[str, int] = {}  # most blocks of running requests, where metrics are on
        self.ended: list[tuple] = []  # numbers of requests that have ended, for the next metrics
        alone = not kwargs.get("needs_kv_cache_zeroing")  # no layers of other kinds take blocks
        self.snapshots: Snapshots | None = None  # set when the managers of all groups are made
        if alone and kv_cache_spec.protect and kv_cache_spec.compression is None:
            protected = protected_tokens(kv_cache_spec.protect, TYPICAL)
            length = TYPICAL + kv_cache_spec.budget
            fit = (self.block_pool.num_gpu_blocks - 1) / kv_cache_spec.blocks(length, kv_cache_spec.slots(protected))
            sizes = TYPICAL, min(protected, TYPICAL)
            logger.info("%.1f requests fit whose prompts have %d tokens, %d of them protected", fit, *sizes)

    def admit(self, request, max_model_len: int) -> list:
        """Keep the slots of a request. Where blocks are reserved, it is counted with its final length from the start.

        Args:
            request: the request.
            max_model_len: largest number of tokens of a request; one may ask for more.

        Returns:
            The blocks of its cartridges, with which it begins.
        """
        name, slots = request.request_id, self.slots(request)
        for request_id in self.placed - set(self.req_to_blocks) - {name}:
            self.forget_cartridges(request_id)  # a request that was not admitted must not hold what others wait for
        self.requests[name] = slots
        self.final[name] = self.longest(request, max_model_len)
        length = min(slots.prefix + slots.budget + 1, self.final[name])
        self.largest_claims[name] = 0 if self.kv_cache_spec.reserve else self.kv_cache_spec.blocks(length, slots)
        return self._place(name, slots) if slots.cartridges else []

    def longest(self, request, max_model_len: int) -> int:
        """Return the most tokens that a request may come to, drafts after its last token included."""
        return min(request.num_prompt_tokens + request.max_tokens + self.kv_cache_spec.drafts, max_model_len)

    def slots(self, request) -> RequestSlots:
        """Return the slots of a request, admitted or not."""
        return of_request(request.sampling_params, self.kv_cache_spec, request.num_prompt_tokens)

    def _place(self, request_id: str, slots: RequestSlots) -> list:
        """Return the blocks of a request's cartridges; if there is no room for them, have it wait."""
        blocks = self.cartridges.place(request_id, slots.cartridges)
        self.placed.add(request_id)
        (self.waits.add if blocks is None else self.waits.discard)(request_id)
        return blocks or []

    def forget_cartridges(self, request_id: str) -> None:
        """Release the copies of a request, if it begins with cartridges."""
        self.waits.discard(request_id)
        if request_id in self.placed:
            self.placed.discard(request_id)
            self.cartridges.release(request_id)

    def _blocks(self, request_id: str, num_tokens: int) -> int:
        length = max(self.final.get(request_id, 0), num_tokens) if self.kv_cache_spec.reserve else num_tokens
        return self.kv_cache_spec.blocks(length, self.requests.get(request_id))

    def get_num_blocks_to_allocate(self, request_id, num_tokens, new_computed_blocks, *args, **kwargs) -> int:
        """Return the blocks that a request needs from the pool: missing ones, and evictable ones of a hit."""
        if request_id in self.waits:
            return self.block_pool.num_gpu_blocks
        num_blocks = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        evictable = self._get_num_evictable_blocks(new_computed_blocks)
        copies = 0 if self.snapshots is None else self.snapshots.copied(request_id, self, new_computed_blocks)
        return max(0, self._blocks(request_id, num_tokens) - num_blocks) + evictable + copies

    def most_drafts(self, request, proposed: list[int]) -> int:
        """Return how many drafts of a request are verified in its next step.

        They end where a round of eviction is due. On a CPU they are left out for a while if they are refused. Call it for
        each step after the prompt.

        Args:
            request: the request.
            proposed: its drafts. vLLM proposes -1 for those of a request that has just been admitted.
        """
        spec, position, room = self.kv_cache_spec, request.num_computed_tokens, len(proposed)
        if spec.rounds:
            slots = self.requests[request.request_id]
            topk = slots.budget - spec.sinks - slots.window
            room = min(room, room_for_drafts(spec.rounds, topk, spec.shares is None, position))
        # with other drafts a seed gives other tokens
        if not current_platform.is_cpu() or request.sampling_params.seed is not None:
            return room
        real = 0 if -1 in proposed else room
        return 0 if self.pauses[request.request_id].leaves_out(position, real) else room

    def most_missing(self, request_id: str) -> int:
        """Return the most blocks that an admitted request may still ask for."""
        return max(0, self.largest_claims.get(request_id, 0) - len(self.req_to_blocks.get(request_id, ())))

    def add_local_computed_blocks(self, request_id, new_computed_blocks, *args, **kwargs) -> None:
        """Give a request the blocks of a prefix hit, or those of a snapshot."""
        snapshot = None if self.snapshots is None else self.snapshots.hit(new_computed_blocks)
        if snapshot is None:
            super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **kwargs)
        else:
            self.snapshots.adopt(request_id, self, snapshot, new_computed_blocks)

    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        """Allocate and return the blocks that a request needs in addition to those that it holds."""
        if self.snapshots is not None:
            self.snapshots.separate(request_id, self)
        request_blocks = self.req_to_blocks[request_id]
        missing = self._blocks(request_id, num_tokens) - len(request_blocks)
        if missing <= 0:
            return []
        blocks = self.block_pool.get_new_blocks(missing)
        request_blocks.extend(blocks)
        return blocks

    def reusable(self, request_id: str) -> int:
        """Return the number of tokens that a request may take from the prefix cache.

        These are all protected tokens but the last. The request computes the last one itself, in a step
        before the one in which its tail begins, because the blocks of a hit may be written by another request
        of the same step. Cartridges are not. Where prompts are compressed, they are the tokens before the queries
        that are stored.
        """
        compression, slots = self.kv_cache_spec.compression, self.requests[request_id]
        return max(slots.made_slots, slots.prefix - (1 if compression is None else compression.queries))

    def remove_skipped_blocks(self, request_id, processed_computed_tokens, num_prompt_tokens=None) -> None:
        """Free the blocks that a compressed prompt no longer needs; full ones stay in the prefix cache."""
        slots = self.requests.get(request_id)
        compresses = slots is not None and self.kv_cache_spec.compression is not None
        if compresses and 0 < slots.prefix <= processed_computed_tokens - self.kv_cache_spec.late:
            for first, last in self.kv_cache_spec.dropped(slots):
                self._remove_blocks_in_range(request_id, first, last)

    def allocate_external_computed_blocks(
        self, request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing=True
    ):
        """Refuse KV blocks from outside.

        Raises:
            RuntimeError: tokens were computed outside.
        """
        if num_external_computed_tokens > 0:
            raise RuntimeError("a fixed-budget cache cannot take in KV blocks from outside: remove the KV connector")

    def pop_blocks_for_free(self, request_id):
        """Forget a request and return its blocks."""
        for numbers in (self.requests, self.final, self.pauses, self.largest_claims, self.bounds):
            numbers.pop(request_id, None)
        self.forget_cartridges(request_id)
        if self.snapshots is not None:
            self.snapshots.forget(request_id)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
    ):
        """Look up prefix blocks as full attention does, whose code takes only a spec of its own."""
        dense = FullAttentionSpec(
            block_size=kv_cache_spec.block_size,
            num_kv_heads=kv_cache_spec.num_kv_heads,
            head_size=kv_cache_spec.head_size,
            dtype=kv_cache_spec.kv_dtype,
        )
        look = FullAttentionManager.find_longest_cache_hit
        return look(block_hashes, max_length, kv_cache_group_ids, block_pool, dense, *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class FixedBudgetSpec(AttentionSpec):
    """Cache spec of one layer.

    A request of n tokens, p of them protected, holds ``cdiv(min(n, p), N)`` prefix blocks and, once n exceeds
    p, ``state_blocks + cdiv(min(n - p, T), N)`` blocks of its own; T = B - s after a prefix, B without.
    Where heads have unequal shares, tails are counted by those of the rank that needs most, rounded up
    (:class:`kvpop_vllm.cache.ranks.Division`).

    Where prompts are compressed at their end, a request with a prompt of p tokens holds its prefix and, from
    the first stored query on, its state. At the prompt's end it holds a tail of B slots as well. After that
    it holds no prefix; the prefix's entries in its row of the block table are null blocks. Where slots are made of
    prompts, their blocks lie between prefix and state and are claimed with the state, which is given up with the
    prefix. Where heads divide their slots (at the end of a prompt longer than the budget), each head's last page may be
    filled in part.

    The inherited fields ``block_size`` and ``state_content_bytes`` are N, slots per block, and C, bytes per
    slot and head. ``dtype`` is uint8: a cache is bytes, and vLLM zeroes the blocks of other layers where specs have
    several dtypes, since scores and states are NaN to them.

    Attributes:
        budget: B of the server.
        sinks: s.
        kv_dtype: dtype of keys and values.
        state_floats: float32 values in the state of one head.
        drafts: most drafts of a step, 0 without speculative decoding.
        draft_query_bytes: bytes of the queries that are staged with a draft of one head.
        rounds: most tokens between two rounds of eviction, 0 for a policy without rounds.
        protect: value of ``--kv-protect-prompt``, True for whole prompts.
        max_budget: largest budget that a request may ask for.
        max_protect: most tokens that a request may ask to protect, True for whole prompts.
        window: w of the server.
        max_window: w of a request with the largest budget.
        compression: way in which prompts are compressed at their end, None if they are not.
        late: True if a prompt is compressed at the beginning of the step after its end.
        shares: how heads divide the slots of a request where they are unequal, else None.
        largest: B and w of requests, one of which may have the most slots under ``shares``, empty for the largest
            budget.
        reserve: True if a request claims all blocks that it will ever hold at once.
        inspect: True if what requests hold is recorded for the inspect page.
        snapshots: True if requests can go on from what others held when they ended.
        draws: True if scores are drawn with a request's seed.
        cartridges: slots of each cartridge with which the engine starts.
        loads: True if others may be loaded later.
    """

    dtype: torch.dtype = torch.uint8
    kv_dtype: torch.dtype
    budget: int
    sinks: int
    state_floats: int
    protect: bool | int
    max_budget: int
    max_protect: bool | int
    window: int = 1
    max_window: int = 1
    drafts: int = 0
    draft_query_bytes: int = 0
    rounds: int = 0
    compression: Compression | None = None
    late: bool = False
    shares: Division | None = None
    largest: tuple[tuple[int, int], ...] = ()
    reserve: bool = False
    inspect: bool = False
    snapshots: bool = False
    draws: bool = False
    cartridges: tuple[int, ...] = ()
    loads: bool = False

    @property
    def layout(self) -> PageLayout:
        """Page layout of a layer."""
        sizes = self.num_kv_heads, self.head_size, self.kv_dtype, self.block_size, self.state_floats
        return PageLayout(*sizes, self.drafts, self.draft_query_bytes)

    @functools.cached_property
    def state_blocks(self) -> int:
        """Blocks of state and of staged drafts per request."""
        return self.layout.state_blocks

    def slots(self, prefix: int = 0, budget: int | None = None, window: int | None = None) -> RequestSlots:
        """Return the slots of a request with these numbers, by default the server's."""
        return RequestSlots(prefix, 0, budget or self.budget, window or self.window)

    def blocks(self, length: int, slots: RequestSlots | None = None) -> int:
        """Return the number of blocks of a request of ``length`` tokens, entries of a dropped prefix included.

        ``slots`` are its own, by default those of an unprotected request with the server's numbers.
        """
        sizes, slots = (self.sinks, self.block_size, self.state_blocks, self.num_kv_heads), slots or self.slots()
        counts = self.shares and self.shares.block_counts(slots.budget, slots.window)
        return request_blocks(length, slots, sizes, counts, self.compression)

    def most_tail_blocks(self, length: int) -> int:
        """Return the most blocks of state and tail that a request of ``length`` tokens can hold."""
        if self.compression is not None and self.compression.adaptive_head_budgets:
            return self.state_blocks + divided_blocks(self.num_kv_heads, self.max_budget, self.block_size)
        return self.blocks(length, self.slots(budget=self.max_budget))

    def dropped(self, slots: RequestSlots) -> list[tuple[int, int]]:
        """Return the columns of a request's row that it no longer needs after the end of its prompt, first and last + 1."""
        return dropped_columns(slots, self.block_size, self.state_blocks, self.compression)

    def most_blocks(self, length: int) -> int:
        """Return the most blocks that a request of ``length`` tokens can hold, without those of cartridges.

        The prompt may have any length up to ``length``, and the request may ask for anything that is allowed.
        """
        longest = min(length, protected_tokens(self.max_protect, length))  # a prompt may have this length
        prompts = worst_prompts(longest, length, self.block_size)
        largest = self.largest or ((self.max_budget, self.max_window),)
        largest_count = max(self.blocks(length, self.slots(prompt, *sizes)) for prompt in prompts for sizes in largest)
        # a smaller budget may round the slots of each head up
        rounded = self.shares is not None and not self.shares.one_budget
        # a smaller window may divide the slots of a short prompt such that both parts have a block filled in part
        return largest_count + rounded + (self.compression is not None and self.compression.makes_slots)

    def longest_prefix(self, length: int) -> int:
        """Return the most tokens of a request of ``length`` tokens that are protected, slots of cartridges included."""
        return longest_prefix(length, self.max_protect, self.cartridges, self.loads)

    @property
    def may_have_cartridges(self) -> bool:
        """Return whether a request may begin with cartridges."""
        return self.loads or bool(self.cartridges)

    def set_aside(self, cartridges: Sequence[int]) -> int:
        """Return the blocks of cartridges with so many slots, and of the copies that one request may need.

        The first cartridge of a request needs no copy.
        """
        return sum(cartridges) // self.block_size * (1 if len(cartridges) == 1 else 2)

    def max_memory_usage_bytes(self, vllm_config) -> int:
        """Return the bytes of the cartridges, and of a request's worst case at max-model-len."""
        blocks = self.set_aside(self.cartridges) + self.most_blocks(vllm_config.model_config.max_model_len)
        return blocks * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config, max_len: int) -> int:
        """Return the width of a request's row in the block table."""
        # Model runner V1 computes a slot mapping for every position from this row, without bounds checks. The
        # mapping is not used here, but with a row narrower than the positions the runner would read the next
        # row.
        cartridge_slots = max_len if self.loads else sum(self.cartridges)
        return max(cdiv(max_len, self.block_size), self.most_blocks(max_len) + cdiv(cartridge_slots, self.block_size))

    @property
    def prefix_cacheable(self) -> bool:
        """Return whether any request may have blocks that can be shared."""
        return self.snapshots or self.longest_prefix(1) > 0


def register() -> None:
    """Register the spec and its block manager with vLLM."""
    KVCacheSpecRegistry._ensure_registered()  # it fills itself only while it is empty, or would hide the built-in specs
    KVCacheSpecRegistry.register(FixedBudgetSpec, FixedBudgetManager)
