"""Heads that divide a layer's budget among them by their scores (Ada-KV; kvpop_vllm/kernels/reference/shared_heads.py).

A head's share lies in its state. :func:`_read_shares` makes of it what the other kernels are told: a page table, budgets, slots
in use. A division counts the best of all heads (:func:`_rank`), sets shares and hands pages over (:func:`_hand_out`), and has
heads evict what is too much (:func:`_shrink`), before anything moves; then shares are read again. Where none falls, all but the first
reading leave at once. Where a head's start is wrong, nothing is divided.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._serving_pages import (
    Asked,
    Cache,
    Plan,
    decided_before,
    decides_at,
    page_of,
    phase_of,
    row_at,
    start_of,
    state_at,
    tiles_at_once,
    word_at,
    word_of_share,
)
from kvpop_vllm.kernels.triton._serving_retain import _effective, _lowest
from kvpop_vllm.kernels.triton._serving_scores import _ranked

from kvpop_vllm.kernels.ops import FLOOR, RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.regions import HeadRegions

PART, WHOLE = tl.constexpr(FLOOR[0]), tl.constexpr(FLOOR[1])  # the part of an equal share that every head gets


@triton.jit
def _equal_share(asked, r, P: tl.constexpr):
    """k, and how many slot pages a head has that holds B tokens. asked: as the caller has them."""
    budget = tl.load(asked.budgets + r * asked.budgets_request)
    return budget - P.first_long, (budget + P.slots - 1) // P.slots


@triton.jit
def _whole(number, most):
    """A number of a share as int32, in [0, most] whatever lies there."""
    return tl.where(number > 0.0, tl.where(number < most.to(tl.float32), number, most.to(tl.float32)), 0.0).to(tl.int32)


@triton.jit
def _read_shares(
    cache, asked,  # as the caller has them: regions of the request, B
    table,  # [R, H, state pages + P.heads_pages] int32
    budgets,  # [R, H] int32
    valid,  # [R, H] int32
    divided,  # [R] int32: whether shares have been set in this step
    heads,
    P: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Pages, budget and slots in use of one head as its share says; equal shares at a sequence's start."""
    h, r = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    q = tl.load(asked.positions + r * asked.positions_request).to(tl.int32)
    if q < 0:
        return
    if AGAIN:
        if tl.load(divided + r) == 0:
            return
    topk, equal = _equal_share(asked, r, P)
    p = tl.arange(0, BLOCK)
    inside = p < P.share_words
    words = state_at(cache, r, h, P.share_at + 2 + p, inside, P)
    if not AGAIN:
        if q == 0:
            tl.store(cache.state + word_of_share(cache, r, h, 0, P), topk.to(tl.float32))
            tl.store(cache.state + word_of_share(cache, r, h, 1, P), 0.0)
            tl.store(cache.state + words, tl.where(p < equal, p * heads + h, -1).to(tl.float32), mask=inside)
            tl.debug_barrier()
    # where a start is wrong anything may lie there: nothing beyond the request's own regions is named
    share = _whole(tl.load(cache.state + word_of_share(cache, r, h, 0, P)), topk * heads)
    share = tl.where(start_of(cache, asked, r, h, P) < 0, topk, share)  # so that others' part of a workspace is theirs
    filled = _whole(tl.load(cache.state + word_of_share(cache, r, h, 1, P)), share)
    number = _whole(tl.load(cache.state + words, mask=inside, other=0.0), (equal + 1) * heads - 1)
    owner = (number % heads).to(tl.int64)
    own = inside & (p < P.heads_pages) & (p < (P.first_long + share + P.slots - 1) // P.slots)
    entry = cache.table + r * cache.table_request + owner * cache.table_head
    region = tl.load(entry + (P.state_pages + number // heads) * cache.table_page, mask=own, other=0)
    table += (r * heads + h) * (P.state_pages + P.heads_pages)
    tl.store(table + P.state_pages + p, region, mask=own)
    s = tl.arange(0, STATES)
    at = tl.where(s < P.state_pages, s, 0)
    tl.store(table + s, page_of(cache, r, h, at).to(tl.int32), mask=s < P.state_pages)
    used = tl.where(decided_before(q, phase_of(asked, r, P), P) > P.sinks, P.first_long + filled, q)
    tl.store(budgets + r * heads + h, P.first_long + share)
    tl.store(valid + r * heads + h, used)


@triton.jit
def _divides_at(cache, asked, r, heads, P: tl.constexpr):
    """The position of a request's token where shares are set: at the prompt's decisions, and the one on the first generated token;
    below 0 elsewhere."""
    q = tl.load(asked.positions + r * asked.positions_request).to(tl.int32)
    prompt = tl.load(asked.prompts + r * asked.prompts_request).to(tl.int32)
    q = tl.where((q <= prompt) & decides_at(q, phase_of(asked, r, P), P), q, -1)
    if q >= 0:
        for h in range(heads):
            q = tl.minimum(q, start_of(cache, asked, r, h, P))
    return q


@triton.jit
def _in_order(value):
    """float64 as int64 in the same order, and equal where they are; no number, which has no place in an order, is as low as any."""
    value = tl.where(value == value, value, float("-inf")) + 0.0  # -0.0 is 0.0
    bits = value.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _held(asked, r, h, P: tl.constexpr):
    """Long-range tokens of a head; h may be a tensor of heads, and r too."""
    used = tl.load(asked.valid + r * asked.valid_request + h * asked.valid_head)
    return tl.maximum(used - P.first_long, 0)


@triton.jit
def _leaving(q, P: tl.constexpr):
    """The first token that leaves the window at a decision, and their number."""
    first = tl.maximum(P.sinks, q + 1 - P.every - P.window)
    return first, tl.maximum(q + 1 - P.window - first, 0)


@triton.jit
def _effectives(
    cache, asked, log_gamma,
    effective,  # [R, width] int64, in the order of effective scores: of all that a decision ranks, head after head
    token,  # [R, width] int32
    heads, width,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How a block of a head's slots ranks, and those behind it by so many as there are programs."""
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q = _divides_at(cache, asked, r, heads, P)
    if q < 0:
        return
    held = _held(asked, r, h, P)
    gamma = tl.load(log_gamma + h)
    oldest, leaving = _leaving(q, P)
    before = 0
    for other in range(h):
        before += _held(asked, r, other, P) + leaving
    for first in range(tl.program_id(0) * BLOCK, P.first_long + held, tl.num_programs(0) * BLOCK):
        slot = first + tl.arange(0, BLOCK)
        ranked, t = _ranked(cache, r, h, q, P.first_long + held, slot, P)
        raw = tl.load(cache.score + word_at(cache, r, h, tl.where(ranked, slot, 0), P), mask=ranked, other=0.0)
        value = _effective(raw, tl.where(ranked, t, q - 1), q, gamma, raw, P)
        place = before + tl.where(slot >= P.first_long, slot - P.first_long, held + t - oldest)
        ranked &= place < width  # but for damaged shares always
        tl.store(effective + r * width + place, _in_order(value), mask=ranked)
        tl.store(token + r * width + place, t, mask=ranked)


@triton.jit
def _rank(
    cache, asked, whole, effective, token,
    chosen,  # [R, width] int32: 1 of the H k best
    heads, width,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which of a block of tokens, and of those behind it by so many as there are programs, are among the H k best of all heads; of equal
    ones the newer, of one token the later head's."""
    r = tl.program_id(1).to(tl.int64)
    q = _divides_at(cache, asked, r, heads, P)
    if q < 0:
        return
    _, count = _leaving(q, P)
    count *= heads
    for h in range(heads):
        count += _held(asked, r, h, P)
    count = tl.minimum(count, width)
    topk, _ = _equal_share(whole, r, P)
    if count <= heads * topk:
        return
    effective += r * width
    token += r * width
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < count
        own = tl.load(effective + place, mask=inside, other=0)
        t = tl.load(token + place, mask=inside, other=0)
        better = tl.zeros([BLOCK], tl.int32)
        for start in range(0, count, BLOCK):
            other = start + tl.arange(0, BLOCK)
            there = other < count
            value = tl.load(effective + other, mask=there, other=0)[None, :]
            age = tl.load(token + other, mask=there, other=0)[None, :]
            later = (age > t[:, None]) | ((age == t[:, None]) & (other[None, :] > place[:, None]))
            above = (value > own[:, None]) | ((value == own[:, None]) & later)
            better += tl.sum((above & there[None, :]).to(tl.int32), 1)
        tl.store(chosen + r * width + place, (better < heads * topk).to(tl.int32), mask=inside)


@triton.jit
def _hand_out(
    cache, asked, whole, chosen,
    numbers,  # [R, 2, NUMBERS] int32: which region numbers are taken; those that are free, in order
    shares,  # [R, H] int32
    excess,  # [R, H] int32: how many tokens each head has to evict
    divided,  # [R] int32: whether shares are set
    heads, width,
    P: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """New shares of a request's heads; pages that a head needs no more go to those that need more. None where all that is ranked
    fits."""
    r = tl.program_id(0).to(tl.int64)
    tl.store(divided + r, 0)
    q = _divides_at(cache, asked, r, heads, P)
    if q < 0:
        return
    _, leaving = _leaving(q, P)
    topk, equal = _equal_share(whole, r, P)
    count = heads * leaving
    for h in range(heads):
        count += _held(asked, r, h, P)
    count = tl.minimum(count, width)
    if count <= heads * topk:
        return

    tl.store(divided + r, 1)
    shares += r * heads
    excess += r * heads
    n, p = tl.arange(0, NUMBERS), tl.arange(0, TABLE)
    taken = numbers + r * 2 * NUMBERS
    free = taken + NUMBERS
    tl.store(taken + n, 0)
    tl.debug_barrier()
    chosen += r * width
    total = 0
    before = 0
    for h in range(heads):
        held = _held(asked, r, h, P)
        best = tl.zeros([BLOCK], tl.int32)
        for start in range(0, held + leaving, BLOCK):
            place = start + tl.arange(0, BLOCK)
            best += tl.load(chosen + place, mask=place < held + leaving, other=0)
        chosen += held + leaving
        total += (WHOLE - PART) * tl.sum(best, 0) + PART * topk
        end = (2 * total + WHOLE) // (2 * WHOLE)  # rounded, so that all together are H k
        share = end - before
        before = end
        tl.store(shares + h, share)
        tl.store(excess + h, tl.maximum(held - share, 0))
        kept = tl.minimum(_pages_of_head(asked, r, h, P), (P.first_long + share + P.slots - 1) // P.slots)
        word = state_at(cache, r, h, P.share_at + 2 + p, p < kept, P)
        mine = _whole(tl.load(cache.state + word, mask=p < kept, other=0.0), (equal + 1) * heads - 1)
        tl.store(taken + mine, 1, mask=p < kept)
    tl.debug_barrier()
    unused = (n < (equal + 1) * heads) & (tl.load(taken + n) == 0)
    tl.store(free + tl.cumsum(unused.to(tl.int32), 0) - 1, n, mask=unused)
    tl.debug_barrier()
    for h in range(heads):
        share = tl.load(shares + h)
        needs = (P.first_long + share + P.slots - 1) // P.slots
        kept = tl.minimum(_pages_of_head(asked, r, h, P), needs)
        gets = (p >= kept) & (p < needs)
        number = tl.load(free + p - kept, mask=gets, other=-1).to(tl.float32)
        changes = (p >= kept) & (p < P.share_words)
        word = state_at(cache, r, h, P.share_at + 2 + p, changes, P)
        tl.store(cache.state + word, number, mask=changes)
        tl.store(cache.state + word_of_share(cache, r, h, 0, P), share.to(tl.float32))
        free += needs - kept


@triton.jit
def _pages_of_head(asked, r, h, P: tl.constexpr):
    """Slot pages of a head as its share was."""
    budget = tl.load(asked.budgets + r * asked.budgets_request + h * asked.budgets_head)
    return (budget + P.slots - 1) // P.slots


@triton.jit
def _shrink(
    cache, asked, log_gamma, excess, divided, heads,
    P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """A head evicts the lowest of its long-range tokens, one after another; the last ones move into their slots. Moments take them
    in, their products here too: this is rare. cache: as the shares were."""
    h, r = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(divided + r) == 0:
        return
    q = tl.load(asked.positions + r * asked.positions_request).to(tl.int32)
    many = tl.load(excess + r * heads + h)
    if many == 0:
        return
    column = tl.arange(0, P.padded)
    fits = column < P.size
    held = _held(asked, r, h, P)
    gamma = tl.load(log_gamma + h)
    if P.moments:
        evicted = decided_before(q, phase_of(asked, r, P), P) - P.sinks - held
        value_at = state_at(cache, r, h, P.state_words + P.size + column, fits, P)
        kept = column < tl.where(evicted > 0, P.size, 0)
        mean_value = tl.load(cache.state + value_at, mask=kept, other=0.0)
    for _ in range(many):
        used = P.first_long + held
        _, victim = _lowest(cache, cache.score, r, h, used, q, gamma, P, BLOCK)
        last = used - 1
        gone = tl.where(victim < 0, last, victim)  # where no score is a number
        at, to = row_at(cache, r, h, gone, P), word_at(cache, r, h, gone, P)
        if P.moments:
            x_value = tl.load(cache.v + at + column, mask=fits, other=0.0).to(tl.float32)
            begun = tl.where(evicted > 0, P.size, 0)
            evicted += 1
            deviation = x_value - mean_value
            mean_value += deviation / evicted
            for first in range(0, P.size, BLOCK_X):
                place = first + tl.arange(0, BLOCK_X)
                own = tl.load(cache.k + at + place, mask=place < P.size, other=0.0).to(tl.float32)
                word = state_at(cache, r, h, P.state_words + place, place < P.size, P)
                inside = (place < P.size)[:, None] & fits[None, :]
                cell = P.state_words + (2 + place)[:, None] * P.size + column[None, :]
                cells = state_at(cache, r, h, cell, inside, P)
                there = (place < begun)[:, None] & fits[None, :]
                products = tl.load(cache.state + cells, mask=there, other=0.0)
                old = tl.load(cache.state + word, mask=place < begun, other=0.0)
                new = old + (own - old) / evicted
                tl.debug_barrier()
                tl.store(cache.state + cells, products + (own - new)[:, None] * deviation[None, :], mask=inside)
                tl.store(cache.state + word, new, mask=place < P.size)
                tl.debug_barrier()
        row, word = row_at(cache, r, h, last, P), word_at(cache, r, h, last, P)
        key = tl.load(cache.k + row + column, mask=fits, other=0.0)
        value = tl.load(cache.v + row + column, mask=fits, other=0.0)
        raw, t = tl.load(cache.score + word), tl.load(cache.position + word)
        tl.debug_barrier()  # all has been read
        tl.store(cache.k + at + column, key, mask=fits)
        tl.store(cache.v + at + column, value, mask=fits)
        tl.store(cache.score + to, raw)
        tl.store(cache.position + to, t)
        tl.debug_barrier()
        held -= 1
    if P.moments:
        tl.store(cache.state + value_at, mean_value, mask=fits)
    tl.store(cache.state + word_of_share(cache, r, h, 1, P), held.to(tl.float32))


def shared_pages(layout: PageLayout, columns: int, rule: RetentionRule) -> dict[str, int]:
    """What a :class:`Plan` says of shares. columns: of a page table, for slots.

    Raises:
        ValueError: the rule's tables of shares are too small for them.
    """
    first, n, heads, equal = rule.first_long, layout.block_slots, layout.num_kv_heads, columns - HeadRegions.spare
    most = cdiv(first + heads * (equal * n - first), n)
    if most > rule.share_pages:
        raise ValueError(f"shares of a budget of {equal * n} do not fit {rule.share_pages} pages a head")
    at = rule.state_floats(layout.head_size) - rule.share_floats
    return {"heads_pages": most, "equal_pages": equal, "share_words": rule.share_pages, "share_at": at}


class SharedHeads:
    """The heads of R requests during a step.

    Args:
        whole: as the caller has it: pages, B and slots in use of equal shares.

    Attributes:
        cache, asked: with pages, budgets and slots in use as the shares are.
    """

    def __init__(self, plan: Plan, cache: Cache, whole: Asked, requests: int, heads: int):
        self.plan, self.regions, self.whole, self.grid = plan, cache, whole, (heads, requests)
        width = plan.state_pages + plan.heads_pages
        table, budgets, valid = (
            self._ints(requests, heads, width),
            self._ints(requests, heads),
            self._ints(requests, heads),
        )
        self.cache = cache._replace(table=table, table_request=heads * width, table_head=width, table_page=1)
        self.asked = whole._replace(
            budgets=budgets, budgets_request=heads, budgets_head=1, valid=valid, valid_request=heads, valid_head=1
        )
        self._divided = self._ints(requests)
        self._read(again=False)

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.regions.table.device)

    def _read(self, again: bool) -> None:
        """Pages, budgets and slots in use by the shares; again: where these have been set since."""
        plan, (heads, _) = self.plan, self.grid
        sizes = {"BLOCK": triton.next_power_of_2(plan.share_words), "STATES": triton.next_power_of_2(plan.state_pages)}
        told = self.cache.table, self.asked.budgets, self.asked.valid, self._divided, heads
        _read_shares[self.grid](self.regions, self.whole, *told, P=plan, AGAIN=again, **sizes, num_warps=4)

    def divide(self, log_gamma: torch.Tensor, searched: int) -> None:
        """New shares where a decision of the prompt falls and what is ranked does not fit. Scores of what leaves the window lie
        in their words; searched: slots that a search compares at a time."""
        plan, (heads, requests) = self.plan, self.grid
        width = heads * (plan.equal_pages * plan.slots - plan.first_long + plan.every)
        token, chosen = self._ints(requests, width), self._ints(requests, width)
        shares, excess = self._ints(requests, heads), self._ints(requests, heads)
        effective = torch.empty(requests, width, dtype=torch.int64, device=token.device)
        exact = {"P": plan, "num_warps": 4, "enable_fp_fusion": False}
        _effectives[tiles_at_once(plan.usual_slots, 128, requests * heads, token.device), heads, requests](
            self.cache, self.asked, log_gamma, effective, token, heads, width, BLOCK=128, **exact
        )
        _rank[tiles_at_once(width, 64, requests, token.device), requests](
            self.cache, self.asked, self.whole, effective, token, chosen, heads, width, P=plan, BLOCK=64, num_warps=4
        )
        count = triton.next_power_of_2((plan.equal_pages + HeadRegions.spare) * heads)
        numbers, table = self._ints(requests, 2, count), triton.next_power_of_2(plan.share_words)
        _hand_out[requests,](
            self.cache, self.asked, self.whole, chosen, numbers, shares, excess, self._divided, heads, width,
            P=plan, BLOCK=1024, NUMBERS=count, TABLE=table, num_warps=4,
        )  # fmt: skip
        told = log_gamma, excess, self._divided, heads
        _shrink[self.grid](self.cache, self.asked, *told, BLOCK=searched, BLOCK_X=32, **exact)
        self._read(again=True)
