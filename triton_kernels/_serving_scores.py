"""Inputs of an eviction, computed before anything moves: projections, mLSTM cells and residuals.

Results go to workspaces that :mod:`_serving_retain` reads. The only part of the pages that is written are the
cells of states.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import PRECISION
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows
from kvpop_vllm.kernels.triton._serving_pages import (
    budget_of,
    element_at,
    moments_at,
    ring_slot,
    roles_of,
    row_at,
    start_of,
    state_at,
)  # fmt: skip


@triton.jit
def multiply(
    key_row, value_row, wanted, matrix, column, columns,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Return ``[k; v]`` of ROWS tokens times some columns of a matrix ``[2 D, C]``, in float32.

    Args:
        key_row, value_row: ``[ROWS]``, addresses of each token's key and value.
        wanted: ``[ROWS]``, mask of the tokens.
        matrix: address of the matrix.
        column: ``[BLOCK_C]`` columns; those from ``columns`` on give 0.
        columns: C.
    """
    acc = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for x in range(0, SIZE, BLOCK_X):
        place = x + tl.arange(0, BLOCK_X)
        there = place < SIZE
        for half in tl.static_range(2):
            row = value_row if half == 1 else key_row
            rows = tl.load(row[:, None] + place[None, :], mask=wanted[:, None] & there[None, :], other=0.0).to(
                tl.float32
            )
            cells = matrix + (half * SIZE + place)[:, None] * columns + column[None, :]
            block = tl.load(cells, mask=there[:, None] & (column < columns)[None, :], other=0.0)
            acc = tl.dot(rows, block, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _softcap(a, P: tl.constexpr):
    """Return ``c tanh(a / c)`` in float64."""
    fade = tl.exp(-2.0 * tl.abs(a) / P.softcap)
    size = P.softcap * (1.0 - fade) / (1.0 + fade)
    return tl.where(a < 0.0, -size, size)


@triton.jit
def _gates(
    step, weights, out, heads, h, r, wanted,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Write the gates of new tokens: the input gate and the logarithm of the forget gate.

    If values are not projected, the values are written too.
    """
    row = out + (r * heads + h) * P.projected + 2 * P.columns
    key_row, value_row = element_at(step.k, r, h), element_at(step.v, r, h)
    igate, fgate = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for x in range(0, P.size, BLOCK_X):
        place = x + tl.arange(0, BLOCK_X)
        fits = place < P.size
        inside = wanted[:, None] & fits[None, :]
        for half in tl.static_range(2):
            start = value_row if half == 1 else key_row
            rows = tl.load(start[:, None] + place[None, :], mask=inside, other=0.0).to(tl.float32)
            at = (2 * h + half) * P.size + place
            igate += tl.sum(rows * tl.load(weights.igate_weight + at, mask=fits, other=0.0)[None, :], 1)
            fgate += tl.sum(rows * tl.load(weights.fgate_weight + at, mask=fits, other=0.0)[None, :], 1)
            if half == 1 and weights.v_proj is None:
                tl.store(row[:, None] + place[None, :], rows, mask=inside)
    igate = (igate + tl.load(weights.igate_bias + h)).to(tl.float64)
    fgate = (fgate + tl.load(weights.fgate_bias + h)).to(tl.float64)
    if P.softcap is not None:
        igate, fgate = _softcap(igate, P), _softcap(fgate, P)
    log_f = tl.minimum(fgate, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(fgate)))
    tl.store(row + P.values, igate.to(tl.float32), mask=wanted)
    tl.store(row + P.values + 1, log_f.to(tl.float32), mask=wanted)


@triton.jit(do_not_specialize=["requests"])
def _project(
    cache, step, weights,
    out,  # [R, H, P.projected]
    requests,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Multiply ``[k; v]`` of one token of each request by a block of columns of a matrix; the last part is the gates.

    The token is the new one, or the one leaving the window for the read features of a delayed scorer and for
    an MLP. A row's result does not depend on the other rows.

    Grid: 16 requests, 64 columns or the gates, H. 2.1 MB of weights, whatever the number of requests up to 16: 0.6 us.
    """
    part, h, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < requests
    r = tl.where(inside, r, 0).to(tl.int64)
    protected, sinks, window = roles_of(step, r, P)
    # negative for padding, protected tokens and rows past the last request
    since = tl.load(element_at(step.positions, r, 0), mask=inside, other=-1).to(tl.int32) - protected
    if P.scorer == "mlstm":
        if part == tl.num_programs(1) - 1:
            _gates(step, weights, out, heads, h, r, since >= 0, P, ROWS, BLOCK_X)
            return
    blocks = (P.columns + BLOCK_C - 1) // BLOCK_C
    matrix = weights.read_weight
    which = 0 * part
    if P.scorer == "mlstm":
        which = tl.minimum(part // blocks, 2)
        if which == 1:
            matrix = weights.k_proj
        if weights.v_proj is not None:
            if which == 2:
                matrix = weights.v_proj
    columns = tl.where(which == 2, P.values, P.columns)
    wanted = since >= 0
    key_row, value_row = element_at(step.k, r, h), element_at(step.v, r, h)
    if P.delayed:
        if which == 0:
            wanted = since >= sinks + window
            leaving = row_at(cache, r, h, ring_slot(tl.where(wanted, since, 0), sinks, window), P)
            key_row, value_row = cache.k + leaving, cache.v + leaving
    if tl.max(wanted.to(tl.int32), 0) == 0:
        return
    column = (part - which * blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    matrix += h * 2 * P.size * columns
    acc = multiply(key_row, value_row, wanted, matrix, column, columns, P.size, ROWS, BLOCK_C, BLOCK_X)
    row = out + (r * heads + h) * P.projected + which * P.columns
    tl.store(row[:, None] + column[None, :], acc, mask=wanted[:, None] & (column < columns)[None, :])


@triton.jit
def features_of(projected, P: tl.constexpr):
    """Return the features phi of the P.columns products at ``projected``.

    They are ``[P.padded_features]`` float32, 0 beyond F.
    """
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
def gates_of(m_at, projected, q, P: tl.constexpr):
    """Return the new m of an mLSTM's state and the factors of its old content and of the new token.

    Args:
        m_at: address of m.
        projected: workspace of this head.
        q: position of the token.
    """
    m = tl.where(q > 0, tl.load(m_at), -1e30)
    old = tl.load(projected + 2 * P.columns + P.values + 1) + m
    igate = tl.load(projected + 2 * P.columns + P.values)
    m = tl.maximum(old, igate)
    return m, tl.exp(old - m), tl.exp(igate - m)


@triton.jit
def _cells(
    cache, step, projected,
    numerators,  # [R, H, Dv]
    P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Update a block of columns of an mLSTM's cells with the new token, and read it out.

    z and m stay unchanged, because all blocks read them; :mod:`_serving_retain` writes them.

    Grid: 32 columns, H, R. 1.06 MB, the state read and written: 0.3 us; 19 us for 64 requests.
    """
    first, h, r = tl.program_id(0) * BLOCK_V, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    since, protected, sinks, window = start_of(cache, step, r, h, P)
    if since < 0:
        return
    q = since + protected  # behind a prefix, the state includes tokens of the prefix
    column = first + tl.arange(0, BLOCK_V)
    f = tl.arange(0, P.padded_features)
    fits = column < P.values
    inside = (f < P.features)[:, None] & fits[None, :]
    at = state_at(cache, r, h, f[:, None] * P.values + column[None, :], inside, P)
    there = (f < tl.where(q > 0, P.features, 0))[:, None] & fits[None, :]
    c = tl.load(cache.state + at, mask=there, other=0.0)
    head = r * tl.num_programs(1) + h
    projected += head * P.projected
    _, keep, gain = gates_of(cache.state + state_at(cache, r, h, P.state_words - 1, True, P), projected, q, P)
    value = tl.load(projected + 2 * P.columns + column, mask=fits, other=0.0)
    write = features_of(projected + P.columns, P) * gain
    c = c * keep + write[:, None] * value[None, :]
    if (since >= sinks + window) | (not P.delayed):
        read = features_of(projected, P)
        tl.store(numerators + head * P.values + column, tl.sum(read[:, None] * c, 0), mask=fits)
    tl.debug_barrier()  # all threads have read the cells, which several threads may hold
    tl.store(cache.state + at, c, mask=inside)


@triton.jit
def _residuals(
    cache, step,
    factors,  # [R, H, slots]
    scale,
    P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Compute ``|v - vb - scale Sig k|`` of a block of slots, if a token is to be evicted.

    All slots are in use then.

    Grid: 32 slots, H, R. 17 MB: 5 us; but 1.1 GFLOP, in three products of TF32 each: 13 us.
    """
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    since, _, sinks, _ = start_of(cache, step, r, h, P)
    budget = budget_of(step, r, h, sinks, P)
    evicted = since - budget
    if (evicted < 0) | (tl.program_id(0) * BLOCK_S >= budget):
        return
    inside = slot < budget
    column = tl.arange(0, P.padded)
    fits = column < P.size
    row = row_at(cache, r, h, tl.where(inside, slot, 0), P)
    padded: tl.constexpr = P.padded  # Triton 3.6 does not accept an attribute in a shape
    predicted = tl.zeros([BLOCK_S, padded], tl.float32)
    mean = tl.zeros([padded], tl.float32)
    if evicted > 0:
        mean = tl.load(cache.state + moments_at(cache, r, h, 1, column, fits, P), mask=fits, other=0.0)
        for x in range(0, P.size, BLOCK_X):
            place = x + tl.arange(0, BLOCK_X)
            usable = inside[:, None] & (place < P.size)[None, :]
            keys = tl.load(cache.k + row[:, None] + place[None, :], mask=usable, other=0.0).to(tl.float32)
            usable = (place < P.size)[:, None] & fits[None, :]
            at = cache.state + moments_at(cache, r, h, (2 + place)[:, None], column[None, :], usable, P)
            predicted = tl.dot(keys, tl.load(at, mask=usable, other=0.0), predicted, input_precision=PRECISION)
        predicted *= scale / evicted
    values = load_rows(cache.v + row, inside, P.size, padded).to(tl.float32)
    left = tl.where(fits[None, :], values - mean[None, :] - predicted, 0.0)
    place = factors + (r * tl.num_programs(1) + h) * P.most_slots + slot
    tl.store(place, tl.sqrt(tl.sum(left * left, 1)), mask=inside)
