"""Attention over the slots in use, split among programs; the moment correction; attention masses per slot.

Functions without an underscore are phases of a step, as in :mod:`_serving_scores`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import LN2, LOG2E, PRECISION
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows, row_mask, store_rows
from kvpop_vllm.kernels.triton._serving_pages import REFUSED, element_at, moments_at, page_of, place_of, word_at
from kvpop_vllm.kernels.triton._serving_scores import COLUMNS, DEPTH
from kvpop_vllm.kernels.triton._softmax import add_keys, add_sinks, faded, nothing_yet

MASSES = tl.constexpr(128)  # slots of a program of masses


@triton.jit
def _walk(
    cache, r, h,
    first_page, begin, end, used,  # page of slot 0; blocks of slots, of the first ``used``
    biased,  # number of leading slots that have a bias, or None
    logits,  # address of slot 0's logits, [GROUP]
    rows, scale, sums,
    P: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Run softmax attention over some blocks of slots; if KEPT, store the logits, because masses are needed."""
    for block in range(begin, end):  # P.block divides N, so that it lies in one page
        first = block * P.block
        slot = first + tl.arange(0, P.block)
        visible = slot < used
        page = page_of(cache, r, h, first_page + first // P.slots)
        place = page * cache.rows + h * cache.rows_head + first % P.slots * P.size + tl.arange(0, P.block) * P.size
        bias = None
        if biased is not None:
            words = cache.score + h * cache.words_head + page * cache.words + slot % P.slots
            bias = tl.load(words, mask=slot < biased, other=0.0)
        block_logits, sums = add_keys(
            cache.k + place, cache.v + place, visible, bias, visible[None, :], rows, scale, sums, P
        )
        if KEPT:
            inside = (tl.arange(0, P.rows) < P.group)[:, None] & visible[None, :]
            tl.store(logits[:, None] + slot[None, :], block_logits, mask=inside)
    return sums


@triton.jit
def merged(values, tops, part, stride, parts, present, P: tl.constexpr):
    """Return maxima, totals and sums of all parts of a head's attention.

    Those of its rows begin at ``part``, and those of the next part lie ``stride`` further on. Other programs have
    written the parts, so they are not read through this one's cache.
    """
    column = tl.arange(0, P.padded)
    inside = row_mask(present, P)
    top, total, acc = nothing_yet(P.rows, P.padded)
    for i in range(parts):
        part_top = tl.load(tops + (part + i * stride) * 2, mask=present, other=0.0, cache_modifier=".cg")
        part_total = tl.load(tops + (part + i * stride) * 2 + 1, mask=present, other=1.0, cache_modifier=".cg")
        part_values = values + (part + i * stride)[:, None] * P.size + column[None, :]
        new_top = tl.maximum(top, part_top)
        pivot, fade = faded(top, new_top)
        gain = tl.exp2(part_top - pivot)
        total = total * fade + part_total * gain
        acc = acc * fade[:, None] + tl.load(part_values, mask=inside, other=0.0, cache_modifier=".cg") * gain[:, None]
        top = new_top
    return top, total, acc


@triton.jit
def attend(
    step, work,  # workspace of the head, to which logits go if masses are needed
    row, r, h,  # index of the query's token in the batch, its request and its KV head
    used, protected,  # slots and protected tokens to attend to
    part, parts,
    P: tl.constexpr,
):  # fmt: skip
    """Return maxima, totals and sums of one part of a head's protected tokens and slots, for all of its query heads."""
    g = tl.arange(0, P.rows)
    rows = load_rows(element_at(step.q, row, h * P.group + g), g < P.group, P)
    if P.wide:
        rows = rows.to(tl.float32)
    sums = nothing_yet(P.rows, P.padded)
    logits = work + P.logits + g * P.most_slots
    blocks, ahead = (tl.maximum(used, 0) + P.block - 1) // P.block, (protected + P.block - 1) // P.block
    share = (ahead + blocks + parts - 1) // parts
    begin, end = part * share, tl.minimum(ahead + blocks, (part + 1) * share)
    if step.prefix.table is not None:
        biased = None
        if step.prefix.score is not None:
            biased = tl.minimum(tl.load(element_at(step.biased, r, 0)).to(tl.int32), protected)
        until = tl.minimum(end, ahead)
        sums = _walk(step.prefix, r, h, 0, begin, until, protected, biased, logits, rows, step.scale, sums, P, False)
        begin, end = tl.maximum(begin - ahead, 0), end - ahead
    return _walk(step.cache, r, h, P.state_pages, begin, end, used, None, logits, rows, step.scale, sums, P, P.masses)


@triton.jit
def finish(step, work, head, h, sums, used, protected, P: tl.constexpr):
    """Write the outputs ``[G, D]`` and log-sum-exps ``[G]`` of a head; NaN if the step was refused, 0 for padding.

    Attention sinks are added first. Outputs that are to be corrected go to the workspace. ``head`` is the first query
    head's index in ``[T, Hq]``, h that of its KV head.
    """
    out = step.out + head * P.size
    if P.uses_moment_correction:
        out = work + P.merged
    g, count = tl.arange(0, P.rows), used + protected
    present = g < P.group
    if step.sink_logits is not None:
        sums = add_sinks(step.sink_logits + h * P.group + g, present, sums)
    top, total, acc = sums
    nothing = tl.where(count == REFUSED, float("nan"), 0.0)
    acc = tl.where(count > 0, acc / total[:, None], nothing)
    store_rows(out + g * P.size, acc, present, P)
    log = tl.where(count > 0, (top + tl.log2(total)) * LN2, float("-inf") + nothing)
    tl.store(step.lse + head + g, log, mask=present)


@triton.jit
def parts_of(used, protected, splits, target, smallest, walk):
    """Return the parts, at most ``splits``, into which a head's slots and protected tokens are divided.

    They are ``target``, or more to walk over at most ``walk`` protected tokens each. A part has at least ``smallest``
    slots.
    """
    slots = tl.maximum(used, 0) + protected
    return tl.minimum(
        tl.minimum(tl.maximum(target, (protected + walk - 1) // walk), tl.maximum(slots // smallest, 1)), splits
    )


@triton.jit(do_not_specialize=["target", "smallest", "walk"])
def _attend(
    step,
    values,  # [R, Hq, splits, D] float32: sums of the parts, if CUT
    tops,  # [R, Hq, splits, 2]: maximum in base 2 and total of each part, if CUT
    target, smallest, walk,  # what follows for the parts, see parts_of
    P: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Compute one part of a head's attention; the last part to be done merges all. A head may have fewer parts.

    Grid: parts, H, R. 16.8 MB of keys and values: 4.7 us; 298 us for 64 requests.
    """
    h, r, work, flags = place_of(step, P)
    part, splits = tl.program_id(0), tl.num_programs(0)
    used, protected = tl.load(flags), tl.load(flags + 3)
    parts = splits
    if CUT:
        parts = parts_of(used, protected, splits, target, smallest, walk)
        if part >= parts:
            return
    sums = attend(step, work, r, r, h, used, protected, part, parts, P)
    head = (r * tl.num_programs(1) + h) * P.group  # index in [R, Hq]
    if CUT:
        top, total, acc = sums
        g = tl.arange(0, P.rows)
        row, present = (head + g) * splits + part, g < P.group
        store_rows(values + row * P.size, acc, present, P)
        tl.store(tops + row * 2, top, mask=present)
        tl.store(tops + row * 2 + 1, total, mask=present)
        tl.debug_barrier()  # all threads have written the part
        if tl.atomic_add(flags + 4, 1) != parts - 1:
            return
        sums = merged(values, tops, row - part, 1, parts, present, P)
    finish(step, work, head, h, sums, used, protected, P)


@triton.jit
def correct(step, work, head, row, r, h, count, first, P: tl.constexpr):
    """Add the estimated contribution of ``count`` evicted tokens to the outputs of a head, from column ``first`` on.

    The other arguments are those of :func:`attend` and :func:`finish`.
    """
    cache = step.cache
    g, column = tl.arange(0, P.rows), first + tl.arange(0, COLUMNS)
    present, fits = g < P.group, column < P.size
    inside = present[:, None] & fits[None, :]
    query = element_at(step.q, row, h * P.group + g)
    cells = g[:, None] * P.size + column[None, :]
    acc = tl.load(work + P.merged + cells, mask=inside, other=0.0)
    if count > 0:
        _, mass, predicted = nothing_yet(P.rows, COLUMNS)
        for x in range(0, P.size, DEPTH):
            place = x + tl.arange(0, DEPTH)
            valid = place < P.size
            address = query[:, None] + place[None, :]
            rows = tl.load(address, mask=present[:, None] & valid[None, :], other=0.0).to(tl.float32)
            mean_key = tl.load(moments_at(cache, r, h, 0, place, valid, P), mask=valid, other=0.0)
            mass += tl.sum(rows * mean_key[None, :], 1)
            usable = valid[:, None] & fits[None, :]
            address = moments_at(cache, r, h, (2 + place)[:, None], column[None, :], usable, P)
            predicted = tl.dot(rows, tl.load(address, mask=usable, other=0.0), predicted, input_precision=PRECISION)
        mean = tl.load(moments_at(cache, r, h, 1, column, fits, P), mask=fits, other=0.0)
        evicted = mean[None, :] + predicted * (step.scale / count)
        mass = tl.log(count.to(tl.float32)) + step.scale * mass
        share = 1.0 / (1.0 + tl.exp(tl.load(step.lse + head + g, mask=present, other=0.0) - mass))
        acc += share[:, None] * (evicted - acc)
    tl.store(step.out + head * P.size + cells, acc.to(step.out.dtype.element_ty), mask=inside)


@triton.jit
def _correct(step, P: tl.constexpr):
    """Run :func:`correct`. Grid: 64 columns, H, R. 0.5 MB of moments: 0.15 us; 9 us for 64 requests."""
    h, r, work, flags = place_of(step, P)
    head = (r * tl.num_programs(1) + h) * P.group
    correct(step, work, head, r, r, h, tl.load(flags + 1), tl.program_id(0) * COLUMNS, P)


@triton.jit
def add_masses(step, work, head, r, h, used, first, P: tl.constexpr, BLOCK: tl.constexpr):
    """Write attention masses to the score fields of BLOCK of the ``used`` slots, from slot ``first`` on, or add them.

    A mass is the query's weight over a slot, averaged over the query heads.
    """
    g, slot = tl.arange(0, P.rows), first + tl.arange(0, BLOCK)
    present, visible = g < P.group, slot < used
    top = tl.load(step.lse + head + g, mask=present, other=0.0) * LOG2E
    inside = present[:, None] & visible[None, :]
    logits = work + P.logits + g[:, None] * P.most_slots + slot[None, :]
    values = tl.load(logits, mask=inside, other=float("-inf"))
    mass = tl.sum(tl.where(inside, tl.exp2(values - top[:, None]), 0.0), 0) / P.group
    scores = step.cache.score + word_at(step.cache, r, h, tl.where(visible, slot, 0), P)
    if P.mean:
        mass += tl.load(scores, mask=visible, other=0.0)
        tl.debug_barrier()
    tl.store(scores, mass, mask=visible)


@triton.jit
def _masses(step, P: tl.constexpr):
    """Run :func:`add_masses`. Grid: 128 slots, H, R. 0.7 MB of logits and scores: 0.2 us; 12 us for 64 requests."""
    h, r, work, flags = place_of(step, P)
    first, used = tl.program_id(0) * MASSES, tl.load(flags)
    if first < used:
        add_masses(step, work, (r * tl.num_programs(1) + h) * P.group, r, h, used, first, P, MASSES)
