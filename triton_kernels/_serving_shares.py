"""Heads that divide a layer's budget among them by their scores (Ada-KV; kvpop_vllm/kernels/reference/shared_heads.py).

A head's share lies in its state. :func:`_read_shares` makes of it what the other kernels are told: a page table, budgets, slots
in use. Where a division (:mod:`_serving_division`) has set shares, they are read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._serving_division import (
    _effectives,
    _equal_share,
    _hand_out,
    _rank,
    _shrink,
    _whole,
)
from kvpop_vllm.kernels.triton._serving_pages import (
    Asked,
    Cache,
    Plan,
    decided_before,
    page_of,
    phase_of,
    start_of,
    state_at,
    tiles_at_once,
    word_of_share,
)

from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.regions import HeadRegions


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
