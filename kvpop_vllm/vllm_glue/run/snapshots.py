"""Snapshots: blocks that requests held at their end, and copies of those at their prompt's end, from which others go on.

What a request holds after n tokens follows from these tokens and from its numbers alone. So its blocks of state and tail
are an exact hit for every prompt that begins with the same tokens, as prefix blocks are. They stay in the pool as blocks
of vLLM's prefix cache do, until the pool needs them. A request that goes on from a snapshot writes to copies of them.

An answer that comes back in other tokens, without its thinking for example, does not match what was held at its end.
What was held at its prompt's end does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvpop_vllm.requests import RequestSlots

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetManager


class Key(NamedTuple):
    """Condition of a hit: what a request and a snapshot have in common, besides the tokens after the last hashed ones.

    Attributes:
        digest: vLLM's hash of the first tokens, which covers their salt and adapter; empty for none.
        hashed: number of these tokens.
        slots: numbers of the request.
        seed: seed of its sampling where scores are drawn, else None.
        adapter: name of its LoRA adapter, or None.
        salt: salt of its prefix cache, or None.
    """

    digest: bytes
    hashed: int
    slots: RequestSlots
    seed: int | None
    adapter: str | None
    salt: str | None


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Blocks of a request at its end or at its prompt's end.

    Attributes:
        key: see :class:`Key`.
        length: n, number of tokens that they have seen.
        tokens: the tokens after the hashed ones.
        blocks: blocks of state and tail, and of the protected prefix the last one where it is not full.
    """

    key: Key
    length: int
    tokens: tuple[int, ...]
    blocks: tuple[KVCacheBlock, ...]


class Snapshots:
    """Snapshots of an engine with one group of layers.

    Args:
        manager: block manager of the layers.
        draws: True if scores are drawn with a request's seed.

    Attributes:
        lengths: tokens of the snapshot of each running request that went on from one, by the request's name.
        counts: numbers of snapshots that were taken, of requests that went on from one, and of snapshots of which the pool
            took blocks back, since :meth:`take_counts`.
    """

    def __init__(self, manager: FixedBudgetManager, draws: bool):
        self.manager, self.draws = manager, draws
        self.lengths: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self._by_key: dict[Key, list[Snapshot]] = {}
        self._by_block: dict[int, Snapshot] = {}
        self._chosen: dict[str, Snapshot] = {}
        self._prompts: dict[str, Request] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Return the number of snapshots."""
        return len(set(self._by_block.values()))

    def take_counts(self) -> dict[str, int]:
        """Return the counts ``taken``, ``hits`` and ``lost``, which begin at zero again."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def take(self, request: Request) -> None:
        """Take a snapshot of a request that ends now and still has its blocks, unless one like it is there.

        A token that a step in flight computes counts, since the step runs before any that could read it.
        """
        if request.num_computed_tokens <= request.num_tokens:
            self._take(request, request.num_computed_tokens, self._tail(request))

    def begin(self, request: Request) -> None:
        """Remember a request that is about to begin, of which a snapshot is taken at its prompt's end."""
        self._prompts[request.request_id] = request

    def take_prompt(self, request_id: str, length: int, missing: int) -> None:
        """Copy what a request holds at its prompt's end, if the next step begins there and the pool has room.

        Args:
            request_id: name of the request.
            length: tokens that it has after the next step.
            missing: blocks that it still needs for that step.
        """
        request = self._prompts.get(request_id)
        if request is None or length <= request.num_prompt_tokens:
            return
        del self._prompts[request_id]
        sources, pool = self._tail(request), self.manager.block_pool
        needed = (
            missing + 2 * len(sources) + len(self.manager.req_to_blocks)
        )  # each request may need a block in this step
        if length > request.num_prompt_tokens + 1 or pool.get_num_free_blocks() < needed:
            return
        if self._fits(request, request.num_prompt_tokens):
            copies = tuple(pool.get_new_blocks(len(sources)))
            pool.touch(sources)  # vLLM gives both back after the step that copies them
            self.manager._pending_cow_copies.extend(zip(sources, copies, strict=True))
            self._take(request, request.num_prompt_tokens, copies)

    def _tail(self, request: Request) -> tuple[KVCacheBlock, ...]:
        """Return a request's blocks of state and tail, after the full blocks of its prefix."""
        slots = self.manager.requests.get(request.request_id)
        row = self.manager.req_to_blocks.get(request.request_id, ())
        return () if slots is None else tuple(row[slots.prefix // self.manager.block_size :])

    def _place(self, request: Request, length: int) -> tuple[Key, tuple[int, ...]]:
        """Return the key of a request of ``length`` tokens, and the tokens after the hashed ones."""
        slots = self.manager.requests[request.request_id]
        key = self._key(request, slots, min(length // self._unit, len(request.block_hashes)))
        return key, tuple(request.all_token_ids[key.hashed : length])

    def _fits(self, request: Request, length: int) -> bool:
        """Return whether a snapshot of a request with ``length`` tokens can be of use, and there is none like it."""
        slots = self.manager.requests.get(request.request_id)
        if slots is None or not slots.prefix < length or slots.prefix >= request.num_prompt_tokens:
            return False  # the tail has not begun, or a longer prompt would be protected further
        if request.mm_features or request.prompt_embeds is not None:
            return False
        same = self._matching(*self._place(request, length), length)
        return same is None or same.length < length

    def _take(self, request: Request, length: int, blocks: tuple[KVCacheBlock, ...]) -> None:
        if not blocks or not self._fits(request, length):
            return
        key, tokens = self._place(request, length)
        snapshot, pool = Snapshot(key, length, tokens, blocks), self.manager.block_pool
        number = next(self._numbers)
        for i, block in enumerate(blocks):  # freed blocks that have a hash are the last to be used again
            name = BlockHash(f"kvpop snapshot {number} block {i}".encode())
            pool._insert_block_hash(make_block_hash_with_group_id(name, self.manager.kv_cache_group_id), block, length)
            self._by_block[block.block_id] = snapshot
        pool.touch(blocks)
        pool.unpin_blocks(blocks, self._lose)
        self._by_key.setdefault(key, []).append(snapshot)
        self.counts["taken"] += 1

    def _lose(self, block: KVCacheBlock) -> None:
        """Forget the snapshot of a block that the pool uses again."""
        snapshot = self._by_block.pop(block.block_id, None)
        if snapshot is None:
            return
        for other in snapshot.blocks:
            self._by_block.pop(other.block_id, None)
        like = self._by_key[snapshot.key]
        like.remove(snapshot)
        if not like:
            del self._by_key[snapshot.key]
        self.counts["lost"] += 1

    def choose(self, request: Request) -> Snapshot | None:
        """Return the longest snapshot that a waiting request can go on from, and remember it; None if there is none."""
        self._chosen.pop(request.request_id, None)
        if not self._by_key or request.mm_features or request.prompt_embeds is not None:
            return None
        slots = self.manager.requests[request.request_id]
        for hashes in range(len(request.block_hashes), -1, -1):
            key = self._key(request, slots, hashes)
            tokens = request.all_token_ids[key.hashed : key.hashed + self._longest(key)]
            snapshot = self._matching(key, tokens, request.num_tokens - 1)
            if snapshot is not None:
                self._chosen[request.request_id] = snapshot
                return snapshot
        return None

    def refuse(self, request_id: str) -> None:
        """Leave the snapshot that was chosen for a request alone, since its prefix is not cached any more."""
        self._chosen.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Forget a request that ends or is preempted."""
        self._chosen.pop(request_id, None)
        self._prompts.pop(request_id, None)
        self.lengths.pop(request_id, None)

    def copies(self, request_id: str, computed: Sequence[KVCacheBlock]) -> int:
        """Return the number of blocks that a request needs for copies, if its computed blocks are those of a snapshot."""
        snapshot = self._chosen.get(request_id)
        return len(snapshot.blocks) if snapshot is not None and computed else 0

    def adopt(self, request_id: str, computed: Sequence[KVCacheBlock]) -> bool:
        """Have a request go on from copies of the snapshot that was chosen; return False if none was.

        Args:
            request_id: name of a request that holds no blocks.
            computed: its prefix blocks, followed by those of the snapshot.
        """
        snapshot = self._chosen.pop(request_id, None)
        if snapshot is None or not computed:
            return False
        manager, pool = self.manager, self.manager.block_pool
        pool.touch(computed)  # vLLM gives the sources back after the step that copies them
        prefix = computed[: len(computed) - len(snapshot.blocks)]
        copies = pool.get_new_blocks(len(snapshot.blocks))
        for source, copy in zip(snapshot.blocks, copies, strict=True):
            manager._pending_cow_copies.append((source, copy))
            copy.ref_cnt += 1
        manager.req_to_blocks[request_id].extend([*prefix, *copies])
        manager.num_cached_block[request_id] = len(prefix)
        self.lengths[request_id] = snapshot.length
        self.counts["hits"] += 1
        return True

    @property
    def _unit(self) -> int:
        """Tokens of a hash."""
        return self.manager.block_pool.hash_block_size

    def _key(self, request: Request, slots: RequestSlots, hashes: int) -> Key:
        """Return the key of a request whose first hashes count."""
        digest = bytes(request.block_hashes[hashes - 1]) if hashes else b""
        seed = getattr(request.sampling_params, "seed", None) if self.draws else None
        adapter = request.lora_request and request.lora_request.lora_name
        return Key(digest, hashes * self._unit, slots, seed, adapter, request.cache_salt)

    def _longest(self, key: Key) -> int:
        """Return the most tokens that snapshots of a key have after the hashed ones."""
        return max((len(snapshot.tokens) for snapshot in self._by_key.get(key, ())), default=0)

    def _matching(self, key: Key, tokens: Sequence[int], limit: int) -> Snapshot | None:
        """Return the longest snapshot of a key that begins as ``tokens`` do, of at most ``limit`` tokens."""
        fitting = (
            snapshot
            for snapshot in self._by_key.get(key, ())
            if snapshot.length <= limit and tuple(tokens[: len(snapshot.tokens)]) == snapshot.tokens
        )
        return max(fitting, key=lambda snapshot: snapshot.length, default=None)
