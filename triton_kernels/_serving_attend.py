"""Attention over the slots in use, split among programs, whose results are merged.

Further kernels add the moment correction and convert logits to attention masses per slot.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2, LOG2E, PRECISION
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows, store_rows
from kvpop_vllm.kernels.triton._serving_pages import MARKS, REFUSED, element_at, moments_at, page_of, word_at
from kvpop_vllm.kernels.triton._softmax import add_keys, faded


@triton.jit
def _walk(
    cache, r, h,
    first_page, begin, end, used,  # page of slot 0; blocks of slots, of the first ``used``
    biased,  # number of leading slots that have a bias, or None
    logits,  # address of slot 0's logits, [GROUP]
    rows, scale, top, total, acc,
    P: tl.constexpr, GROUP: tl.constexpr, BLOCK_S: tl.constexpr, WIDE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Run softmax attention over some blocks of slots; if KEPT, store the logits, because masses are needed."""
    for block in range(begin, end):
        first = block * BLOCK_S
        slot = first + tl.arange(0, BLOCK_S)
        seen = slot < used
        page = page_of(cache, r, h, first_page + first // P.slots)
        place = page * cache.rows + h * cache.rows_head + first % P.slots * P.size + tl.arange(0, BLOCK_S) * P.size
        bias = None
        if biased is not None:
            words = cache.score + h * cache.words_head + page * cache.words + slot % P.slots
            bias = tl.load(words, mask=slot < biased, other=0.0)
        found, top, total, acc = add_keys(
            cache.k + place, cache.v + place, seen, bias, seen[None, :],
            rows, scale, top, total, acc, P.size, P.padded, WIDE,
        )  # fmt: skip
        if KEPT:
            tl.store(
                logits[:, None] + slot[None, :], found, mask=(tl.arange(0, GROUP) < P.group)[:, None] & seen[None, :]
            )
    return top, total, acc


@triton.jit
def _merged(sums, tops, part, parts, present, P: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr):
    """Return maxima, totals and sums of all parts of a head's attention; those of its query heads begin at ``part``.

    Other programs have written the parts, so they are not read through this one's cache.
    """
    column = tl.arange(0, PADDED)
    inside = present[:, None] & (column < P.size)[None, :]
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, PADDED], tl.float32)
    for i in range(parts):
        own_top = tl.load(tops + (part + i) * 2, mask=present, other=0.0, cache_modifier=".cg")
        own_total = tl.load(tops + (part + i) * 2 + 1, mask=present, other=1.0, cache_modifier=".cg")
        own = sums + (part + i)[:, None] * P.size + column[None, :]
        new_top = tl.maximum(top, own_top)
        pivot, fade = faded(top, new_top)
        gain = tl.exp2(own_top - pivot)
        total = total * fade + own_total * gain
        acc = acc * fade[:, None] + tl.load(own, mask=inside, other=0.0, cache_modifier=".cg") * gain[:, None]
        top = new_top
    return top, total, acc


@triton.jit
def _attend(
    step, cache, prefix,
    out, lse,  # [R, Hq, D], [R, Hq]
    sums,  # [R, Hq, splits, D] float32: sums of the parts, if CUT
    tops,  # [R, Hq, splits, 2]: maximum in base 2 and total of each part, if CUT
    logits,  # [R, Hq, slots], in base 2, if masses are needed
    step_flags, scale,
    P: tl.constexpr, GROUP: tl.constexpr, CUT: tl.constexpr, BLOCK_S: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one part of a head's attention, for all of its query heads; the last part to be done merges all.

    A part is a range of the head's protected tokens and slots. BLOCK_S divides N, so that a block of slots
    lies in one page.

    Grid: parts, H, R. 16.8 MB of keys and values: 4.7 us; 298 us for 64 requests.
    """
    part, h, r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    splits, heads = tl.num_programs(0), tl.num_programs(1)
    padded: tl.constexpr = P.padded  # Triton 3.6 does not accept an attribute in a shape
    step_flags += (r * heads + h) * MARKS
    used = tl.load(step_flags)
    g = tl.arange(0, GROUP)
    present = g < P.group
    rows = load_rows(element_at(step.q, r, h * P.group + g), present, P.size, padded)
    if WIDE:
        rows = rows.to(tl.float32)

    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, padded], tl.float32)
    head = (r * heads + h) * P.group + g  # index in [R, Hq]
    own, found = logits + head * P.most_slots, used
    blocks, ahead = (tl.maximum(used, 0) + BLOCK_S - 1) // BLOCK_S, 0
    if prefix.table is not None:
        protected = tl.load(step_flags + 3)
        found += protected
        ahead = (protected + BLOCK_S - 1) // BLOCK_S
    share = (ahead + blocks + splits - 1) // splits
    begin, end = part * share, tl.minimum(ahead + blocks, (part + 1) * share)
    if prefix.table is not None:
        biased = None
        if prefix.score is not None:
            biased = tl.minimum(tl.load(element_at(step.biased, r, 0)).to(tl.int32), protected)
        top, total, acc = _walk(
            prefix, r, h, 0, begin, tl.minimum(end, ahead), protected, biased, own,
            rows, scale, top, total, acc, P, GROUP, BLOCK_S, WIDE, False,
        )  # fmt: skip
        begin, end = tl.maximum(begin - ahead, 0), end - ahead
    top, total, acc = _walk(
        cache, r, h, P.state_pages, begin, end, used, None, own,
        rows, scale, top, total, acc, P, GROUP, BLOCK_S, WIDE, P.masses,
    )  # fmt: skip
    if CUT:
        row = head * splits + part
        store_rows(sums + row * P.size, acc, present, P.size, padded)
        tl.store(tops + row * 2, top, mask=present)
        tl.store(tops + row * 2 + 1, total, mask=present)
        tl.debug_barrier()  # all threads have written the part
        if tl.atomic_add(step_flags + 4, 1) != splits - 1:
            return
        top, total, acc = _merged(sums, tops, head * splits, splits, present, P, GROUP, padded)
    nothing = tl.where(found == REFUSED, float("nan"), 0.0)  # 0 for padding
    acc = tl.where(found > 0, acc / total[:, None], nothing)
    store_rows(out + head * P.size, acc, present, P.size, padded)
    tl.store(lse + head, tl.where(found > 0, (top + tl.log2(total)) * LN2, float("-inf") + nothing), mask=present)


@triton.jit
def _correct(
    step, cache, merged, lse, out, step_flags, scale,
    P: tl.constexpr, GROUP: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Add the evicted tokens' estimated contribution to a block of columns of the output.

    ``merged`` is ``[R, Hq, D]`` float32.

    Grid: 64 columns, H, R. 0.5 MB of moments: 0.15 us; 9 us for 64 requests.
    """
    first, h, r = tl.program_id(0) * BLOCK_C, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = r * tl.num_programs(1) + h
    count = tl.load(step_flags + head * MARKS + 1)
    g, column = tl.arange(0, GROUP), first + tl.arange(0, BLOCK_C)
    present, fits = g < P.group, column < P.size
    inside = present[:, None] & fits[None, :]
    query = element_at(step.q, r, h * P.group + g)
    head = head * P.group + g
    acc = tl.load(merged + head[:, None] * P.size + column[None, :], mask=inside, other=0.0)
    if count > 0:
        predicted = tl.zeros([GROUP, BLOCK_C], tl.float32)
        mass = tl.zeros([GROUP], tl.float32)
        for x in range(0, P.size, BLOCK_X):
            place = x + tl.arange(0, BLOCK_X)
            there = place < P.size
            at = query[:, None] + place[None, :]
            rows = tl.load(at, mask=present[:, None] & there[None, :], other=0.0).to(tl.float32)
            mean_key = tl.load(cache.state + moments_at(cache, r, h, 0, place, there, P), mask=there, other=0.0)
            mass += tl.sum(rows * mean_key[None, :], 1)
            usable = there[:, None] & fits[None, :]
            at = cache.state + moments_at(cache, r, h, (2 + place)[:, None], column[None, :], usable, P)
            predicted = tl.dot(rows, tl.load(at, mask=usable, other=0.0), predicted, input_precision=PRECISION)
        mean = tl.load(cache.state + moments_at(cache, r, h, 1, column, fits, P), mask=fits, other=0.0)
        evicted = mean[None, :] + predicted * (scale / count)
        mass = tl.log(count.to(tl.float32)) + scale * mass
        share = 1.0 / (1.0 + tl.exp(tl.load(lse + head, mask=present, other=0.0) - mass))
        acc += share[:, None] * (evicted - acc)
    tl.store(out + head[:, None] * P.size + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _masses(logits, lse, cache, step_flags, P: tl.constexpr, GROUP: tl.constexpr, BLOCK_S: tl.constexpr):
    """Write attention masses to the score fields of a block of slots, or add them.

    A mass is the query's weight over a slot, averaged over the query heads.

    Grid: 128 slots, H, R. 0.7 MB of logits and scores: 0.2 us; 12 us for 64 requests.
    """
    first, h, r = tl.program_id(0) * BLOCK_S, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = r * tl.num_programs(1) + h
    used = tl.load(step_flags + head * MARKS)
    if first >= used:
        return
    g, slot = tl.arange(0, GROUP), first + tl.arange(0, BLOCK_S)
    present, seen = g < P.group, slot < used
    head = head * P.group + g
    top = tl.load(lse + head, mask=present, other=0.0) * LOG2E
    inside = present[:, None] & seen[None, :]
    own = tl.load(logits + head[:, None] * P.most_slots + slot[None, :], mask=inside, other=float("-inf"))
    mass = tl.sum(tl.where(inside, tl.exp2(own - top[:, None]), 0.0), 0) / P.group
    at = cache.score + word_at(cache, r, h, tl.where(seen, slot, 0), P)
    if P.mean:
        mass += tl.load(at, mask=seen, other=0.0)
        tl.debug_barrier()
    tl.store(at, mass, mask=seen)
