"""What a decision needs before anything moves: products with scorer weights, the mLSTM's cells, residuals, pooled votes.

Each of these kernels leaves at once where no decision falls at its request's position. Results go into workspaces that
:mod:`_serving_retain` reads; of the pages, only cells of states and score words are written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._serving_pages import (
    PRECISION,
    decided_before,
    decides_at,
    newest_in_ring,
    phase_of,
    ring_slot,
    row_at,
    slots_at,
    stabiliser_at,
    start_of,
    state_at,
    word_at,
)


@triton.jit
def _token_part(cache, asked, r, h, t, q, wanted, column, VALUE: tl.constexpr, P: tl.constexpr):
    """Columns of the keys (or values) of tokens t [ROWS] of requests r [ROWS], float32, 0 where not wanted; the newest ones
    are the step's own."""
    if VALUE:
        base, new, at = cache.v, asked.v, r * asked.v_request + h * asked.v_head
    else:
        base, new, at = cache.k, asked.k, r * asked.k_request + h * asked.k_head
    own = t == q
    inside = (column < P.size)[None, :]
    start = row_at(cache, r, h, ring_slot(tl.where(wanted & ~own, t, 0), P), P)
    old = tl.load(base + start[:, None] + column[None, :], mask=(wanted & ~own)[:, None] & inside, other=0.0)
    fresh = tl.load(new + at[:, None] + column[None, :], mask=(wanted & own)[:, None] & inside, other=0.0)
    return tl.where(own[:, None], fresh, old).to(tl.float32)


@triton.jit
def _rows_of_grid(asked, requests, first, ROWS: tl.constexpr, P: tl.constexpr):
    """Requests, their positions, and tokens of rows (request, one of its last e tokens), and which of them a decision is for."""
    row = first + tl.arange(0, ROWS)
    inside = row < requests * P.every
    r = tl.where(inside, row // P.every, 0).to(tl.int64)
    q = tl.load(asked.positions + r * asked.positions_request, mask=inside, other=-1).to(tl.int32)
    deciding = (q >= 0) & ((q + 1) % P.every == 0)
    return r, q, q + 1 - P.every + row % P.every, deciding


@triton.jit(do_not_specialize=["requests"])
def _project(
    cache, asked, weights,
    out,  # [R, H, e, P.projected]
    requests, heads,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """``[k; v]`` of the last e tokens (or of those that leave the window) of all requests, times a block of columns of a
    matrix. A row's result does not depend on the others."""
    part, h = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, q, t, deciding = _rows_of_grid(asked, requests, tl.program_id(0) * ROWS, ROWS, P)
    if tl.max(deciding.to(tl.int32), 0) == 0:
        return
    blocks = (P.columns + BLOCK_C - 1) // BLOCK_C
    matrix = weights.q_proj
    which = 0 * part
    if P.scorer == "mlstm":
        which = tl.minimum(part // blocks, 2)
        if which == 1:
            matrix = weights.k_proj
        if P.projects_values:
            if which == 2:
                matrix = weights.v_proj
    reading = which == 0
    columns = tl.where(which == 2, P.values, P.columns)
    u = t - P.window
    reads = deciding & (u >= P.sinks)
    if not P.delayed:
        u, reads = t, deciding
    token, wanted = tl.where(reading, u, t), tl.where(reading, reads, deciding)
    column = (part - which * blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    fits = column < columns
    acc = tl.zeros([ROWS, BLOCK_C], tl.float32)
    matrix += h * 2 * P.size * columns
    for x in range(0, P.size, BLOCK_X):
        place = x + tl.arange(0, BLOCK_X)
        usable = (place < P.size)[:, None] & fits[None, :]
        for half in tl.static_range(2):
            rows = _token_part(cache, asked, r, h, token, q, wanted, place, half == 1, P)
            cells = matrix + (half * P.size + place)[:, None] * columns + column[None, :]
            acc = tl.dot(rows, tl.load(cells, mask=usable, other=0.0), acc, input_precision=PRECISION)
    row = out + ((r * heads + h) * P.every + t - q + P.every - 1) * P.projected + which * P.columns
    tl.store(row[:, None] + column[None, :], acc, mask=wanted[:, None] & fits[None, :])


@triton.jit(do_not_specialize=["requests"])
def _gates(
    cache, asked, weights, out, requests, heads,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """The last words of :func:`_project`'s rows: the input gate and the logarithm of the forget gate; where values are not
    projected, the values."""
    h = tl.program_id(1).to(tl.int64)
    r, q, t, deciding = _rows_of_grid(asked, requests, tl.program_id(0) * ROWS, ROWS, P)
    if tl.max(deciding.to(tl.int32), 0) == 0:
        return
    row = out + ((r * heads + h) * P.every + t - q + P.every - 1) * P.projected + 2 * P.columns
    igate, fgate = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for x in range(0, P.size, BLOCK_X):
        place = x + tl.arange(0, BLOCK_X)
        for half in tl.static_range(2):
            rows = _token_part(cache, asked, r, h, t, q, deciding, place, half == 1, P)
            at = (2 * h + half) * P.size + place
            igate += tl.sum(rows * tl.load(weights.igate_weight + at, mask=place < P.size, other=0.0)[None, :], 1)
            fgate += tl.sum(rows * tl.load(weights.fgate_weight + at, mask=place < P.size, other=0.0)[None, :], 1)
            if half == 1 and not P.projects_values:
                tl.store(row[:, None] + place[None, :], rows, mask=deciding[:, None] & (place < P.values)[None, :])
    igate, fgate = (
        (igate + tl.load(weights.igate_bias + h)).to(tl.float64),
        (fgate + tl.load(weights.fgate_bias + h)).to(tl.float64),
    )
    if P.softcap is not None:
        igate, fgate = _softcap(igate, P), _softcap(fgate, P)
    log_f = tl.minimum(fgate, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(fgate)))
    tl.store(row + P.values, igate.to(tl.float32), mask=deciding)
    tl.store(row + P.values + 1, log_f.to(tl.float32), mask=deciding)


@triton.jit
def _softcap(a, P: tl.constexpr):
    """``c tanh(a / c)`` of float64."""
    fade = tl.exp(-2.0 * tl.abs(a) / P.softcap)
    size = P.softcap * (1.0 - fade) / (1.0 + fade)
    return tl.where(a < 0.0, -size, size)


@triton.jit
def features_of(projected, P: tl.constexpr):
    """phi of the P.columns products from ``projected`` on: [P.padded_features] float32, 0 beyond F."""
    f = tl.arange(0, P.padded_features)
    plus = f < P.columns
    inside = f < P.features
    a = tl.load(projected + f % P.columns, mask=inside, other=0.0)
    a = tl.where(plus, a, -a)
    raised = tl.where(
        plus, tl.max(tl.where(plus, a, float("-inf")), 0), tl.max(tl.where(inside & ~plus, a, float("-inf")), 0)
    )
    weight = tl.where(inside, tl.exp(a - tl.where(inside, raised, 0.0)), 0.0)
    totals = tl.where(plus, tl.sum(tl.where(plus, weight, 0.0), 0), tl.sum(tl.where(plus, 0.0, weight), 0))
    return tl.where(inside, weight / tl.where(inside, totals, 1.0), 0.0)


@triton.jit
def _cells(
    cache, asked, projected,
    numerators,  # [R, H, e, Dv]
    heads,
    P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block of columns of an mLSTM's cells takes in the last e tokens; read out as it goes.

    z and m stay as they are: all blocks read them, :mod:`_serving_retain` writes them.
    """
    first, h, r = tl.program_id(0) * BLOCK_V, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q = start_of(cache, asked, r, h, P)
    if (q < 0) | ((q + 1) % P.every != 0):
        return
    column = first + tl.arange(0, BLOCK_V)
    f = tl.arange(0, P.padded_features)
    fits = column < P.values
    inside = (f < P.features)[:, None] & fits[None, :]
    at = state_at(cache, r, h, f[:, None] * P.values + column[None, :], inside, P)
    begun = q + 1 > P.every
    there = (f < tl.where(begun, P.features, 0))[:, None] & fits[None, :]
    c = tl.load(cache.state + at, mask=there, other=0.0)
    m = tl.load(cache.state + stabiliser_at(cache, r, h, P))
    m = tl.where(begun, m, -1e30)
    projected += (r * heads + h) * P.every * P.projected
    numerators += (r * heads + h) * P.every * P.values
    for i in range(P.every):
        value = tl.load(projected + 2 * P.columns + column, mask=fits, other=0.0)
        igate = tl.load(projected + 2 * P.columns + P.values)
        old = tl.load(projected + 2 * P.columns + P.values + 1) + m
        m = tl.maximum(old, igate)
        write = features_of(projected + P.columns, P) * tl.exp(igate - m)
        c = c * tl.exp(old - m) + write[:, None] * value[None, :]
        reads = q + 1 - P.every + i - P.window >= P.sinks
        if not P.delayed:
            reads = i >= 0
        if reads:
            read = features_of(projected, P)
            tl.store(numerators + column, tl.sum(read[:, None] * c, 0), mask=fits)
        projected += P.projected
        numerators += P.values
    tl.debug_barrier()  # a cell that several threads hold has been read by all
    tl.store(cache.state + at, c, mask=inside)


@triton.jit
def _residuals(
    cache, asked,
    factors,  # [R, H, slots]
    heads, scale,
    P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """``|v - vb - scale Sig k|`` of a block of slots in use."""
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q = start_of(cache, asked, r, h, P)
    used = tl.load(asked.valid + r * asked.valid_request + h * asked.valid_head)
    if (q < 0) | ((q + 1) % P.every != 0) | (tl.program_id(0) * BLOCK_S >= used):
        return
    inside = slot < used
    evicted = decided_before(q, 0, P) - P.sinks - tl.maximum(used - P.first_long, 0)
    column = tl.arange(0, P.padded)
    fits = column < P.size
    row = row_at(cache, r, h, tl.where(inside, slot, 0), P)
    padded: tl.constexpr = P.padded  # Triton 3.6 takes no attribute in a shape
    predicted = tl.zeros([BLOCK_S, padded], tl.float32)
    mean = tl.zeros([padded], tl.float32)
    if evicted > 0:
        words = P.state_words + P.size + column
        mean = tl.load(cache.state + state_at(cache, r, h, words, fits, P), mask=fits, other=0.0)
        for x in range(0, P.size, BLOCK_X):
            place = x + tl.arange(0, BLOCK_X)
            usable = inside[:, None] & (place < P.size)[None, :]
            keys = tl.load(cache.k + row[:, None] + place[None, :], mask=usable, other=0.0).to(tl.float32)
            usable = (place < P.size)[:, None] & fits[None, :]
            cells = P.state_words + (2 + place)[:, None] * P.size + column[None, :]
            products = tl.load(cache.state + state_at(cache, r, h, cells, usable, P), mask=usable, other=0.0)
            predicted = tl.dot(keys, products, predicted, input_precision=PRECISION)
        predicted *= scale / evicted
    values = tl.load(cache.v + row[:, None] + column[None, :], mask=inside[:, None] & fits[None, :], other=0.0)
    left = values.to(tl.float32) - mean[None, :] - predicted
    left = tl.where(fits[None, :], left, 0.0)
    tl.store(factors + (r * heads + h) * P.most_slots + slot, tl.sqrt(tl.sum(left * left, 1)), mask=inside)


@triton.jit
def _ranked(cache, r, h, q, used, slot, P: tl.constexpr):
    """Which slots hold tokens that a decision at q ranks, those that leave the window among them, and these tokens."""
    long_range = (slot >= P.first_long) & (slot < used)
    token = newest_in_ring(slot, q - 1, P)
    leaves = (slot >= P.sinks) & (slot < P.first_long) & (token >= P.sinks) & (token <= q - P.window)
    held = tl.load(cache.position + word_at(cache, r, h, tl.where(long_range, slot, 0), P), mask=long_range, other=0)
    return long_range | leaves, tl.where(long_range, held, token)


@triton.jit
def _pools_at(asked, r, q, P: tl.constexpr):
    """Whether votes are pooled at q: at the prompt's decisions, and the one on the first generated token."""
    last = tl.load(asked.prompts + r * asked.prompts_request).to(tl.int32)
    return (q >= 0) & (q <= last) & decides_at(q, phase_of(asked, r, P), P)


@triton.jit
def _rank_votes(
    cache, asked,
    ranks,  # [R, H * slots] int32
    ordered,  # [R, H * slots] votes by rank
    heads,
    P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """How many of the tokens that a decision ranks are older than each of a block of slots, and of those behind it by so many as
    there are programs."""
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if ~_pools_at(asked, r, tl.load(asked.positions + r * asked.positions_request).to(tl.int32), P):
        return
    q = start_of(cache, asked, r, h, P)
    if q < 0:
        return
    used = tl.load(asked.valid + r * asked.valid_request + h * asked.valid_head)
    end = tl.maximum(used, tl.minimum(q, P.first_long))
    base, _width = slots_at(asked, r, h, heads, P)
    for first in range(tl.program_id(0) * BLOCK_S, end, tl.num_programs(0) * BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        ranked, token = _ranked(cache, r, h, q, used, slot, P)
        older = tl.zeros([BLOCK_S], tl.int32)
        for start in range(0, end, BLOCK_S):
            counts, other = _ranked(cache, r, h, q, used, start + tl.arange(0, BLOCK_S), P)
            older += tl.sum((counts[None, :] & (other[None, :] < token[:, None])).to(tl.int32), 1)
        vote = tl.load(cache.score + word_at(cache, r, h, tl.where(ranked, slot, 0), P), mask=ranked, other=0.0)
        tl.store(ranks + base + slot, older, mask=ranked)
        tl.store(ordered + base + older, vote, mask=ranked)


@triton.jit
def _pool_votes(cache, asked, ranks, ordered, heads, P: tl.constexpr, BLOCK_S: tl.constexpr):
    """Replaces the votes of the same slots by their means over neighbours by rank, zeros beyond the ends."""
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if ~_pools_at(asked, r, tl.load(asked.positions + r * asked.positions_request).to(tl.int32), P):
        return
    q = start_of(cache, asked, r, h, P)
    if q < 0:
        return
    used = tl.load(asked.valid + r * asked.valid_request + h * asked.valid_head)
    end = tl.maximum(used, tl.minimum(q, P.first_long))
    leaving = q - P.window + 1 - tl.maximum(P.sinks, q + 1 - P.every - P.window)
    count = tl.maximum(used - P.first_long, 0) + tl.maximum(leaving, 0)
    base, _width = slots_at(asked, r, h, heads, P)
    for first in range(tl.program_id(0) * BLOCK_S, end, tl.num_programs(0) * BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        ranked, _token = _ranked(cache, r, h, q, used, slot, P)
        rank = tl.load(ranks + base + slot, mask=ranked, other=0)
        total = tl.zeros([BLOCK_S], tl.float32)
        for i in range(P.pool):
            at = rank + i - P.pool // 2
            total += tl.load(ordered + base + at, mask=ranked & (at >= 0) & (at < count), other=0.0)
        where = word_at(cache, r, h, tl.where(ranked, slot, 0), P)
        tl.store(cache.score + where, total / P.pool, mask=ranked)
