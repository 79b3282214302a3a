"""Commits and tokens of a verifying step, and the plan of its drafts, which change nothing in the pages.

A draft never leaves the window within its step, so what it evicts is among the slots: :func:`_plan` finds one slot, or
none, for each draft. Attention then leaves that slot out for this draft and later ones (:mod:`_verify_attend`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton import _serving_pages as pages
from kvpop_vllm.kernels.triton import _serving_scores as scores
from kvpop_vllm.kernels.triton._lowest_score import effective, lower_of, lowest_of, none_yet
from kvpop_vllm.kernels.triton._serving_pages import (
    PADDING,
    REFUSED,
    element_at,
    page_of,
    place_of,
    row_at,
    state_at,
    word_at,
)
from kvpop_vllm.kernels.triton._serving_retain import read_mlstm, retain, stateless_score
from kvpop_vllm.kernels.triton._serving_scores import features_of, gates_of

COUNTS = tl.constexpr(4)
"""Numbers of int32 per head that :func:`_collect` leaves: tokens to process, the position of the first, of which the last is
the token at c unless the request only commits, and whether the step is in order. The last one is not used.
"""


@dataclass(frozen=True)
class Staging:
    """Compile-time constants of staged drafts (:class:`kvpop_vllm.cache.pages.PageLayout`).

    Attributes:
        drafts: m.
        begin: byte of the state at which staged drafts begin.
        bytes: size of a staged draft.
        region: bytes of a block of one head.
        item: bytes of an element of a key.
        words: words of key, value and queries, ahead of the score.
        ahead: words of a block ahead of its positions.
    """

    drafts: int
    begin: int
    bytes: int
    region: int
    item: int
    words: int
    ahead: int

    @property
    def steps(self) -> int:
        """Largest number of tokens of a request, the one at c and its drafts; also of those that are processed first."""
        return self.drafts + 1

    @property
    def padded(self) -> int:
        """Number of lanes that hold all drafts of a request, and its token at c: a power of two of at least 16."""
        return max(16, triton.next_power_of_2(self.steps))

    @property
    def fit(self) -> int:
        """Number of drafts that the first block with drafts has room for."""
        return (self.region - self.begin % self.region) // self.bytes


@triton.jit
def _staged_at(cache, r, h, i, P: tl.constexpr, S: tl.constexpr):
    """Return the offsets of staged drafts i: of the key in ``cache.k``, the score in ``state``, the position in ``position``."""
    inside, later = i < S.fit, i - S.fit
    many: tl.constexpr = S.region // S.bytes
    page = S.begin // S.region + tl.where(inside, 0, 1 + later // many)
    byte = tl.where(inside, S.begin % S.region + i * S.bytes, later % many * S.bytes)
    block = page_of(cache, r, h, page)
    word = block * cache.words + h * cache.words_head + byte // 4 + S.words
    return block * cache.rows + h * cache.rows_head + byte // S.item, word, word + 1 - S.ahead


@triton.jit
def _collect(
    step, first_tokens, drafts,
    k, v,  # [R, m + 1, H, D]: the tokens to process
    gate_scores,  # [R, m + 1, H] float32, or None
    counts,  # [R, H, COUNTS] int32
    P: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Collect the staged drafts that are committed, and the token at c, of one head.

    Grid: 1, H, R.
    """
    pages.await_launch(P)
    h, r, heads = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    c, number = pages.position_of(step, r), tl.load(element_at(drafts, r, 0)).to(tl.int32)
    protected, _, window = pages.roles_of(step, r, P)
    i, column = tl.arange(0, S.padded), tl.arange(0, P.padded)
    count, right, staged = c, (c >= 0) & (number <= window), tl.full([], 0, tl.int32)
    if c > protected:
        count = tl.load(step.cache.position + word_at(step.cache, r, h, 0, P))
        staged = tl.minimum(tl.maximum(c - count, 0), S.drafts)
        places = _staged_at(step.cache, r, h, tl.minimum(i, S.drafts - 1), P, S)
        position = tl.load(step.cache.position + places[2], mask=i < staged, other=-1)
        right = right & (c - count == staged) & (tl.sum(((i < staged) & (position != count + i)).to(tl.int32), 0) == 0)
    begin = tl.where(c > protected, tl.maximum(count, protected), c)
    committed = tl.where(right, c - begin, 0)
    fits = column < P.size
    for j in range(0, committed):
        row, word, place = _staged_at(step.cache, r, h, begin - count + j, P, S)
        to = (r * S.steps + j) * heads + h
        tl.store(k + to * P.size + column, tl.load(step.cache.k + row + column, mask=fits), mask=fits)
        tl.store(v + to * P.size + column, tl.load(step.cache.k + row + P.size + column, mask=fits), mask=fits)
        if gate_scores is not None:
            tl.store(gate_scores + to, tl.load(step.cache.state + word))
    new = right & (number >= 0)
    token, to = tl.load(element_at(first_tokens, r, 0), mask=new, other=0), (r * S.steps + committed) * heads + h
    new_column = column < tl.where(new, P.size, 0)
    tl.store(k + to * P.size + column, tl.load(element_at(step.k, token, h) + column, mask=new_column), mask=new_column)
    tl.store(v + to * P.size + column, tl.load(element_at(step.v, token, h) + column, mask=new_column), mask=new_column)
    if gate_scores is not None:
        tl.store(gate_scores + to, tl.load(element_at(step.gate_scores, token, h), mask=new), mask=new)
    counts += (r * heads + h) * COUNTS
    tl.store(counts, committed + new.to(tl.int32))
    tl.store(counts + 1, begin)
    tl.store(counts + 2, tl.where(right, 1, tl.where(c < 0, 0, -1)))


@triton.jit
def _advance(step, counts, P: tl.constexpr, S: tl.constexpr):
    """Run the ordinary steps of the tokens to process of one head, without attention.

    Phases follow each other as in :mod:`_prefill_steps`. Grid: 1, H, R.
    """
    h, r, work, flags = place_of(step, P)
    counts += (r * tl.num_programs(1) + h) * COUNTS
    begin, right = tl.load(counts + 1), tl.load(counts + 2)
    used, protected = tl.where(right < 0, REFUSED, PADDING), tl.full([], 0, tl.int32)
    for i in tl.range(0, tl.load(counts), num_stages=1):
        row, q = r * S.steps + i, begin + i
        if P.parts > 0:
            lane = tl.arange(0, scores.ROWS)  # a tile of products, of which one row is used
            one = tl.where(lane == 0, q, -1)
            for part in range(P.parts):
                scores.project(step, work + 0 * lane, row + 0 * lane, r + 0 * lane, h, one, part, P)
            tl.debug_barrier()
        if P.scorer == "mlstm":
            if pages.tail_of(step, r, h, q, P).since >= 0:
                for column in range(0, P.values, scores.CELLS):
                    scores.update_cells(step, work, row, r, h, q, column, P)
                tl.debug_barrier()
        victim = scores.victim_of(step, work, r, h, q, P)
        used, evicted, gone, protected = retain(step, work, victim, row, r, h, q, P)
        tl.debug_barrier()
    tl.store(flags, used)
    tl.store(flags + 3, protected)
    tl.store(flags + 4, 0)


@triton.jit
def _draft(step, counts, drafts, r, h, heads, P: tl.constexpr):
    """Return c, and the number of drafts of a request whose step is in order, else 0."""
    number = tl.load(element_at(drafts, r, 0)).to(tl.int32)
    right = tl.load(counts + (r * heads + h) * COUNTS + 2)
    return pages.position_of(step, r), tl.where(right > 0, tl.maximum(number, 0), 0)


@triton.jit(do_not_specialize=["lanes"])
def _project_drafts(step, counts, first_tokens, drafts, work, lanes, P: tl.constexpr, S: tl.constexpr):
    """Run the products of drafts with scorer weights. Grid: 16 drafts, 64 columns, H."""
    pages.await_launch(P)
    h, heads = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    lane = tl.program_id(0) * scores.ROWS + tl.arange(0, scores.ROWS)
    inside = lane < lanes
    lane = tl.where(inside, lane, 0).to(tl.int64)
    r, i = lane // S.drafts, lane % S.drafts
    c, number = _draft(step, counts, drafts, r, h, heads, P)
    row = tl.load(element_at(first_tokens, r, 0), mask=inside & (i < number), other=0) + 1 + i
    q = tl.where(inside & (i < number), c + 1 + i, -1)
    row = tl.where(q < 0, 0, row)
    scores.project(step, work + (lane * heads + h) * P.work, row, r, h, q, tl.program_id(1), P)


@triton.jit
def _draft_cells(step, counts, first_tokens, drafts, work, P: tl.constexpr, S: tl.constexpr):
    """Read out a block of columns of an mLSTM's cells after each draft; the cells in the pages stay as they are.

    Grid: 32 columns, H, R.
    """
    h, r, _, _ = place_of(step, P)
    heads = tl.num_programs(1)
    c, number = _draft(step, counts, drafts, r, h, heads, P)
    token = tl.load(element_at(first_tokens, r, 0), mask=number > 0, other=0)
    protected, _, _ = pages.roles_of(step, r, P)
    column, f = tl.program_id(0) * scores.CELLS + tl.arange(0, scores.CELLS), tl.arange(0, P.padded_features)
    fits = column < P.values
    inside = (f < P.features)[:, None] & fits[None, :]
    address = state_at(step.cache, r, h, f[:, None] * P.values + column[None, :], inside, P)
    number = tl.where(c >= protected, number, 0)  # before a tail begins, nothing leaves the window
    present = (f < tl.where(number > 0, P.features, 0))[:, None] & fits[None, :]
    cells = tl.load(address, mask=present, other=0.0)
    m = tl.load(state_at(step.cache, r, h, P.state_words - 1, True, P), mask=number > 0, other=0.0)
    for i in range(0, number):
        row, draft_work = token + 1 + i, work + ((r * S.drafts + i) * heads + h) * P.work
        m, keep, gain = gates_of(step, m, row, h, c + 1 + i, P)
        if step.weights.v_proj is not None:
            value = tl.load(draft_work + 2 * P.columns + column, mask=fits, other=0.0)
        else:
            value = tl.load(element_at(step.v, row, h) + column, mask=fits, other=0.0).to(tl.float32)
        write = features_of(draft_work + P.columns, P) * gain
        cells = cells * keep + write[:, None] * value[None, :]
        tl.store(draft_work + P.numerators + column, tl.sum(features_of(draft_work, P)[:, None] * cells, 0), mask=fits)


@triton.jit
def _lowest(step, r, h, q, first, end, gone, P: tl.constexpr):
    """Return the lowest effective score at q of slots ``[first, end)`` that are not in ``gone``, and its slot or -1."""
    cache = step.cache
    gamma, key = pages.decay_and_key(step, r, h, P)
    best, oldest, place = none_yet(P.searched)
    for start in range(first, end, P.searched):
        slot = start + tl.arange(0, P.searched)
        left = tl.max((slot[:, None] == gone[None, :]).to(tl.int32), 1)
        inside = (slot < end) & (left == 0)
        word = word_at(cache, r, h, tl.where(inside, slot, 0), P)
        raw = tl.load(cache.score + word, mask=inside, other=0.0)
        token = tl.load(cache.position + word, mask=inside, other=0)
        best, oldest, place = lower_of(best, oldest, place, raw, token, slot, inside, q, gamma, raw, key, P)
    return lowest_of(best, oldest, place)


@triton.jit
def _plan(
    step, counts, first_tokens, drafts, work,
    gone,  # [R, H, m] int32: slot of the token that each draft evicts, -1 for none
    P: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Find the victim of each draft of one head, by as many searches.

    Tokens that have left the window keep their ring slots, by which attention finds them. Grid: 1, H, R.
    """
    h, r, _, _ = place_of(step, P)
    heads, cache = tl.num_programs(1), step.cache
    c, number = _draft(step, counts, drafts, r, h, heads, P)
    token = tl.load(element_at(first_tokens, r, 0), mask=number > 0, other=0)
    tail = pages.tail_of(step, r, h, c + 1, P)
    lane, f, column = tl.arange(0, S.padded), tl.arange(0, P.padded_features), tl.arange(0, P.padded)
    raws, left = (
        tl.zeros([S.padded], tl.float32),
        tl.full([S.padded], -1, tl.int32),
    )  # of tokens that have left the window
    entered, out = tl.full([S.padded], 0, tl.int32), tl.full([S.padded], -1, tl.int32)
    used, state = tl.full([], 0, tl.int32), tl.where((c >= tail.protected) & (number > 0), 1, 0)
    if state > 0:
        used = pages.used_slots(step, r, h, tail, P)
    filled = used
    if P.scorer == "mlstm" and P.delayed:
        z = tl.load(
            state_at(cache, r, h, P.features * P.values + f, f < P.features, P), mask=f < state * P.features, other=0.0
        )
        m = tl.load(state_at(cache, r, h, P.state_words - 1, True, P), mask=state > 0, other=0.0)
    for i in range(0, number):
        q, since = c + 1 + i, tail.since + i
        draft_work = work + ((r * S.drafts + i) * heads + h) * P.work
        if P.scorer == "mlstm" and P.delayed:
            m, keep, gain = gates_of(step, m, token + 1 + i, h, q, P)
            z = z * keep + features_of(draft_work + P.columns, P) * gain
        if (state > 0) & (since >= tail.first_long):
            u, slot = q - tail.window, pages.ring_slot(since, tail.sinks, tail.window)
            fits = column < P.size
            place = row_at(cache, r, h, slot, P) + column
            key = tl.load(cache.k + place, mask=fits, other=0.0).to(tl.float32)
            value = tl.load(cache.v + place, mask=fits, other=0.0).to(tl.float32)
            raw = tl.load(cache.score + word_at(cache, r, h, slot, P))
            if P.scorer != "mlstm":
                raw = stateless_score(step, draft_work, h, key, value, raw, P)
            elif P.delayed:
                raw = read_mlstm(step, draft_work, z, m, h, key, value, P)
            leaves, enters, removed = tl.full([], -1, tl.int32), tl.full([], 1, tl.int32), tl.full([], -1, tl.int32)
            if used >= tail.budget:
                gamma, draws = pages.decay_and_key(step, r, h, P)
                lowest, victim = _lowest(step, r, h, q, tail.first_long, filled, out, P)
                best, oldest, nearest = none_yet(S.padded)
                best, oldest, nearest = lower_of(
                    best, oldest, nearest, raws, left, lane, entered > 0, q, gamma, raws, draws, P
                )
                newer, newest = lowest_of(best, oldest, nearest)
                if newer < lowest:  # of equal scores the older token leaves, which is in a long-range slot
                    lowest, removed = newer, newest
                    victim = pages.ring_slot(tail.since + newest, tail.sinks, tail.window)
                if (victim < 0) | (effective(raw, u, q, gamma, raw, draws, P) < lowest):
                    victim, enters, removed = slot, tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
                leaves = victim
            if P.threshold is not None:
                if raw.to(tl.float64) < P.threshold:
                    leaves, enters, removed = slot, tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
            entered = tl.where(lane == removed, 0, tl.where(lane == i, enters, entered))
            raws, left = tl.where(lane == i, raw, raws), tl.where(lane == i, u, left)
            out = tl.where(lane == i, leaves, out)
            used = tl.where(leaves < 0, used + 1, used)
        else:
            used = tl.where(state > 0, used + 1, used)
    tl.store(gone + (r * heads + h) * S.drafts + lane, out, mask=lane < S.drafts)


@triton.jit
def _stage(step, counts, first_tokens, drafts, P: tl.constexpr, S: tl.constexpr):
    """Stage one draft of one head, or mark the end of the staged ones. Grid: m, H, R."""
    h, r, _, _ = place_of(step, P)
    heads, i = tl.num_programs(1), tl.program_id(0)
    c, number = _draft(step, counts, drafts, r, h, heads, P)
    right = tl.load(counts + (r * heads + h) * COUNTS + 2) > 0
    protected, _, _ = pages.roles_of(step, r, P)
    if right & (c + number >= protected) & (i <= number):
        row, word, position = _staged_at(step.cache, r, h, i, P, S)
        tl.store(step.cache.position + position, tl.where(i < number, c + 1 + i, -1))
        if i < number:
            column = tl.arange(0, P.padded)
            fits, token = column < P.size, tl.load(element_at(first_tokens, r, 0)) + 1 + i
            key = tl.load(element_at(step.k, token, h) + column, mask=fits)
            tl.store(step.cache.k + row + column, key, mask=fits)
            tl.store(
                step.cache.k + row + P.size + column,
                tl.load(element_at(step.v, token, h) + column, mask=fits),
                mask=fits,
            )
            if P.gate_scores:
                tl.store(step.cache.state + word, tl.load(element_at(step.gate_scores, token, h)))
        if (i == 0) & (c < protected):  # the tail has not begun
            tl.store(step.cache.position + word_at(step.cache, r, h, 0, P), c + 1)
