"""Definitions shared by the serving kernels: arguments, page addresses and slot roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

PADDING, REFUSED = tl.constexpr(0), tl.constexpr(-1)  # stored in place of the number of slots to attend to
MARKS = tl.constexpr(5)
"""Number of int32 flags per head.

They are: slots to attend to, tokens evicted so far, tokens evicted in this step (0 or 1), protected tokens to
attend to, parts of attention that are done.
"""


class Cache(NamedTuple):
    """Pages of a layer and their page table, with strides in elements of the respective array."""

    k: Any  # [blocks, H, N, D]
    v: Any
    score: Any  # [blocks, H, N]
    position: Any
    state: Any  # [blocks, H, words]
    rows: int  # strides of k and v: between blocks,
    rows_head: int  # between heads
    words: int  # strides of score, position and state (4 bytes each): between blocks,
    words_head: int  # between heads
    table: Any  # [R, H, P]
    table_request: int
    table_head: int
    table_page: int


class Before(NamedTuple):
    """Pages of protected tokens (:class:`kvpop_vllm.kernels.pages.Prefix`), with strides in elements.

    Fields are None if no request has a prefix, and ``bias`` and ``biased`` if no prefix has a bias.
    """

    k: Any = None  # [blocks, H, N, D]
    v: Any = None
    rows: int = 0  # strides of k and v: between blocks,
    rows_head: int = 0  # between heads
    table: Any = None  # [R, F]
    table_request: int = 0
    table_page: int = 0
    bias: Any = None  # [blocks, H, N] float32
    words: int = 0  # strides of bias: between blocks,
    words_head: int = 0  # between heads
    biased: Any = None  # [R], leading tokens that have a bias, where one token of each request is decoded
    biased_request: int = 0


class StepInputs(NamedTuple):
    """Tokens of a step, with strides in elements.

    ``gate_scores`` and ``keys`` are None if the rule does not read them; ``protected`` is None if no request has a
    prefix.
    """

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
    gate_scores: Any  # [R, H]
    given_request: int
    given_head: int
    protected: Any  # [R], p of each request
    protected_request: int
    windows: Any  # [R], w of each request
    windows_request: int
    keys: Any  # [R, H] int64, keys of draws
    keys_request: int
    keys_head: int


class Weights(NamedTuple):
    """Tensors of a learned scorer, float32 and contiguous; fields that it does not have are None.

    The comments give their names in :mod:`kvpop_vllm.kernels.ops.rules`, where a scorer names them otherwise.
    """

    read_weight: Any = None  # q_proj of an mLSTM, fc1_weight of an MLP
    k_proj: Any = None
    v_proj: Any = None
    igate_weight: Any = None
    igate_bias: Any = None
    fgate_weight: Any = None
    fgate_bias: Any = None
    read_bias: Any = None  # fc1_bias of an MLP
    out_weight: Any = None  # fc2_weight of an MLP
    out_bias: Any = None  # fc2_bias of an MLP, bias of a linear scorer
    norm_weight: Any = None
    direct_weight: Any = None  # skip_weight of an mLSTM, weight of a linear scorer


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time constants of the kernels: sizes and the numbers of the rule."""

    size: int  # D
    padded: int  # D rounded up to a power of two, at least 16
    group: int  # G
    slots: int  # N
    state_pages: int
    region_words: int  # N * C / 4
    most_slots: int  # number of slots that the page table has room for
    sinks: int
    decay_step: int
    scorer: str  # none, key_norm, linear, mlp, mlstm, or stored: read from the score field
    masses: bool = False  # attention weights of the newest query are written to the score fields,
    mean: bool = False  # or added to them
    gate_scores: bool = False
    ages: bool = False
    draws: bool = False
    threshold: float | None = None
    residual: bool = False
    uses_moment_correction: bool = False
    protects: bool = False  # requests may have a protected prefix; their tail has no sinks
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
        """True if moments of evicted tokens are stored."""
        return self.residual or self.uses_moment_correction

    @property
    def projected(self) -> int:
        """Number of float32 values in a token's products with the scorer's weights.

        They are read features, write features, values and gates, or the hidden sums of an MLP.
        """
        return self.columns if self.scorer == "mlp" else 2 * self.columns + self.values + 2

    @property
    def state_words(self) -> int:
        """Number of float32 values in the scorer's state; moments follow it."""
        return self.features * (self.values + 1) + 1 if self.scorer == "mlstm" else 0

    @property
    def padded_features(self) -> int:
        """Number of features F, rounded up to a power of two."""
        return triton.next_power_of_2(max(1, self.features))

    @property
    def padded_values(self) -> int:
        """Value width Dv, rounded up to a power of two."""
        return triton.next_power_of_2(max(1, self.values))

    @property
    def padded_columns(self) -> int:
        """Number of columns (Fp or M), rounded up to a power of two."""
        return triton.next_power_of_2(max(1, self.columns))


@triton.jit
def page_of(cache, r, h, page):
    """Return the block or region number of a page of request r, head h; ``page`` may be a tensor."""
    entry = cache.table + r * cache.table_request + h * cache.table_head + page * cache.table_page
    return tl.load(entry).to(tl.int64)


@triton.jit
def row_at(cache, r, h, slot, P: tl.constexpr):
    """Return the offset of a slot's key and value in ``cache.k`` and ``cache.v``."""
    block = page_of(cache, r, h, P.state_pages + slot // P.slots)
    return block * cache.rows + h * cache.rows_head + slot % P.slots * P.size


@triton.jit
def word_at(cache, r, h, slot, P: tl.constexpr):
    """Return the offset of a slot's score and position in ``cache.score`` and ``cache.position``."""
    block = page_of(cache, r, h, P.state_pages + slot // P.slots)
    return block * cache.words + h * cache.words_head + slot % P.slots


@triton.jit
def state_at(cache, r, h, word, inside, P: tl.constexpr):
    """Return offsets in ``cache.state`` of elements of a head's state.

    The state is a flat array over the state pages. Elements that are not ``inside`` get an offset in the
    first page.

    Args:
        word: indices of the elements.
        inside: mask of valid elements.
    """
    page = tl.where(inside, word // P.region_words, 0)
    return page_of(cache, r, h, page) * cache.words + h * cache.words_head + word % P.region_words


@triton.jit
def roles_of(asked, r, P: tl.constexpr):
    """Return p, the number of sinks and the window of request r, or of several requests.

    Behind a prefix, the slots are those of a tail that begins with token p and has no sinks.
    """
    protected, sinks = tl.full([], 0, tl.int32), tl.full([], P.sinks, tl.int32)
    window = tl.load(asked.windows + r * asked.windows_request).to(tl.int32)
    if P.protects:
        protected = tl.load(asked.protected + r * asked.protected_request).to(tl.int32)
        sinks = tl.where(protected > 0, 0, P.sinks)
    return protected, sinks, window


@triton.jit
def start_of(cache, asked, r, h, protected, P: tl.constexpr):
    """Return the number of tokens in the tail before a request's token, ``q - p``, or a negative code.

    The code is -1 if nothing is to be written, because the row is padding or the token is protected. It is -2
    if the pages have seen another number of tokens. The result is valid until the new token is written.
    """
    q = tl.load(asked.positions + r * asked.positions_request).to(tl.int32)
    seen = q
    if q > protected:
        seen = tl.load(cache.position + word_at(cache, r, h, 0, P))
    return tl.where(q < protected, -1, tl.where(seen == q, q - protected, -2))


@triton.jit
def ring_slot(t, sinks, window):
    """Return the slot to which token t >= 0 of a tail is written.

    From ``sinks + window`` on, it is the slot of the token leaving the window at t.
    """
    return tl.where(t < sinks, t, sinks + (t - sinks) % window)
