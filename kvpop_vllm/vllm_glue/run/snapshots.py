"""Snapshots: blocks that requests held at their end, and copies of those in or after their prompt, from which others go on.

What a request holds after n tokens follows from these tokens and from its numbers alone. So its blocks of state and
tail are an exact hit for every prompt that begins with the same tokens, as prefix blocks are. They stay in the pool as
blocks of vLLM's prefix cache do, until the pool needs them. A request that goes on from a snapshot writes to copies of
them.

An answer that comes back in other tokens, without its thinking for example, does not match what was held at its end.
What was held at its prompt's end does, or before the prompt's ending (:mod:`prompt_endings`).

Layers with windows or chunks have block managers of vLLM's, whose blocks are never written again once they are full. A
snapshot shares those that the next token needs, and vLLM copies the last one where it is not full.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpop_vllm.requests import RequestSlots, protects_prompt
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetManager
from kvpop_vllm.vllm_glue.run.prompt_endings import PromptEndings

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


_NAME = make_block_hash_with_group_id(BlockHash(b"kvpop snapshot"), 0)
"""Hash of all blocks of snapshots that have no other, by which nothing is looked up."""


class Key(NamedTuple):
    """Condition of a hit: what a request and a snapshot have in common, besides the tokens after the last hashed ones.

    Attributes:
        digest: vLLM's hash of the first tokens, which covers their salt and adapter, empty for none.
        hashed: number of these tokens.
        slots: numbers of the request.
        seed: seed of its sampling where scores are drawn and the request names no other seed for them, else None.
        adapter: name, path and number of its LoRA adapter, or None.
        salt: salt of its prefix cache, or None.
    """

    digest: bytes
    hashed: int
    slots: RequestSlots
    seed: int | None
    adapter: tuple[str, str, int] | None
    salt: str | None


class Columns(NamedTuple):
    """Columns of a request's row in one cache group, as a snapshot has them.

    Attributes:
        first: first one that the snapshot holds. Before it are prefix blocks, which the prefix cache has, or blocks
            that are no longer needed.
        written: first one that the next token may write to.
        end: the last one + 1.
    """

    first: int
    written: int
    end: int


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Blocks of a request at its end, at its prompt's end or before the last part of its prompt.

    Attributes:
        key: see :class:`Key`.
        length: n, number of tokens that they have seen.
        tokens: the tokens after the hashed ones.
        groups: blocks of each cache group, from its first column on.
    """

    key: Key
    length: int
    tokens: tuple[int, ...]
    groups: tuple[tuple[KVCacheBlock, ...], ...]

    @property
    def blocks(self) -> Iterator[KVCacheBlock]:
        """All blocks."""
        return (block for group in self.groups for block in group)


class Snapshots:
    """Snapshots of an engine.

    Args:
        coordinator: coordinator of the block managers of all cache groups, which share one pool.
        draws: True if scores are drawn with a request's seed.
        step_tokens: most tokens of a request in the steps that run or wait at once.

    Attributes:
        lengths: tokens of the snapshot of each running request that went on from one, by the request's name.
        counts: numbers of snapshots that were taken, of requests that went on from one, and of snapshots of which the
            pool took blocks back, since :meth:`take_counts`.
    """

    def __init__(self, coordinator: KVCacheCoordinator, draws: bool, step_tokens: int):
        self.coordinator, self.draws, self.step_tokens = coordinator, draws, step_tokens
        self.managers = coordinator.single_type_managers
        self.manager = next(manager for manager in self.managers if isinstance(manager, FixedBudgetManager))
        self.lengths: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self._by_key: dict[Key, dict[int, dict[tuple[int, ...], Snapshot]]] = {}  # by number of tokens, by tokens
        self._by_block: dict[int, list[Snapshot]] = {}
        self._digests: Counter[bytes] = Counter()
        self._hashed: Counter[int] = Counter()  # numbers of hashed tokens
        self._endings = PromptEndings(self._unit)
        self._requests: dict[str, Request] = {}
        self._prompt_ends: dict[str, int] = {}  # tokens of each request's prompt, without an ending that is left out
        self._adopted: dict[tuple[str, int], Snapshot] = {}
        self._movers: set[str] = set()
        self._outdated: set[str] = set()

    def take_counts(self) -> dict[str, int]:
        """Return the counts ``taken``, ``hits`` and ``lost``, which begin at zero again."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def begin(self, request: Request) -> None:
        """Remember a request that is about to begin."""
        if self._requests.get(request.request_id) is not request:
            self._requests[request.request_id] = request
            self._endings.learn(request)
            end = request.num_prompt_tokens - self._endings.length(request)
            after_prefix = end > self.manager.requests[request.request_id].prefix
            self._prompt_ends[request.request_id] = end if after_prefix else request.num_prompt_tokens

    def take(self, request: Request) -> None:
        """Take a snapshot of a request that ends now and still has its blocks, unless one like it is there.

        A token that a step in flight computes counts, since the step runs before any that could read it. Accepted
        drafts count as well: they are staged in the blocks of state, and enter the cache in the first step of a request
        that goes on from there. Those after the end of the answer do not.
        """
        self._endings.remember(request)
        length = request.num_computed_tokens
        if self.manager.kv_cache_spec.drafts:
            length = min(length, request.num_tokens)
        if length <= request.num_tokens and self._fits(request, length):
            self._take(request, length, self._groups(request, length))

    def past_prompt_end(self, request: Request, scheduled: int) -> int:
        """Return how many tokens of a request's next step come after a snapshot of its prompt that is due within the step.

        Without an ending that later turns leave out, a prompt ends where a step ends, and none is due within it.
        """
        end, computed = self._prompt_ends.get(request.request_id, 0), request.num_computed_tokens
        if end == request.num_prompt_tokens or not computed < end < computed + scheduled:
            return 0
        return computed + scheduled - end if self._fits(request, end) and self._has_room(request, end) else 0

    def take_before_step(self, request: Request, computed: int) -> None:
        """Take a snapshot of a request whose next step begins at its prompt's end, or reads the rest of a long prompt.

        The same prompt, for another answer, goes on before that rest. Copied is what the request writes to, if the pool
        has room.

        Args:
            request: a request that holds all blocks that the step needs.
            computed: tokens of the request after the step.
        """
        name, length = request.request_id, request.num_computed_tokens
        if name not in self._prompt_ends or request.is_finished():
            return  # with asynchronous scheduling it may have ended in the step before
        end = self._prompt_ends[name]
        reads_rest = 0 < length < end <= computed
        if not (length == end or reads_rest) or not self._fits(request, length) or not self._has_room(request, length):
            return
        groups = [[*group] for group in self._groups(request, length)]
        columns = self._columns(self.manager.requests[name], length)
        for manager, part, group in zip(self.managers, columns, groups, strict=True):
            sources = group[part.written - part.first :]
            group[part.written - part.first :] = self._copies(manager, sources)
            manager.block_pool.touch(sources)  # vLLM gives both back after the step that copies them
        self._take(request, length, tuple(map(tuple, groups)))

    def drop(self) -> None:
        """Forget all snapshots, and take none of the requests that hold blocks now."""
        for snapshot in self.all():
            self._remove(snapshot)
            self.counts["lost"] += 1
        self._endings = PromptEndings(self._unit)  # it holds tokens of prompts and answers
        self._outdated.update(self.manager.req_to_blocks)

    def all(self) -> list[Snapshot]:
        """Return all snapshots."""
        return [
            snapshot
            for of_lengths in self._by_key.values()
            for of_tokens in of_lengths.values()
            for snapshot in of_tokens.values()
        ]

    def _copies(self, manager: SingleTypeKVCacheManager, sources: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return new blocks, to which those of a group are copied before the next step."""
        copies = manager.block_pool.get_new_blocks(len(sources))
        manager._pending_cow_copies.extend(zip(sources, copies, strict=True))
        return copies

    def _columns(self, slots: RequestSlots, length: int) -> list[Columns]:
        """Return the columns that a snapshot of ``length`` tokens holds in each group."""
        columns = []
        for i, manager in enumerate(self.managers):
            size = manager.block_size
            if isinstance(manager, FixedBudgetManager):
                cached = self.coordinator.get_num_cacheable_tokens(slots.prefix, i)
                part = Columns(cached // size, slots.prefix // size, manager.kv_cache_spec.blocks(length, slots))
            else:
                part = Columns(manager.get_num_skipped_tokens(length) // size, length // size, cdiv(length, size))
            columns.append(part)
        return columns

    def _groups(self, request: Request, length: int) -> tuple[tuple[KVCacheBlock, ...], ...]:
        """Return the blocks that a snapshot of a request with ``length`` tokens holds in each group."""
        name = request.request_id
        columns = self._columns(self.manager.requests[name], length)
        rows = (manager.req_to_blocks.get(name, ()) for manager in self.managers)
        return tuple(tuple(row[part.first : part.end]) for row, part in zip(rows, columns, strict=True))

    def _has_room(self, request: Request, length: int) -> bool:
        """Return whether the pool has room for copies for a snapshot of a request, and none is preempted for them."""
        columns = self._columns(self.manager.requests[request.request_id], length)
        copied = sum(part.end - part.written for part in columns)
        return copied + self._most_missing() <= self.manager.block_pool.get_num_free_blocks()

    def _most_missing(self) -> int:
        """Return the most blocks that all requests together may still ask for."""
        missing = 0
        for name in self.manager.req_to_blocks:
            if (request := self._requests.get(name)) is None:
                continue
            in_flight = max(request.num_tokens - request.num_computed_tokens, 2 + self.manager.kv_cache_spec.drafts)
            for manager in self.managers:
                if isinstance(manager, FixedBudgetManager):
                    missing += manager.most_missing(name)
                    continue
                if isinstance(manager.kv_cache_spec, FullAttentionSpec):  # of layers that draft, ahead of the text
                    bound = cdiv(self.manager.final[name] + self.manager.kv_cache_spec.drafts, manager.block_size)
                else:
                    bound = _most_blocks(manager.kv_cache_spec, in_flight, self.manager.final[name])
                skipped = manager.get_num_skipped_tokens(request.num_computed_tokens) // manager.block_size
                missing += max(0, bound - max(0, len(manager.req_to_blocks.get(name, ())) - skipped))
        return missing

    def _place(self, request: Request, length: int) -> tuple[Key, tuple[int, ...]]:
        """Return the key of a request of ``length`` tokens, and the tokens after the hashed ones."""
        slots = self.manager.requests[request.request_id]
        key = self._key(request, slots, min(length // self._unit, len(request.block_hashes)))
        return key, tuple(request.all_token_ids[key.hashed : length])

    def _fits(self, request: Request, length: int) -> bool:
        """Return whether a snapshot of a request with ``length`` tokens can be of use, and there is none like it."""
        slots = self.manager.requests.get(request.request_id)
        if slots is None or not slots.prefix < length:
            return False  # the tail has not begun
        if protects_prompt(request.sampling_params, self.manager.kv_cache_spec):
            return False  # a longer prompt would be protected further
        if request.mm_features or request.prompt_embeds is not None or request.request_id in self._outdated:
            return False
        key, tokens = self._place(request, length)
        return tokens not in self._by_key.get(key, {}).get(len(tokens), {})

    def _take(self, request: Request, length: int, groups: tuple[tuple[KVCacheBlock, ...], ...]) -> None:
        """Remember blocks as a snapshot of a request with ``length`` tokens."""
        key, tokens = self._place(request, length)
        self.put(Snapshot(key, length, tokens, groups))
        self.counts["taken"] += 1

    def put(self, snapshot: Snapshot) -> None:
        """Remember a snapshot, whose blocks stay until the pool needs them.

        Its key and tokens and the bytes of its blocks are all there is to it: a store that holds these can write the
        bytes to new blocks later and put a snapshot of them.
        """
        key, tokens, pool = snapshot.key, snapshot.tokens, self.manager.block_pool
        blocks = [*snapshot.blocks]
        for block in blocks:
            if block.block_hash is None:  # freed blocks with a hash are the last to be used again
                block.set_block_hash(_NAME, num_tokens=snapshot.length)
            self._by_block.setdefault(block.block_id, []).append(snapshot)
        pool.touch(blocks)
        pool.unpin_blocks(blocks, self._lose)
        self._by_key.setdefault(key, {}).setdefault(len(tokens), {})[tokens] = snapshot
        self._digests[key.digest] += 1
        self._hashed[key.hashed] += 1

    def _lose(self, block: KVCacheBlock) -> None:
        """Forget the snapshots of a block that the pool uses again."""
        for snapshot in [*self._by_block.get(block.block_id, ())]:
            self._remove(snapshot)
            self.counts["lost"] += 1

    def _remove(self, snapshot: Snapshot) -> None:
        """Forget a snapshot."""
        for block in snapshot.blocks:
            sharing = self._by_block[block.block_id]
            sharing.remove(snapshot)
            if not sharing:
                del self._by_block[block.block_id]
        of_lengths, length = self._by_key[snapshot.key], len(snapshot.tokens)
        del of_lengths[length][snapshot.tokens]
        if not of_lengths[length]:
            del of_lengths[length]
        if not of_lengths:
            del self._by_key[snapshot.key]
        for counts, counted in ((self._digests, snapshot.key.digest), (self._hashed, snapshot.key.hashed)):
            counts[counted] -= 1
            if not counts[counted]:
                del counts[counted]

    def longest(self, request: Request) -> Snapshot | None:
        """Return the longest snapshot that a waiting request can go on from, None if there is none.

        One that a copy of this step writes cannot be copied yet.
        """
        if not self._by_key or request.mm_features or request.prompt_embeds is not None:
            return None
        slots = self.manager.requests[request.request_id]
        written = {copy.block_id for manager in self.managers for _, copy in manager._pending_cow_copies}
        # vLLM asks in every step for the request at the head of its queue, whose prompt may have thousands of hashes
        for hashes in sorted((hashed // self._unit for hashed in self._hashed), reverse=True):
            if hashes <= len(request.block_hashes) and _digest(request, hashes) in self._digests:
                for snapshot in self._matches(request, self._key(request, slots, hashes)):
                    if not any(block.block_id in written for block in snapshot.blocks):
                        return snapshot
        return None

    def rows(
        self, snapshot: Snapshot, prefix: Mapping[int, Sequence[KVCacheBlock]]
    ) -> tuple[list[KVCacheBlock], ...] | None:
        """Return the rows of a request that goes on from a snapshot, one of each group; None if a prefix block is missing.

        Args:
            snapshot: the snapshot.
            prefix: by number of the group, the request's first blocks that are there, of each group that the policy
                acts on.
        """
        rows = []
        for i, part in enumerate(self._columns(snapshot.key.slots, snapshot.length)):
            before = [*prefix[i][: part.first]] if i in prefix else [self.manager.block_pool.null_block] * part.first
            if len(before) < part.first:
                return None
            rows.append([*before, *snapshot.groups[i]])
        return tuple(rows)

    def share(self, request_id: str, snapshot: Snapshot, room: bool) -> bool:
        """Decide whether a request goes on from copies of a snapshot or from its blocks, which no other can have then.

        Args:
            request_id: name of the request.
            snapshot: the snapshot.
            room: True if the pool has room for copies.

        Returns:
            False if neither is possible.
        """
        self._movers.discard(request_id)
        if not room:
            self._movers.add(request_id)
        written = (
            block
            for manager in self.managers
            if isinstance(manager, FixedBudgetManager)
            for block in self._written(snapshot, manager)
        )
        return room or all(block.ref_cnt == 0 for block in written)

    def _written(self, snapshot: Snapshot, manager: FixedBudgetManager) -> tuple[KVCacheBlock, ...]:
        """Return the blocks of a snapshot in a group to which a request that goes on from it writes."""
        part = self._columns(snapshot.key.slots, snapshot.length)[manager.kv_cache_group_id]
        return snapshot.groups[manager.kv_cache_group_id][part.written - part.first :]

    def copied(self, request_id: str, manager: FixedBudgetManager, computed: Sequence[KVCacheBlock]) -> int:
        """Return the number of blocks of a group that copies need if a request's computed blocks end with a snapshot."""
        snapshot = self.hit(computed)
        return 0 if snapshot is None or request_id in self._movers else len(self._written(snapshot, manager))

    def forget(self, request_id: str) -> None:
        """Forget a request that ends or is preempted."""
        self._movers.discard(request_id)
        self._outdated.discard(request_id)
        self._requests.pop(request_id, None)
        self._prompt_ends.pop(request_id, None)
        self.lengths.pop(request_id, None)

    def hit(self, computed: Sequence[KVCacheBlock]) -> Snapshot | None:
        """Return the snapshot that a request's computed blocks end with, None if they are of a prefix alone."""
        return self._by_block.get(computed[-1].block_id, [None])[0] if computed else None

    def adopt(
        self, request_id: str, manager: FixedBudgetManager, snapshot: Snapshot, computed: Sequence[KVCacheBlock]
    ) -> None:
        """Give a request the blocks of a snapshot in one group, until :meth:`separate`.

        Args:
            request_id: name of a request that holds no blocks of the group.
            manager: block manager of the group.
            snapshot: the snapshot.
            computed: the prefix blocks, followed by those of the snapshot.
        """
        manager.block_pool.touch(computed)
        manager.req_to_blocks[request_id].extend(computed)
        manager.num_cached_block[request_id] = snapshot.key.slots.prefix // manager.block_size
        self._adopted[request_id, manager.kv_cache_group_id] = snapshot
        if manager is self.manager:
            self.lengths[request_id] = snapshot.length
            self.counts["hits"] += 1

    def separate(self, request_id: str, manager: FixedBudgetManager) -> None:
        """Have a request that was given blocks of a snapshot go on from copies, or have them for itself (:meth:`share`).

        All groups have been given their blocks by now, none of which can be handed out for a copy.
        """
        snapshot = self._adopted.pop((request_id, manager.kv_cache_group_id), None)
        if snapshot is None:
            return
        written = self._written(snapshot, manager)
        if request_id in self._movers:
            if snapshot in self._by_block.get(written[0].block_id, ()):  # it may have been dropped since
                self._remove(snapshot)
            for block in written:
                block.reset_hash()
            return
        copies = self._copies(manager, written)
        for copy in copies:
            copy.ref_cnt += 1  # vLLM gives both back after the step that copies them
        row = manager.req_to_blocks[request_id]
        row[len(row) - len(written) :] = copies

    @property
    def _unit(self) -> int:
        """Tokens of a hash."""
        return self.manager.block_pool.hash_block_size

    def _key(self, request: Request, slots: RequestSlots, hashes: int) -> Key:
        """Return the key of a request whose first hashes count."""
        digest = _digest(request, hashes)
        seed = getattr(request.sampling_params, "seed", None) if self.draws and slots.seed is None else None
        lora = request.lora_request
        adapter = None if lora is None else (lora.lora_name, lora.lora_path, lora.lora_int_id)
        return Key(digest, hashes * self._unit, slots, seed, adapter, request.cache_salt)

    def _matches(self, request: Request, key: Key) -> Iterator[Snapshot]:
        """Yield the snapshots of a key that a request's tokens begin with, all but its last, from the longest on."""
        of_lengths = self._by_key.get(key, {})
        for count in sorted(of_lengths, reverse=True):
            end = key.hashed + count
            if end < request.num_tokens:
                snapshot = of_lengths[count].get(tuple(request.all_token_ids[key.hashed : end]))
                if snapshot is not None:
                    yield snapshot


def _digest(request: Request, hashes: int) -> bytes:
    """Return vLLM's hash of a request's first tokens, as many as ``hashes`` hashes cover."""
    return bytes(request.block_hashes[hashes - 1]) if hashes else b""


@functools.lru_cache(maxsize=4096)  # one call takes microseconds, and every prompt's end asks for all running requests
def _most_blocks(spec: KVCacheSpec, in_flight: int, length: int) -> int:
    """Return the most blocks that a request of at most ``length`` tokens holds in a group of vLLM's own."""
    return spec.max_admission_blocks_per_request(max_in_flight_tokens=in_flight, max_model_len=length)
