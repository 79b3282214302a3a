"""Snapshots: blocks that requests held at their end, and copies of those at their prompt's end, from which others go on.

What a request holds after n tokens follows from these tokens and from its numbers alone. So its blocks of state and tail
are an exact hit for every prompt that begins with the same tokens, as prefix blocks are. They stay in the pool as blocks
of vLLM's prefix cache do, until the pool needs them. A request that goes on from a snapshot writes to copies of them.

An answer that comes back in other tokens, without its thinking for example, does not match what was held at its end.
What was held at its prompt's end does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvpop_vllm.requests import RequestSlots, protects_prompt

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetManager


_NAME = make_block_hash_with_group_id(BlockHash(b"kvpop snapshot"), 0)
"""Hash of all blocks of snapshots, by which nothing is looked up."""


class Key(NamedTuple):
    """Condition of a hit: what a request and a snapshot have in common, besides the tokens after the last hashed ones.

    Attributes:
        digest: vLLM's hash of the first tokens, which covers their salt and adapter; empty for none.
        hashed: number of these tokens.
        slots: numbers of the request.
        seed: seed of its sampling where scores are drawn, else None.
        adapter: name and path of its LoRA adapter, or None.
        salt: salt of its prefix cache, or None.
    """

    digest: bytes
    hashed: int
    slots: RequestSlots
    seed: int | None
    adapter: tuple[str, str] | None
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
        self._digests: Counter[bytes] = Counter()
        self._prompts: dict[str, Request] = {}
        self._movers: set[str] = set()

    def take_counts(self) -> dict[str, int]:
        """Return the counts ``taken``, ``hits`` and ``lost``, which begin at zero again."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def take(self, request: Request) -> None:
        """Take a snapshot of a request that ends now and still has its blocks, unless one like it is there.

        A token that a step in flight computes counts, since the step runs before any that could read it. Accepted drafts
        count as well: they are staged in the blocks of state, and enter the cache in the first step of a request that goes
        on from there. Those after the end of the answer do not.
        """
        length = request.num_computed_tokens
        if self.manager.kv_cache_spec.drafts:
            length = min(length, request.num_tokens)
        if length <= request.num_tokens and self._fits(request, length):
            self._take(request, length, self._tail(request, length))

    def begin(self, request: Request) -> None:
        """Remember a request that is about to begin, of which a snapshot is taken at its prompt's end."""
        self._prompts[request.request_id] = request

    def take_prompt(self, request_id: str, missing: int) -> None:
        """Copy what a request holds at its prompt's end, if the next step begins there and the pool has room.

        Args:
            request_id: name of the request.
            missing: blocks that it still needs for that step.
        """
        request = self._prompts.get(request_id)
        if request is None or request.num_computed_tokens < request.num_prompt_tokens:
            return
        del self._prompts[request_id]
        length, pool = request.num_prompt_tokens, self.manager.block_pool
        if request.num_computed_tokens > length or not self._fits(request, length):
            return
        sources = self._tail(request, length)
        if (
            pool.get_num_free_blocks() >= missing + len(sources) + self.manager.most_missing()
        ):  # so that none is preempted
            copies = tuple(pool.get_new_blocks(len(sources)))
            pool.touch(sources)  # vLLM gives both back after the step that copies them
            self.manager._pending_cow_copies.extend(zip(sources, copies, strict=True))
            self._take(request, length, copies)

    def _tail(self, request: Request, length: int) -> tuple[KVCacheBlock, ...]:
        """Return the blocks of state and tail of a request of ``length`` tokens, after the full blocks of its prefix."""
        slots, spec = self.manager.requests[request.request_id], self.manager.kv_cache_spec
        row = self.manager.req_to_blocks.get(request.request_id, ())
        return tuple(row[slots.prefix // spec.block_size : spec.blocks(length, slots)])

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
        if request.mm_features or request.prompt_embeds is not None:
            return False
        same = self._matching(*self._place(request, length), length)
        return same is None or same.length < length

    def _take(self, request: Request, length: int, blocks: tuple[KVCacheBlock, ...]) -> None:
        """Remember blocks as a snapshot of a request with ``length`` tokens."""
        if not blocks:
            return
        key, tokens = self._place(request, length)
        snapshot, pool = Snapshot(key, length, tokens, blocks), self.manager.block_pool
        for block in blocks:
            block.set_block_hash(_NAME, num_tokens=length)  # freed blocks with a hash are the last to be used again
            self._by_block[block.block_id] = snapshot
        pool.touch(blocks)
        pool.unpin_blocks(blocks, self._lose)
        self._by_key.setdefault(key, []).append(snapshot)
        self._digests[key.digest] += 1
        self.counts["taken"] += 1

    def _lose(self, block: KVCacheBlock) -> None:
        """Forget the snapshot of a block that the pool uses again."""
        if (snapshot := self._by_block.get(block.block_id)) is not None:
            self._remove(snapshot)
            self.counts["lost"] += 1

    def _remove(self, snapshot: Snapshot) -> None:
        """Forget a snapshot."""
        for block in snapshot.blocks:
            del self._by_block[block.block_id]
        alike = self._by_key[snapshot.key]
        alike.remove(snapshot)
        if not alike:
            del self._by_key[snapshot.key]
        self._digests[snapshot.key.digest] -= 1
        if not self._digests[snapshot.key.digest]:
            del self._digests[snapshot.key.digest]

    def longest(self, request: Request) -> Snapshot | None:
        """Return the longest snapshot that a waiting request can go on from, None if there is none.

        One that a copy of this step writes cannot be copied yet.
        """
        if not self._by_key or request.mm_features or request.prompt_embeds is not None:
            return None
        slots, digests = self.manager.requests[request.request_id], (b"", *request.block_hashes)
        written = {copy.block_id for _, copy in self.manager._pending_cow_copies}
        for hashes in range(len(digests) - 1, -1, -1):
            if digests[hashes] in self._digests:
                key = self._key(request, slots, hashes)
                last = key.hashed + max((len(snapshot.tokens) for snapshot in self._by_key.get(key, ())), default=0)
                tokens = request.all_token_ids[key.hashed : last]
                snapshot = self._matching(key, tokens, request.num_tokens - 1)
                if snapshot is not None and snapshot.blocks[0].block_id not in written:
                    return snapshot
        return None

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
        return room or all(block.ref_cnt == 0 for block in snapshot.blocks)

    def copied(self, request_id: str, computed: Sequence[KVCacheBlock]) -> int:
        """Return the number of blocks that copies need if a request's computed blocks end with a snapshot."""
        snapshot = self.hit(computed)
        return 0 if snapshot is None or request_id in self._movers else len(snapshot.blocks)

    def forget(self, request_id: str) -> None:
        """Forget a request that ends or is preempted."""
        self._movers.discard(request_id)
        self._prompts.pop(request_id, None)
        self.lengths.pop(request_id, None)

    def hit(self, computed: Sequence[KVCacheBlock]) -> Snapshot | None:
        """Return the snapshot that a request's computed blocks end with, None if they are of a prefix alone."""
        return self._by_block.get(computed[-1].block_id) if computed else None

    def adopt(self, request_id: str, snapshot: Snapshot, computed: Sequence[KVCacheBlock]) -> None:
        """Have a request go on from copies of a snapshot, or from its blocks (:meth:`share`).

        Args:
            request_id: name of a request that holds no blocks.
            snapshot: the snapshot.
            computed: its prefix blocks, followed by those of the snapshot.
        """
        manager, pool = self.manager, self.manager.block_pool
        pool.touch(computed)  # vLLM gives the sources back after the step that copies them
        prefix, blocks = computed[: len(computed) - len(snapshot.blocks)], snapshot.blocks
        if request_id in self._movers:
            self._movers.discard(request_id)
            self._remove(snapshot)
            for block in blocks:
                block.reset_hash()
        else:
            blocks = pool.get_new_blocks(len(snapshot.blocks))
            for source, copy in zip(snapshot.blocks, blocks, strict=True):
                manager._pending_cow_copies.append((source, copy))
                copy.ref_cnt += 1
        manager.req_to_blocks[request_id].extend([*prefix, *blocks])
        manager.num_cached_block[request_id] = len(prefix)
        self.lengths[request_id] = snapshot.length
        self.counts["hits"] += 1

    @property
    def _unit(self) -> int:
        """Tokens of a hash."""
        return self.manager.block_pool.hash_block_size

    def _key(self, request: Request, slots: RequestSlots, hashes: int) -> Key:
        """Return the key of a request whose first hashes count."""
        digest = bytes(request.block_hashes[hashes - 1]) if hashes else b""
        seed = getattr(request.sampling_params, "seed", None) if self.draws else None
        lora = request.lora_request
        adapter = None if lora is None else (lora.lora_name, lora.lora_path)
        return Key(digest, hashes * self._unit, slots, seed, adapter, request.cache_salt)

    def _matching(self, key: Key, tokens: Sequence[int], limit: int) -> Snapshot | None:
        """Return the longest snapshot of a key that begins as ``tokens`` do, of at most ``limit`` tokens."""
        fitting = (
            snapshot
            for snapshot in self._by_key.get(key, ())
            if snapshot.length <= limit and tuple(tokens[: len(snapshot.tokens)]) == snapshot.tokens
        )
        return max(fitting, key=lambda snapshot: snapshot.length, default=None)
