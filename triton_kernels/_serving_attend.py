"""Attention over the slots in use, split among programs, whose results are merged.

Further kernels add the moment correction and convert logits to attention masses per slot.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2, LOG2E, PRECISION
from kvpop_vllm.kernels.triton._serving_pages import MARKS, REFUSED, state_at, word_at
from kvpop_vllm.kernels.triton._softmax import add_block, faded, in_base_2


@triton.jit
def _nothing(found):
    """Return the output of a head without tokens: 0 for padding, NaN for a refused request."""
    return tl.where(found == REFUSED, float("nan"), 0.0)


@triton.jit
def _attended(step_flags, P: tl.constexpr):
    """Return the number of slots and protected tokens that a head attends to.

    It is 0 for padding and REFUSED for a refused request.
    """
    found = tl.load(step_flags)
    if P.protects:
        found += tl.load(step_flags + 3)
    return found


@triton.jit
def _normalised(acc, top, total, found):
    """Return outputs and log-sum-exps of a softmax with maxima ``top`` in base 2."""
    natural = tl.where(found > 0, (top + tl.log2(total)) * LN2, float("-inf") + _nothing(found))
    return tl.where(found > 0, acc / total[:, None], _nothing(found)), natural


@triton.jit
def _walk(
    k, v, pages, page, rows_page,  # keys, values, page numbers and their stride, stride of pages
    bias, biased, words_page,  # biases of the first slots, or None; their number; stride of their pages
    begin, end, used, rows, scale, top, total, acc,
    logits,  # address of slot 0's logits, [GROUP]
    P: tl.constexpr, GROUP: tl.constexpr, BLOCK_S: tl.constexpr, WIDE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Run softmax attention over blocks ``[begin, end)`` of the first ``used`` slots.

    The result is merged into ``top``, ``total`` and ``acc``. If KEPT, the logits are stored, because the rule
    needs attention masses.
    """
    g, column = tl.arange(0, GROUP), tl.arange(0, P.padded)
    fits, present = column < P.size, g < P.group
    for block in range(begin, end):
        first = block * BLOCK_S
        slot = first + tl.arange(0, BLOCK_S)
        seen = slot < used
        number = tl.load(pages + first // P.slots * page).to(tl.int64)
        start = number * rows_page + first % P.slots * P.size
        place = start + tl.arange(0, BLOCK_S)[:, None] * P.size + column[None, :]
        inside = seen[:, None] & fits[None, :]
        keys = tl.load(k + place, mask=inside, other=0.0)
        values = tl.load(v + place, mask=inside, other=0.0)
        if WIDE:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        products = tl.dot(rows, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E)
        if bias is not None:
            words = number * words_page + slot % P.slots
            products += in_base_2(tl.load(bias + words, mask=slot < biased, other=0.0))[None, :]
        products = tl.where(seen[None, :], products, float("-inf"))
        if KEPT:
            tl.store(logits[:, None] + slot[None, :], products, mask=present[:, None] & seen[None, :])
        top, total, acc = add_block(products, values, top, total, acc)
    return top, total, acc


@triton.jit
def _combine(
    sums, tops, out, lse, found, head, splits, column, P: tl.constexpr, GROUP: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Merge a block of columns of the parts' sums by their maxima, and write the log-sum-exp.

    Other programs have written the parts, so they are not read through this one's cache.
    """
    g = tl.arange(0, GROUP)
    present = g < P.group
    inside = present[:, None] & (column < P.size)[None, :]
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, BLOCK_C], tl.float32)
    for part in range(splits):
        row = head * splits + part
        own_top = tl.load(tops + row * 2, mask=present, other=0.0, cache_modifier=".cg")
        own_total = tl.load(tops + row * 2 + 1, mask=present, other=1.0, cache_modifier=".cg")
        at = sums + row[:, None] * P.size + column[None, :]
        own = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, own_top)
        pivot, fade = faded(top, new_top)
        gain = tl.exp2(own_top - pivot)
        total = total * fade + own_total * gain
        acc = acc * fade[:, None] + own * gain[:, None]
        top = new_top
    acc, natural = _normalised(acc, top, total, found)
    tl.store(out + head[:, None] * P.size + column[None, :], acc.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head, natural, mask=present)


@triton.jit(do_not_specialize=["splits"])
def _attend(
    q, cache, before,
    out, lse,  # [R, Hq, D], [R, Hq]
    sums,  # [R, Hq, splits, D] float32: sums of the parts, if CUT
    tops,  # [R, Hq, splits, 2]: maximum in base 2 and total of each part, if CUT
    logits,  # [R, Hq, slots], in base 2, if masses are needed
    step_flags, heads, splits, scale, q_request, q_head,
    P: tl.constexpr, GROUP: tl.constexpr, CUT: tl.constexpr, BLOCK_S: tl.constexpr, WIDE: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Compute one part of a head's attention, for all of its query heads.

    A part is a range of the head's protected tokens and slots. BLOCK_S divides N, so that a block of slots
    lies in one page. If BIASED, protected tokens may have a bias.
    """
    part, h, r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    used = tl.load(step_flags + (r * heads + h) * MARKS)
    g, column = tl.arange(0, GROUP), tl.arange(0, P.padded)
    fits, present = column < P.size, g < P.group
    query_head = h * P.group + g
    at = q + r * q_request + query_head[:, None] * q_head + column[None, :]
    rows = tl.load(at, mask=present[:, None] & fits[None, :], other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)

    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    padded: tl.constexpr = P.padded  # Triton 3.6 does not accept an attribute in a shape
    acc = tl.zeros([GROUP, padded], tl.float32)
    head = r * heads * P.group + query_head  # index in [R, Hq]
    blocks = (tl.maximum(used, 0) + BLOCK_S - 1) // BLOCK_S
    own, found = logits + head * P.most_slots, used
    if P.protects:
        protected = tl.load(step_flags + (r * heads + h) * MARKS + 3)
        ahead = (protected + BLOCK_S - 1) // BLOCK_S
        share = (ahead + blocks + splits - 1) // splits
        begin, end = part * share, tl.minimum(ahead + blocks, (part + 1) * share)
        shift, pages = h * before.rows_head, before.table + r * before.table_request
        bias, biased = None, 0
        if BIASED:
            bias = before.bias + h * before.words_head
            biased = tl.minimum(tl.load(before.biased + r * before.biased_request).to(tl.int32), protected)
        top, total, acc = _walk(
            before.k + shift, before.v + shift, pages, before.table_page, before.rows, bias, biased, before.words,
            begin, tl.minimum(end, ahead), protected,
            rows, scale, top, total, acc, own, P, GROUP, BLOCK_S, WIDE, False,
        )  # fmt: skip
        begin, end = tl.maximum(begin - ahead, 0), end - ahead
        found += protected
    else:
        share = (blocks + splits - 1) // splits
        begin, end = part * share, tl.minimum(blocks, (part + 1) * share)
    pages = cache.table + r * cache.table_request + h * cache.table_head + P.state_pages * cache.table_page
    shift = h * cache.rows_head
    top, total, acc = _walk(
        cache.k + shift, cache.v + shift, pages, cache.table_page, cache.rows, None, 0, 0, begin, end, used,
        rows, scale, top, total, acc, own, P, GROUP, BLOCK_S, WIDE, P.masses,
    )  # fmt: skip
    if CUT:
        row = head * splits + part
        tl.store(sums + row[:, None] * P.size + column[None, :], acc, mask=present[:, None] & fits[None, :])
        tl.store(tops + row * 2, top, mask=present)
        tl.store(tops + row * 2 + 1, total, mask=present)
        tl.debug_barrier()  # all threads have written the part
        if tl.atomic_add(step_flags + (r * heads + h) * MARKS + 4, 1) == splits - 1:
            found = _attended(step_flags + (r * heads + h) * MARKS, P)
            _combine(sums, tops, out, lse, found, head, splits, column, P, GROUP, padded)
    else:
        acc, natural = _normalised(acc, top, total, found)
        place = out + head[:, None] * P.size + column[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=present[:, None] & fits[None, :])
        tl.store(lse + head, natural, mask=present)


@triton.jit
def _correct(
    q, cache, merged, lse, out, step_flags, heads, scale, q_request, q_head,
    P: tl.constexpr, GROUP: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Add the evicted tokens' estimated contribution to a block of columns of the output.

    ``merged`` is ``[R, Hq, D]`` float32.
    """
    first, h, r = tl.program_id(0) * BLOCK_C, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    count = tl.load(step_flags + (r * heads + h) * MARKS + 1)
    g, column = tl.arange(0, GROUP), first + tl.arange(0, BLOCK_C)
    present, fits = g < P.group, column < P.size
    inside = present[:, None] & fits[None, :]
    head = (r * heads + h) * P.group + g
    acc = tl.load(merged + head[:, None] * P.size + column[None, :], mask=inside, other=0.0)
    if count > 0:
        predicted = tl.zeros([GROUP, BLOCK_C], tl.float32)
        mass = tl.zeros([GROUP], tl.float32)
        for x in range(0, P.size, BLOCK_X):
            place = x + tl.arange(0, BLOCK_X)
            there = place < P.size
            at = q + r * q_request + (h * P.group + g)[:, None] * q_head + place[None, :]
            rows = tl.load(at, mask=present[:, None] & there[None, :], other=0.0).to(tl.float32)
            mean_key = tl.load(
                cache.state + state_at(cache, r, h, P.state_words + place, there, P), mask=there, other=0.0
            )
            mass += tl.sum(rows * mean_key[None, :], 1)
            cell = P.state_words + (2 + place)[:, None] * P.size + column[None, :]
            usable = there[:, None] & fits[None, :]
            products = tl.load(cache.state + state_at(cache, r, h, cell, usable, P), mask=usable, other=0.0)
            predicted = tl.dot(rows, products, predicted, input_precision=PRECISION)
        word = P.state_words + P.size + column
        mean = tl.load(cache.state + state_at(cache, r, h, word, fits, P), mask=fits, other=0.0)
        evicted = mean[None, :] + predicted * (scale / count)
        mass = tl.log(count.to(tl.float32)) + scale * mass
        share = 1.0 / (1.0 + tl.exp(tl.load(lse + head, mask=present, other=0.0) - mass))
        acc += share[:, None] * (evicted - acc)
    tl.store(out + head[:, None] * P.size + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _masses(
    logits, lse, cache, step_flags, heads,
    P: tl.constexpr, GROUP: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write attention masses to the score fields of a block of slots, or add them.

    A mass is the query's weight over a slot, averaged over the query heads.
    """
    first, h, r = tl.program_id(0) * BLOCK_S, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    used = tl.load(step_flags + (r * heads + h) * MARKS)
    if first >= used:
        return
    g, slot = tl.arange(0, GROUP), first + tl.arange(0, BLOCK_S)
    present, seen = g < P.group, slot < used
    head = (r * heads + h) * P.group + g
    top = tl.load(lse + head, mask=present, other=0.0) * LOG2E
    inside = present[:, None] & seen[None, :]
    own = tl.load(logits + head[:, None] * P.most_slots + slot[None, :], mask=inside, other=float("-inf"))
    mass = tl.sum(tl.where(inside, tl.exp2(own - top[:, None]), 0.0), 0) / P.group
    at = cache.score + word_at(cache, r, h, tl.where(seen, slot, 0), P)
    if P.mean:
        mass += tl.load(at, mask=seen, other=0.0)
        tl.debug_barrier()
    tl.store(at, mass, mask=seen)
