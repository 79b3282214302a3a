"""Attention of a verifying step: a token and its drafts are rows of one tile, each with visible keys of its own."""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows, store_rows
from kvpop_vllm.kernels.triton._serving_attend import merged
from kvpop_vllm.kernels.triton._serving_pages import REFUSED, element_at, page_of, place_of, position_of
from kvpop_vllm.kernels.triton._softmax import add_keys, add_sinks, nothing_yet


@triton.jit
def _walk(
    cache, r, h, first_page, begin, end, used, biased,  # as in :mod:`_serving_attend`
    gone,  # address of the slots that drafts evict, or None
    rank, limit,  # [rows]: number of drafts up to a row's token, and of visible slots
    rows, scale, sums,
    P: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Run softmax attention over some blocks of slots; a row does not see what drafts up to its token have evicted."""
    most_drafts: tl.constexpr = S.drafts  # Triton does not accept an attribute as a range
    for block in range(begin, end):
        first = block * P.block
        slot = first + tl.arange(0, P.block)
        inside = slot < used
        page = page_of(cache, r, h, first_page + first // P.slots)
        place = page * cache.rows + h * cache.rows_head + first % P.slots * P.size + tl.arange(0, P.block) * P.size
        visible = inside[None, :] & (slot[None, :] < limit[:, None])
        if gone is not None:
            for i in tl.static_range(most_drafts):
                visible = visible & ((slot != tl.load(gone + i))[None, :] | (rank <= i)[:, None])
        bias = None
        if biased is not None:
            words = cache.score + h * cache.words_head + page * cache.words + slot % P.slots
            bias = tl.load(words, mask=slot < biased, other=0.0)
        _, sums = add_keys(cache.k + place, cache.v + place, inside, bias, visible, rows, scale, sums, P)
    return sums


@triton.jit
def _attend_drafts(
    step, first_tokens, drafts, gone,
    values,  # [R, H, splits, rows, D] float32: sums of the parts, if CUT
    tops,  # [R, H, splits, rows, 2]: maximum in base 2 and total of each part, if CUT
    P: tl.constexpr, S: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Compute one part of the attention of a head's token and drafts; the last part to be done merges all.

    Grid: parts, H, R.
    """
    h, r, _, flags = place_of(step, P)
    part, parts, heads = tl.program_id(0), tl.num_programs(0), tl.num_programs(1)
    used = tl.load(flags)
    c, number = position_of(step, r), tl.load(element_at(drafts, r, 0)).to(tl.int32)
    number = tl.where(c < 0, -1, number)
    row = tl.arange(0, P.rows)
    rank, head = row // P.group, h * P.group + row % P.group
    present = rank <= number
    token = tl.load(element_at(first_tokens, r, 0), mask=number >= 0, other=0)
    rows = load_rows(element_at(step.q, token + rank, head), present, P)
    if P.wide:
        rows = rows.to(tl.float32)
    sums = nothing_yet(P.rows, P.padded)
    before = tl.full([], 0, tl.int32)  # protected tokens of the request
    if step.protected.base is not None:
        before = tl.load(element_at(step.protected, r, 0)).to(tl.int32)
    right = (used != REFUSED) & (number >= 0)
    until = tl.where(right, tl.minimum(c + 1 + number, before), 0)  # protected tokens that some row sees
    blocks, ahead = (tl.maximum(used, 0) + P.block - 1) // P.block, (until + P.block - 1) // P.block
    blocks = tl.where(right, blocks, 0)
    share = (ahead + blocks + parts - 1) // parts
    begin, end = part * share, tl.minimum(ahead + blocks, (part + 1) * share)
    if step.prefix.table is not None:
        biased = None
        if step.prefix.score is not None:
            biased = tl.minimum(tl.load(element_at(step.biased, r, 0)).to(tl.int32), until)
        last = tl.minimum(end, ahead)
        sums = _walk(
            step.prefix, r, h, 0, begin, last, until, biased, None, rank, c + 1 + rank, rows, step.scale, sums, P, S
        )
        begin, end = tl.maximum(begin - ahead, 0), end - ahead
    victims = gone + (r * heads + h) * S.drafts
    sums = _walk(
        step.cache,
        r,
        h,
        P.state_pages,
        begin,
        end,
        used,
        None,
        victims,
        rank,
        used + 0 * rank,
        rows,
        step.scale,
        sums,
        P,
        S,
    )
    i = tl.arange(0, S.padded)
    inside = (i > 0) & (i <= tl.where(right & (part == 0), number, 0)) & (c + i >= before)
    place = token + tl.where(inside, i, 0)
    visible = inside[None, :] & (i[None, :] <= rank[:, None])
    key, value = element_at(step.k, place, h), element_at(step.v, place, h)
    _, sums = add_keys(key, value, inside, None, visible, rows, step.scale, sums, P)
    if CUT:
        top, total, acc = sums
        sum_row = ((r * heads + h) * parts + part) * P.rows + row
        store_rows(values + sum_row * P.size, acc, present, P)
        tl.store(tops + sum_row * 2, top, mask=present)
        tl.store(tops + sum_row * 2 + 1, total, mask=present)
        tl.debug_barrier()  # all threads have written the part
        if tl.atomic_add(flags + 4, 1) != parts - 1:
            return
        sums = merged(values, tops, sum_row - part * P.rows, P.rows, parts, present, P)
    if step.sink_logits is not None:
        sums = add_sinks(step.sink_logits + head, present, sums)
    top, total, acc = sums
    nothing = tl.where(used == REFUSED, float("nan"), 0.0)
    to = (token + rank) * heads * P.group + head
    store_rows(step.out + to * P.size, tl.where(right, acc / total[:, None], nothing), present, P)
    tl.store(step.lse + to, tl.where(right, (top + tl.log2(total)) * LN2, float("-inf") + nothing), mask=present)
