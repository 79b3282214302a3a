"""Definitions that the kernels of serving share: their arguments, addresses in the pages, and the roles of slots (kvpop_vllm/roles.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PRECISION = tl.constexpr("tf32x3")  # of float32 products: three of tensor cores, good to about 2**-22
PADDING, REFUSED = tl.constexpr(0), tl.constexpr(-1)  # in place of the slots to attend over
MARKS = tl.constexpr(4)
"""int32 words of a head: slots to attend over, tokens evicted so far, tokens evicted now (0 or 1), protected tokens to attend over."""


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


class Before(NamedTuple):
    """Protected tokens, which lie in slots of blocks by their positions (:class:`kvpop_vllm.kernels.pages.Prefix`); None where nobody
    has any. Strides in elements."""

    k: Any = None  # [blocks, H, N, D]
    v: Any = None
    rows: int = 0  # strides of k and v: between blocks,
    rows_head: int = 0  # between heads
    table: Any = None  # [R, F]
    table_request: int = 0
    table_page: int = 0


class Asked(NamedTuple):
    """The tokens of a step. given and keys are None where the rule does not read them, protected where nobody has a
    prefix."""

    k: Any  # [R, H, D]
    v: Any
    k_request: int
    k_head: int
    v_request: int
    v_head: int
    positions: Any  # [R]
    positions_request: int
    budgets: Any  # [R, H]
    budgets_request: int
    budgets_head: int
    given: Any  # [R, H]
    given_request: int
    given_head: int
    protected: Any  # [R], p of each
    protected_request: int
    windows: Any  # [R], w of each
    windows_request: int
    keys: Any  # [R, H] int64, of draws
    keys_request: int
    keys_head: int


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
    decay_step: int
    scorer: str  # none, key_norm, linear, mlp, mlstm, or parked: the score word
    masses: bool = False  # attention weights of the newest query are written to the score words,
    mean: bool = False  # or added to them
    given: bool = False
    ages: bool = False
    draws: bool = False
    threshold: float | None = None
    residual: bool = False
    corrects: bool = False
    protects: bool = False  # requests may have a protected prefix: their tail has no sinks
    columns: int = 0  # Fp of an mLSTM, M of an MLP
    features: int = 0  # F
    values: int = 0  # Dv
    softcap: float | None = None
    delayed: bool = True
    norm: bool = False
    skip: bool = False
    projects_values: bool = True

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
    """Indices in ``cache.state`` of words of a head's state, a flat array over the state pages; of the first page where not inside."""
    page = tl.where(inside, word // P.region_words, 0)
    return page_of(cache, r, h, page) * cache.words + h * cache.words_head + word % P.region_words


@triton.jit
def roles_of(asked, r, P: tl.constexpr):
    """p, the sinks and the window of the slots of request r, or of each of several: behind a prefix, slots are those of a tail that
    begins with token p and has no sinks."""
    protected, sinks = tl.full([], 0, tl.int32), tl.full([], P.sinks, tl.int32)
    window = tl.load(asked.windows + r * asked.windows_request).to(tl.int32)
    if P.protects:
        protected = tl.load(asked.protected + r * asked.protected_request).to(tl.int32)
        sinks = tl.where(protected > 0, 0, P.sinks)
    return protected, sinks, window


@triton.jit
def start_of(cache, asked, r, h, protected, P: tl.constexpr):
    """Tokens of the tail before a request's token, ``q - p``: -1 where nothing is to be written, as its row is padding or the token
    protected, -2 where the pages have seen another number of tokens. Holds until the new token is written."""
    q = tl.load(asked.positions + r * asked.positions_request).to(tl.int32)
    seen = q
    if q > protected:
        seen = tl.load(cache.position + word_at(cache, r, h, 0, P))
    return tl.where(q < protected, -1, tl.where(seen == q, q - protected, -2))


@triton.jit
def ring_slot(t, sinks, window):
    """Slot to which token t >= 0 of a tail is written; from ``sinks + w`` on, that of the token that leaves the window at t."""
    return tl.where(t < sinks, t, sinks + (t - sinks) % window)
