"""Eviction times of tokens that are added one by one to k slots, for all segments of a piece at once.

If the order is static, a token leaves at the k-th arrival above it (docs/kernels.md), found for all tokens together.
Otherwise one program per head and segment processes the arrivals one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._launch import DIRECT
from kvpop_vllm.kernels.triton._lowest_score import Order, effective, lower_of, lowest_of, none_yet
from kvpop_vllm.kernels.triton._prefill_plan import LAST, Piece, numbers_of, segment

from kvpop_vllm.cache.pages import cdiv

NEVER = torch.iinfo(torch.int64).max
BLOCK = 2048
LANES, STEP = 128, 16  # tokens of a program that finds their evictions, and entries that it looks at together


@triton.jit
def held_long(segment, topk):
    """Return the number of long-range slots that a head uses before the piece, of ``topk``, the address of its k."""
    return tl.minimum(tl.maximum(segment.start - segment.sinks - segment.window, 0), tl.load(topk))


@triton.jit(do_not_specialize=["entries"])
def _simulate(
    score, position,  # [H, E] float32 and int32, overwritten with those of each slot's token
    log_gamma, keys,  # [H] float64; [R, H] int64, keys of draws
    slots, gone,  # [H, E] int32; slots is a workspace, the entry of each slot's token
    segments, topk, entries,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process the arrivals of one head of a segment one by one.

    Once all slots are filled, the lowest of the tokens in the slots and the arrival is evicted. The first entries are
    the slots, and more of them than the head has are never filled. P is an :class:`Order`.

    Grid: segments, H. S arrivals, one after another, read 8 bytes of each slot from caches: about 2 us each, 16 ms.
    """
    s, h, heads = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    numbers = numbers_of(segments, s)
    topk += s * heads + h
    filled, room, total = held_long(numbers, topk), tl.load(topk), numbers.filled + numbers.leaving
    score += h * entries + numbers.entry
    position += h * entries + numbers.entry
    gone += h * entries + numbers.entry
    slots += h * entries + numbers.entry
    gamma, key = tl.load(log_gamma + h), h
    if P.draws:
        key = tl.load(keys + numbers.request * heads + h)
    for start in range(0, filled, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(slots + slot, slot, mask=slot < filled)
    tl.debug_barrier()
    for j in range(numbers.filled, total):
        raw, t = tl.load(score + j), tl.load(position + j)
        q = t + numbers.window
        target = filled
        if filled >= room:
            best, oldest, best_slot = none_yet(BLOCK)
            for start in range(0, room, BLOCK):
                slot = start + tl.arange(0, BLOCK)
                inside = slot < room
                raws = tl.load(score + slot, mask=inside, other=0.0)
                token = tl.load(position + slot, mask=inside, other=0)
                best, oldest, best_slot = lower_of(
                    best, oldest, best_slot, raws, token, slot, inside, q, gamma, raws, key, P
                )
            lowest, victim = lowest_of(best, oldest, best_slot)
            stays = (effective(raw, t, q, gamma, raw, key, P) >= lowest) & (victim >= 0)
            target = tl.where(stays, victim, -1)
            leaves = tl.where(stays, tl.load(slots + tl.where(stays, victim, 0), mask=stays, other=0), j)
            tl.store(gone + leaves, numbers.length - total + j)
        tl.debug_barrier()  # all threads have read the words that are overwritten
        tl.store(slots + target, j, mask=target >= 0)
        tl.store(score + target, raw, mask=target >= 0)
        tl.store(position + target, t, mask=target >= 0)
        filled = tl.minimum(filled + 1, room)
        tl.debug_barrier()  # the stores are visible before the next arrival


@triton.jit
def _priorities(score, position, gamma, entry, end):
    """Return the float64 priorities of entries below ``end`` by which a static order ranks them, else infinity."""
    raw = tl.load(score + entry, mask=entry < end, other=float("inf")).to(tl.float64)
    value = raw - tl.load(position + entry, mask=entry < end, other=0).to(tl.float64) * gamma
    return tl.where(value == value, value, float("inf"))  # NaN is never lower


@triton.jit(do_not_specialize=["entries"])
def _sort_entries(
    score, position, log_gamma,  # [H, E] float32 and int32; [H] float64
    segments,
    priority, ordered,  # [H, E] float64: of each entry, and those of each block of entries in ascending order
    entries,
    WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Form the priorities of a block of a segment's entries, and sort them by counting the lower ones of each.

    Grid: blocks of WIDTH entries, segments, H. 1 million comparisons in a program: about 20 us.
    """
    s, h, start = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.program_id(0) * WIDTH
    numbers = numbers_of(segments, s)
    end = numbers.filled + numbers.leaving
    if start < end:
        offset, gamma = h * entries + numbers.entry, tl.load(log_gamma + h)
        entry = start + tl.arange(0, WIDTH)
        value = _priorities(score + offset, position + offset, gamma, entry, end)
        rank = tl.zeros([WIDTH], tl.int32)
        for i in range(start, tl.minimum(start + WIDTH, end), STEP):
            other = i + tl.arange(0, STEP)
            other_values = _priorities(score + offset, position + offset, gamma, other, end)[None, :]
            lower = (other_values < value[:, None]) | (
                (other_values == value[:, None]) & (other[None, :] < entry[:, None])
            )
            rank += tl.sum((lower & (other[None, :] < end)).to(tl.int32), 1)
        tl.store(priority + offset + entry, value)
        tl.store(ordered + offset + tl.where(entry < end, start + rank, entry), value)


@triton.jit
def _above(priority, position, value, t, mine, first, end, STEP: tl.constexpr):
    """Return which of STEP entries from the ``first`` on, up to ``end``, rank above entries ``mine``, ``[mine, STEP]``.

    ``value`` and ``t`` are the priorities and positions of ``mine``. ``first`` may be one number or one of each. Of
    equal priorities the newer token's is above. Pages of a profiling run have equal positions, of which the later
    entry's is above: where as many leave as arrive, every newcomer finds a slot.
    """
    entry = first + tl.arange(0, STEP)[None, :]
    other = tl.load(priority + entry, mask=entry < end, other=float("-inf"))
    token = tl.load(position + entry, mask=entry < end, other=-1)
    newer = (token > t[:, None]) | ((token == t[:, None]) & (entry > mine[:, None]))
    return (entry < end) & ((other > value[:, None]) | ((other == value[:, None]) & newer))


@triton.jit
def _count_above(ordered, value, older, WIDTH: tl.constexpr):
    """Return how many of WIDTH ascending numbers exceed each ``value``, or equal it unless they are ``older``."""
    below = tl.zeros_like(value).to(tl.int32)
    for i in tl.static_range(1, 16):
        if WIDTH >> i > 0:
            middle = tl.load(ordered + below + (WIDTH >> i) - 1)
            below = tl.where((middle < value) | (older & (middle == value)), below + (WIDTH >> i), below)
    last = tl.load(ordered + below)
    below = tl.where((last < value) | (older & (last == value)), below + 1, below)
    return WIDTH - below


@triton.jit(do_not_specialize=["entries"])
def _leave(
    priority, ordered, position,  # [H, E]
    gone,  # [H, E] int32, eviction times
    segments, topk, entries,
    WIDTH: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Find the arrival at which each token of a segment is evicted under a static order: the k-th one above it.

    Blocks of entries other than a token's are counted in ascending order, its own and those with tokens of
    slots, whose positions are in no order, entry by entry. So is the block in which the k-th one lies.

    Grid: LANES entries, segments, H. 12 blocks of 11 loads for each of 98,000 tokens, from caches: about 40 us.
    """
    s, h, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    numbers = numbers_of(segments, s)
    k, total = tl.load(topk + s * heads + h), numbers.filled + numbers.leaving
    start = tl.program_id(0) * LANES
    if start < total:
        offset = h * entries + numbers.entry
        priority += offset
        ordered += offset
        position += offset
        entry = start + tl.arange(0, LANES)
        value = tl.load(priority + entry, mask=entry < total, other=0.0)
        t = tl.load(position + entry, mask=entry < total, other=0)
        mine, of_slots = start // WIDTH, tl.where(start < numbers.filled, (numbers.filled + WIDTH - 1) // WIDTH, 0)
        above, before, home = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32), tl.full([LANES], -1, tl.int32)
        for block in range(0, (total + WIDTH - 1) // WIDTH):
            first, end = block * WIDTH, tl.minimum((block + 1) * WIDTH, total)
            if (block == mine) | (block < of_slots):
                count = tl.zeros([LANES], tl.int32)
                for i in range(first, end, STEP):
                    count += tl.sum(_above(priority, position, value, t, entry, i, end, STEP).to(tl.int32), 1)
            else:
                older = (entry >= 0) & (block < mine)
                count = _count_above(ordered + first, value, older, WIDTH) - (first + WIDTH - end)
            reached = (home < 0) & (above + count >= k)
            before, home = tl.where(reached, above, before), tl.where(reached, block, home)
            above += count
        rank, nth = before, tl.full([LANES], -1, tl.int32)  # of the k-th one above
        for i in range(0, tl.minimum(WIDTH, total), STEP):
            first = tl.maximum(home, 0) * WIDTH + i
            higher = _above(priority, position, value, t, entry, first[:, None], total, STEP).to(tl.int32)
            count_so_far = rank[:, None] + tl.cumsum(higher, 1)
            this = (higher > 0) & (count_so_far == k)
            index = first[:, None] + tl.arange(0, STEP)[None, :]
            nth = tl.maximum(nth, tl.max(tl.where(this, index, -1), 1))
            rank += tl.sum(higher, 1)
        until = numbers.length - total + tl.maximum(nth, entry)
        tl.store(gone + offset + entry, tl.where((home >= 0) | (k == 0), until, LAST), mask=entry < total)


def eviction_times(piece: Piece, score, position, *, log_gamma, decay_step=1, ages=False, keys=None, launch=DIRECT):
    """Return ``[H, E]`` int32: the first query of its segment that does not see an entry's token, or :data:`LAST`.

    The values of long-range slots that are not in use before the piece have no meaning.

    Args:
        piece: the piece.
        score: ``[H, E]`` float32, -inf for slots that are not in use; overwritten.
        position: ``[H, E]`` int32, -1 for slots that are not in use; overwritten.
        log_gamma, decay_step, ages: as in :func:`kvpop_vllm.kernels.ops.online_topk`.
        keys: ``[R, H]`` int64 keys of draws, or None.
        launch: launches a kernel, see :mod:`_launch`.
    """
    gone, priority, ordered = piece.order
    if not piece.evicts:
        return gone.fill_(LAST.value)  # for all layers: a piece that does not evict writes nothing else there
    arrays, heads = (piece.segments, piece.topk, piece.entries), score.shape[0]
    if decay_step == 1 and not ages and keys is None:
        width, lanes, step = piece.width, min(LANES, piece.width), min(STEP, piece.width)
        launch(
            _sort_entries, (cdiv(piece.most_entries, width), len(piece), heads),
            (score, position, log_gamma, piece.segments, priority, ordered, piece.entries), (width, step // 2),
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        grid = cdiv(piece.most_entries, lanes), len(piece), heads
        launch(_leave, grid, (priority, ordered, position, gone, *arrays), (width, lanes, step), num_warps=4)
        return gone
    order = Order(decay_step=decay_step, ages=ages, draws=keys is not None)
    block = min(BLOCK, triton.next_power_of_2(max(16, piece.most_slots)))
    # torch's memory keeps a recording from being repeated without the fill
    arguments = score, position, log_gamma, keys, torch.empty_like(gone), gone.fill_(LAST.value), *arrays
    launch(_simulate, (len(piece), heads), arguments, (order, block), num_warps=8, enable_fp_fusion=False)
    return gone


def online_topk(score, position, retained, *, topk, window, log_gamma, decay_step=1, ages=False, keys=None):
    """Implement :func:`kvpop_vllm.kernels.ops.online_topk`."""
    (heads, total), device = score.shape, score.device
    if total == retained:
        return torch.full((heads, total), NEVER, dtype=torch.int64, device=device)
    piece = Piece([segment([topk] * heads, total - retained, position=retained + window, window=window)], device)
    unused = piece.most_entries - total
    entry = torch.cat([torch.arange(retained, device=device), torch.arange(retained, total, device=device) + unused])
    scores = torch.full((heads, piece.entries), -torch.inf, device=device)
    positions = torch.full((heads, piece.entries), -1, dtype=torch.int32, device=device)
    scores[:, entry], positions[:, entry] = score.float(), position.int()
    order = {"log_gamma": log_gamma.contiguous(), "decay_step": decay_step, "ages": ages}
    gone = eviction_times(piece, scores, positions, keys=None if keys is None else keys.unsqueeze(0), **order)[:, entry]
    return torch.where(gone == LAST.value, NEVER, position[:, retained : retained + 1] + window + gone)
