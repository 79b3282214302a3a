"""What the kernels of serving share: how they are told where pages lie, and the roles of slots (kvpop_vllm/roles.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PRECISION = tl.constexpr("tf32x3")  # of float32 products: three of tensor cores, good to about 2**-22
PADDING, REFUSED = tl.constexpr(0), tl.constexpr(-1)  # in place of the slots to attend over
MARKS = tl.constexpr(
    3
)  # int32 words per head that later kernels read: slots to attend over, evicted before, evicted now


class Cache(NamedTuple):
    """A layer's pages and who has which. Strides in elements of the array they belong to."""

    k: Any  # [blocks, H, N, D]
    v: Any
    score: Any  # [blocks, H, N]
    position: Any
    state: Any  # [blocks, H, words]
    rows: int  # strides of k and v: between blocks,
    rows_head: int  # between heads
    words: int  # of the other three, which are all of 4 bytes
    words_head: int
    table: Any  # [R, H, P]
    table_request: int
    table_head: int
    table_page: int


class Asked(NamedTuple):
    """The tokens of a step. given and prompts are None where the rule does not read them."""

    k: Any  # [R, H, D]
    v: Any
    k_request: int
    k_head: int
    v_request: int
    v_head: int
    positions: Any  # [R]
    positions_request: int
    valid: Any  # [R, H]
    valid_request: int
    valid_head: int
    budgets: Any  # [R, H]
    budgets_request: int
    budgets_head: int
    prompts: Any  # [R]
    prompts_request: int
    given: Any  # [R, H]
    given_request: int
    given_head: int


class Weights(NamedTuple):
    """Of a learned scorer, float32, contiguous, None where it has none; as in :mod:`kvpop_vllm.kernels.ops.rules`."""

    q_proj: Any = None  # fc1_weight of an MLP
    k_proj: Any = None
    v_proj: Any = None
    igate_weight: Any = None
    igate_bias: Any = None
    fgate_weight: Any = None
    fgate_bias: Any = None
    out_weight: Any = None  # fc2_weight of an MLP
    out_bias: Any = None  # its bias, or a linear scorer's
    norm_weight: Any = None
    skip_weight: Any = None  # weight of a linear scorer
    hidden_bias: Any = None  # fc1_bias of an MLP


@dataclass(frozen=True)
class Plan:
    """What the kernels are compiled for: sizes and the rule's constants."""

    size: int  # D
    padded: int  # D up to a power of two
    group: int  # G
    slots: int  # N
    state_pages: int
    region_words: int  # N * C / 4
    most_slots: int  # that the page table has room for
    sinks: int
    window: int
    every: int
    decay_step: int
    scorer: str  # none, key_norm, linear, mlp, mlstm, or parked: the score word
    votes: bool = False
    pool: int = 1
    mean: bool = False
    newest: bool = False  # a score is the newest query's weight
    given: bool = False
    ages: bool = False
    threshold: float | None = None
    residual: bool = False
    corrects: bool = False
    columns: int = 0  # Fp of an mLSTM, M of an MLP
    features: int = 0  # F
    values: int = 0  # Dv
    hedgehog: bool = True
    softcap: float | None = None
    delayed: bool = True
    norm: bool = False
    skip: bool = False
    projects_values: bool = True
    heads_pages: int = 0  # where heads divide a budget: pages that a head may have at most,
    equal_pages: int = 0  # and of equal shares,
    share_words: int = 0  # words of its table of them,
    share_at: int = 0  # and where its share lies in its state

    @property
    def ring(self) -> int:
        return self.window + self.every - 1

    @property
    def first_long(self) -> int:
        return self.sinks + self.ring

    @property
    def masses(self) -> bool:
        """Whether scores come from attention."""
        return self.votes or self.mean or self.newest

    @property
    def shares(self) -> bool:
        """Whether heads divide a budget."""
        return self.share_words > 0

    @property
    def usual_slots(self) -> int:
        """Slots of a head at most, where heads have equal shares."""
        return self.equal_pages * self.slots if self.shares else self.most_slots

    @property
    def moments(self) -> bool:
        return self.residual or self.corrects

    @property
    def projected(self) -> int:
        """float32 words of a token's products with the scorer's weights: read features, write features, values, gates."""
        return self.columns if self.scorer == "mlp" else 2 * self.columns + self.values + 2

    @property
    def state_words(self) -> int:
        """float32 words of the scorer's state; moments lie behind it."""
        return self.features * (self.values + 1) + 1 if self.scorer == "mlstm" else 0

    @property
    def padded_features(self) -> int:
        return triton.next_power_of_2(max(1, self.features))

    @property
    def padded_values(self) -> int:
        return triton.next_power_of_2(max(1, self.values))

    @property
    def padded_columns(self) -> int:
        return triton.next_power_of_2(max(1, self.columns))


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tiles_at_once(slots: int, tile: int, others: int, device: torch.device) -> int:
    """Programs among which tiles of a row of slots are dealt out, when there are so many other rows: no more than keep a GPU busy, since
    at most steps there is nothing to do."""
    return max(1, min(triton.cdiv(slots, tile), 8 * processors(device) // others))


@triton.jit
def page_of(cache, r, h, page):
    """Number of the block (or region) that is the page of request r, head h; ``page`` may be a tensor of pages."""
    entry = cache.table + r * cache.table_request + h * cache.table_head + page * cache.table_page
    return tl.load(entry).to(tl.int64)


@triton.jit
def row_at(cache, r, h, slot, P: tl.constexpr):
    """Where a slot's key, and its value, lie in ``cache.k`` and ``cache.v``."""
    block = page_of(cache, r, h, P.state_pages + slot // P.slots)
    return block * cache.rows + h * cache.rows_head + slot % P.slots * P.size


@triton.jit
def word_at(cache, r, h, slot, P: tl.constexpr):
    """Where a slot's score, and its position, lie."""
    block = page_of(cache, r, h, P.state_pages + slot // P.slots)
    return block * cache.words + h * cache.words_head + slot % P.slots


@triton.jit
def state_at(cache, r, h, word, inside, P: tl.constexpr):
    """Where words of a head's state lie in ``cache.state``: a flat array over the state pages."""
    page = tl.where(inside, word // P.region_words, 0)
    return page_of(cache, r, h, page) * cache.words + h * cache.words_head + word % P.region_words


@triton.jit
def stabiliser_at(cache, r, h, P: tl.constexpr):
    """Where m of an mLSTM's state lies: its last word."""
    page = page_of(cache, r, h, (P.state_words - 1) // P.region_words)
    return page * cache.words + h * cache.words_head + (P.state_words - 1) % P.region_words


@triton.jit
def word_of_share(cache, r, h, word, P: tl.constexpr):
    """Where a word of a head's share lies in ``cache.state``: long-range slots it may fill, how many it has filled, and the
    numbers of its slot pages."""
    page = page_of(cache, r, h, (P.share_at + word) // P.region_words)
    return page * cache.words + h * cache.words_head + (P.share_at + word) % P.region_words


@triton.jit
def slots_at(asked, r, h, heads, P: tl.constexpr):
    """Where a workspace of one number a slot, ``[R, H * P.usual_slots]``, has those of head h, and how many that may be."""
    if P.shares:
        before = 0
        for other in range(h):
            before += tl.load(asked.budgets + r * asked.budgets_request + other * asked.budgets_head)
        width = tl.load(asked.budgets + r * asked.budgets_request + h * asked.budgets_head)
        before = tl.minimum(before, heads * P.usual_slots - width)  # damaged shares stay within the request's part
    else:
        before, width = h.to(tl.int32) * P.usual_slots, P.usual_slots
    return r * heads * P.usual_slots + before, width


@triton.jit
def start_of(cache, asked, r, h, P: tl.constexpr):
    """Position of a request's token, as int32: -1 where its row is padding, -2 where the pages have seen another number of
    tokens. Holds until the new token is written."""
    q = tl.load(asked.positions + r * asked.positions_request).to(tl.int32)
    seen = q
    if q > 0:
        seen = tl.load(cache.position + word_at(cache, r, h, 0, P))
    return tl.where(q < 0, -1, tl.where(seen == q, q, -2))


@triton.jit
def phase_of(asked, r, P: tl.constexpr):
    """See ``SlotRoles.for_prompt``."""
    phase = 0
    if P.votes:
        phase = P.every - 1 - (tl.load(asked.prompts + r * asked.prompts_request) % P.every).to(tl.int32)
    return phase


@triton.jit
def decides_at(q, phase, P: tl.constexpr):
    return (q + 1 + phase) % P.every == 0


@triton.jit
def decided_before(position, phase, P: tl.constexpr):
    """See ``SlotRoles.decided``."""
    return tl.maximum(position - (position + phase) % P.every - P.window, P.sinks)


@triton.jit
def ring_slot(t, P: tl.constexpr):
    """Where token t >= 0 is written."""
    return tl.where(t < P.sinks, t, P.sinks + (t - P.sinks) % P.ring)


@triton.jit
def newest_in_ring(slot, last, P: tl.constexpr):
    """The newest token up to ``last`` whose ring slot it is; before the first one, a number below the sinks."""
    return last - ((last - slot) % P.ring + P.ring) % P.ring


@triton.jit
def seen_slots(slot, used, q, decided, P: tl.constexpr):
    """Which slots the query at q attends over: ``[0, used)`` but for those of tokens decided upon, which are stale."""
    seen = slot < used
    if P.every > 1:
        in_ring = (slot >= P.sinks) & (slot < P.first_long)
        seen = seen & ~(in_ring & (newest_in_ring(slot, q, P) < decided))
    return seen
