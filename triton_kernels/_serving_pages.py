"""Definitions shared by the serving kernels: arguments, page addresses and slot roles."""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._lowest_score import Order
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PADDING, REFUSED = tl.constexpr(0), tl.constexpr(-1)  # stored in place of the number of slots to attend to
MARKS = tl.constexpr(6)
"""Number of int32 flags per head.

They are: slots to attend to, tokens evicted so far, tokens evicted in this step (0 or 1), protected tokens to
attend to, parts of attention that are done, and for an mLSTM the slot of the lowest score.
"""


class View(NamedTuple):
    """A tensor ``[R or T, H, ...]`` or ``[R or T]`` and its strides in elements; None is one that is not read."""

    base: Any = None
    row: int = 0  # stride between requests or tokens
    head: int = 0


def view(tensor) -> View:
    """Return a tensor as kernels take it."""
    return View() if tensor is None else View(tensor, *tensor.stride()[:2])


class Cache(NamedTuple):
    """Pages of a layer and their page table, with strides in elements of their array; no table stands for no pages.

    Pages of protected tokens (:class:`kvpop_vllm.cache.pages.Prefix`) have the table of all heads and the arrays k, v
    and, if some have a bias, score.
    """

    k: Any = None  # [blocks, H, N, D]
    v: Any = None
    score: Any = None  # [blocks, H, N]
    position: Any = None
    state: Any = None  # [blocks, H, words]
    rows: int = 0  # strides of k and v: between blocks,
    rows_head: int = 0  # between heads
    words: int = 0  # strides of score, position and state (4 bytes each): between blocks,
    words_head: int = 0  # between heads
    table: Any = None  # [R, H, P]
    table_request: int = 0
    table_head: int = 0
    table_page: int = 0


WEIGHTS = """
    q_proj k_proj v_proj igate_weight igate_bias fgate_weight fgate_bias out_weight out_bias norm_weight skip_weight
    fc1_weight fc1_bias fc2_weight fc2_bias weight bias
""".split()
Weights = namedtuple("Weights", WEIGHTS, defaults=[None] * len(WEIGHTS))
"""Tensors of a learned scorer, float32 and contiguous; fields that it does not have are None."""


class Step(NamedTuple):
    """Arguments of the kernels of a step; tensors that no rule or request needs are None.

    A batch has T tokens, in decoding one of each request.
    """

    q: View  # [T, Hq, D]
    k: View  # [T, H, D]
    v: View
    gate_scores: View  # [T, H]
    positions: View  # [R], of the first token of each request
    budgets: View  # [R, H]
    windows: View  # [R], w of each request
    keys: View  # [R, H] int64, keys of draws
    protected: View  # [R], p of each request
    biased: View  # [R], leading protected tokens that have a bias
    cache: Cache  # of tails
    prefix: Cache
    weights: Weights
    log_gamma: Any  # [H] float64
    scale: float
    out: Any  # [T, Hq, D], contiguous
    lse: Any  # [T, Hq] float32, contiguous
    work: Any  # [R, H, P.work] float32
    flags: Any = None  # [R, H, MARKS] int32
    sink_logits: Any = None  # [Hq] float32, of attention sinks
    last: Any = None  # without a constant at its end, Triton 3.6 forgets the constants in the tuples of a tuple


def _padded(name: str) -> property:
    """Return a property that is an attribute rounded up to a power of two."""
    return property(lambda self: triton.next_power_of_2(max(1, getattr(self, name))))


def _offset_after(count: int) -> property:
    """Return a property that is the length of the first ``count`` parts of a workspace, each a multiple of 16."""
    return property(lambda self: sum(16 * triton.cdiv(size, 16) for size in self.work_sizes[:count]))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Compile-time constants of attention."""

    size: int  # D
    group: int  # G
    wide: bool  # products are in float32

    @property
    def padded(self) -> int:
        """D rounded up to a power of two, at least 16."""
        return max(16, triton.next_power_of_2(self.size))


@dataclass(frozen=True, kw_only=True)
class KernelConfig(Order, Heads):
    """Compile-time constants of the serving kernels: sizes and the numbers of the rule."""

    slots: int  # N
    state_pages: int
    region_words: int  # N * C / 4
    most_slots: int  # number of slots that the page table has room for
    rows: int  # query heads of a tile of decoding, at least G
    block: int  # slots of a tile of decoding, within one page
    searched: int  # scores that the search for the lowest one compares at a time
    sinks: int
    dependent: bool  # a launch begins while the one before still runs
    scorer: str = "none"  # none, key_norm, linear, mlp, mlstm, or stored: read from the score field
    masses: bool = False  # attention weights of the newest query are written to the score fields, or added if ``mean``
    gate_scores: bool = False
    threshold: float | None = None
    uses_moment_correction: bool = False
    columns: int = 0  # Fp of an mLSTM, M of an MLP
    features: int = 0  # F
    values: int = 0  # Dv
    softcap: float | None = None
    delayed: bool = True
    parts: int = 0  # blocks of columns of a token's products with a learned scorer's weights
    queries: int = 0  # newest queries that are stored in the state, G * D float32 values each
    query_word: int = 0  # first of these values in the state
    of_prompt: bool = False  # they are the last ones of a prompt that is held as a prefix, else those of the tail

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # launches are looked up by it, hundreds of times a step
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def moments(self) -> bool:
        """True if moments of evicted tokens are stored."""
        return self.residual or self.uses_moment_correction

    @property
    def state_words(self) -> int:
        """Number of float32 values in the scorer's state; moments follow it."""
        return self.features * (self.values + 1) + 1 if self.scorer == "mlstm" else 0

    padded_features, padded_values, padded_columns = map(_padded, ("features", "values", "columns"))

    @property
    def work_sizes(self) -> tuple[int, ...]:
        """Numbers of float32 values in the parts of a head's workspace.

        They are a token's products (read features, write features and values of an mLSTM, or the hidden sums of an
        MLP), readout numerators ``[Dv]``, residuals ``[slots]``, deviations ``[2, D]`` of an evicted token's key and
        value, outputs ``[G, D]`` before their correction, and logits ``[G, slots]`` in base 2.
        """
        moments, corrected = 2 * self.size * self.moments, self.group * self.size * self.uses_moment_correction
        products, slots = 2 * self.columns + self.values, self.most_slots
        return products, self.values, slots * self.residual, moments, corrected, self.group * slots * self.masses

    numerators, factors, evicted_deltas, merged, logits, work = map(_offset_after, range(1, 7))
    """Offsets of the parts of a workspace after the first, and the length of all."""


@triton.jit
def element_at(view, row, head):
    """Return the address of a head's elements in a row of a tensor; the head of a tensor ``[R]`` is 0."""
    return view.base + row * view.row + head * view.head


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
    """Return the addresses of the elements ``word`` of a head's state, a flat array over the state pages.

    Elements that are not ``inside`` get an address in the first page.
    """
    page = tl.where(inside, word // P.region_words, 0)
    return cache.state + page_of(cache, r, h, page) * cache.words + h * cache.words_head + word % P.region_words


@triton.jit
def moments_at(cache, r, h, row, column, inside, P: tl.constexpr):
    """Return the addresses of a head's moments.

    Row 0 is the mean key, row 1 the mean value, and row 2 + x the products of channel x of the key.
    """
    return state_at(cache, r, h, P.state_words + row * P.size + column, inside, P)


@triton.jit
def roles_of(step, r, P: tl.constexpr):
    """Return p, the number of sinks and the window of request r, or of several requests.

    After a prefix, the slots are those of a tail that begins with token p and has no sinks.
    """
    protected, sinks = tl.full([], 0, tl.int32), tl.full([], P.sinks, tl.int32)
    window = tl.load(element_at(step.windows, r, 0)).to(tl.int32)
    if step.protected.base is not None:
        protected = tl.load(element_at(step.protected, r, 0)).to(tl.int32)
        sinks = tl.where(protected > 0, 0, P.sinks)
    return protected, sinks, window


class Tail(NamedTuple):
    """Numbers of a head's tail before a token q is written, by which its slots have their roles."""

    since: Any  # tokens before q, q - p; or -1 if nothing is to be written, -2 if another number was seen
    protected: Any  # p
    sinks: Any
    window: Any
    first_long: Any
    budget: Any  # slots


@triton.jit
def tail_of(step, r, h, q, P: tl.constexpr):
    """Return the tail of request r, head h, before its token q is written; padding and protected tokens are not."""
    protected, sinks, window = roles_of(step, r, P)
    tokens_seen = q
    if q > protected:
        tokens_seen = tl.load(step.cache.position + word_at(step.cache, r, h, 0, P))
    since = tl.where(q < protected, -1, tl.where(tokens_seen == q, q - protected, -2))
    budget = tl.load(element_at(step.budgets, r, h)) - P.sinks + sinks
    return Tail(since, protected, sinks, window, sinks + window, budget)


@triton.jit
def used_slots(step, r, h, tail, P: tl.constexpr):
    """Return the number of slots that a tail uses."""
    used = tail.since
    if P.threshold is not None:
        filled = tl.load(step.cache.position + word_at(step.cache, r, h, 1, P), mask=tail.since > 0, other=0)
        used = tl.minimum(used, tail.first_long) + filled
    return tl.minimum(used, tail.budget)


@triton.jit
def decay_and_key(step, r, h, P: tl.constexpr):
    """Return log gamma of a head, and the key of its draws, or any number if scores are not drawn."""
    key = h
    if P.draws:
        key = tl.load(element_at(step.keys, r, h))
    return tl.load(step.log_gamma + h), key


@triton.jit
def position_of(step, r):
    """Return the position of the first token of a request."""
    return tl.load(element_at(step.positions, r, 0)).to(tl.int32)


@triton.jit
def await_launch(P: tl.constexpr):
    """Let the next launch begin, and wait until all that the launch before has written can be read.

    Launches overlap only by their beginnings; CUDA calls them programmatic dependent launches (PTX griddepcontrol).
    """
    if P.dependent:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def place_of(step, P: tl.constexpr):
    """Wait for the launch before; return head, request, workspace and flags of a program of a grid (any, H, R)."""
    await_launch(P)
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = r * tl.num_programs(1) + h
    return h, r, step.work + head * P.work, step.flags + head * MARKS


@triton.jit
def ring_slot(t, sinks, window):
    """Return the slot to which token t >= 0 of a tail is written.

    From ``sinks + window`` on, it is the slot of the token leaving the window at t.
    """
    return tl.where(t < sinks, t, sinks + (t - sinks) % window)
