"""Inputs of an eviction, computed before anything moves: projections, mLSTM cells, residuals, the lowest score.

Results go to workspaces; of the pages only the cells of states are written. A function without an underscore is one
phase of a step for one block and one head, with the head's workspace ``work``: decode_step has a kernel around it, and
prefill calls it token after token. There, ``row`` is the index of a token in the batch, r its request, q its position.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton import _serving_pages as pages
from kvpop_vllm.kernels.triton._constants import PRECISION
from kvpop_vllm.kernels.triton._lowest_score import lower_of, lowest_of, none_yet
from kvpop_vllm.kernels.triton._matrix_tiles import load_rows
from kvpop_vllm.kernels.triton._serving_pages import element_at, moments_at, place_of, row_at, state_at, word_at

ROWS, COLUMNS, DEPTH = tl.constexpr(16), tl.constexpr(64), tl.constexpr(32)  # products: tokens, columns, steps of sums
CELLS, SLOTS = tl.constexpr(32), tl.constexpr(32)  # columns of cells and slots of residuals of a block


@triton.jit
def project(step, out, row, r, h, q, part, P: tl.constexpr):
    """Multiply ``[k; v]`` of ROWS tokens, each on its own, by the ``part``-th block of columns of matrices.

    A token is the new one, or the one leaving the window for the read features of a delayed scorer and for an MLP.
    Products go to the workspaces at ``out``. Position -1 stands for no token.
    """
    protected, sinks, window = pages.roles_of(step, r, P)
    since = q - protected  # negative for padding and protected tokens
    scored = since >= 0
    blocks = (P.columns + COLUMNS - 1) // COLUMNS
    matrix, number = step.weights.fc1_weight, 0 * part
    if P.scorer == "mlstm":
        matrix, number = step.weights.q_proj, tl.minimum(part // blocks, 2)
        if number == 1:
            matrix = step.weights.k_proj
        if step.weights.v_proj is not None:
            if number == 2:
                matrix = step.weights.v_proj
    columns = tl.where(number == 2, P.values, P.columns)
    key_row, value_row = element_at(step.k, row, h), element_at(step.v, row, h)
    if P.delayed:
        if number == 0:
            scored = since >= sinks + window
            leaving = row_at(step.cache, r, h, pages.ring_slot(tl.where(scored, since, 0), sinks, window), P)
            key_row, value_row = step.cache.k + leaving, step.cache.v + leaving
    if tl.max(scored.to(tl.int32), 0) > 0:
        column = (part - number * blocks) * COLUMNS + tl.arange(0, COLUMNS)
        matrix += h * 2 * P.size * columns
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for x in range(0, P.size, DEPTH):
            place = x + tl.arange(0, DEPTH)
            valid = place < P.size
            for half in tl.static_range(2):
                start = value_row if half == 1 else key_row
                inside = scored[:, None] & valid[None, :]
                rows = tl.load(start[:, None] + place[None, :], mask=inside, other=0.0).to(tl.float32)
                cells = matrix + (half * P.size + place)[:, None] * columns + column[None, :]
                block = tl.load(cells, mask=valid[:, None] & (column < columns)[None, :], other=0.0)
                acc = tl.dot(rows, block, acc, input_precision=PRECISION)
        place = out[:, None] + (number * P.columns + column)[None, :]
        tl.store(place, acc, mask=scored[:, None] & (column < columns)[None, :])


@triton.jit(do_not_specialize=["requests"])
def _project(step, requests, P: tl.constexpr):
    """Run :func:`project`. Grid: 16 requests, 64 columns, H. 2.1 MB of weights, for up to 16 requests: 0.6 us."""
    pages.await_launch(P)
    h, heads = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < requests
    r = tl.where(inside, r, 0).to(tl.int64)
    q = tl.where(inside, pages.position_of(step, r), -1)
    project(step, step.work + (r * heads + h) * P.work, r, r, h, q, tl.program_id(1), P)


@triton.jit
def victim_of(step, work, r, h, q, P: tl.constexpr):
    """Return the long-range slot with the lowest effective score at q; -1 if slots are free or all scores are NaN."""
    cache = step.cache
    tail = pages.tail_of(step, r, h, q, P)
    end = tl.where(pages.used_slots(step, r, h, tail, P) < tail.budget, tail.first_long, tail.budget)
    gamma, key = pages.decay_and_key(step, r, h, P)
    best, oldest, best_slot = none_yet(P.searched)
    for start in range(tail.first_long, end, P.searched):
        slot = start + tl.arange(0, P.searched)
        inside = slot < end
        word = word_at(cache, r, h, tl.where(inside, slot, 0), P)
        raw = tl.load(cache.score + word, mask=inside, other=0.0)
        token = tl.load(cache.position + word, mask=inside, other=0)
        factor = raw
        if P.residual:
            factor = tl.load(work + P.factors + slot, mask=inside, other=0.0)
        best, oldest, best_slot = lower_of(best, oldest, best_slot, raw, token, slot, inside, q, gamma, factor, key, P)
    _, slot = lowest_of(best, oldest, best_slot)
    return slot


@triton.jit
def features_of(projected, P: tl.constexpr):
    """Return the features phi ``[P.padded_features]`` of the P.columns products at ``projected``, 0 beyond F."""
    f = tl.arange(0, P.padded_features)
    plus = f < P.columns
    inside = f < P.features
    a = tl.load(projected + f % P.columns, mask=inside, other=0.0)
    a = tl.where(inside, tl.where(plus, a, -a), float("-inf"))
    raised = tl.where(plus, tl.max(tl.where(plus, a, float("-inf")), 0), tl.max(tl.where(plus, float("-inf"), a), 0))
    weight = tl.exp(a - tl.where(inside, raised, 0.0))
    totals = tl.where(plus, tl.sum(tl.where(plus, weight, 0.0), 0), tl.sum(tl.where(plus, 0.0, weight), 0))
    return tl.where(inside, weight / tl.where(inside, totals, 1.0), 0.0)


@triton.jit
def dot(x_key, x_value, weight, h, P: tl.constexpr):
    """Return ``[k; v] . weight[h]`` of one token."""
    offset, column = 2 * h * P.size, tl.arange(0, P.padded)
    keys = tl.load(weight + offset + column, mask=column < P.size, other=0.0)
    values = tl.load(weight + offset + P.size + column, mask=column < P.size, other=0.0)
    return tl.sum(x_key * keys, 0) + tl.sum(x_value * values, 0)


@triton.jit
def new_token(step, row, h, P: tl.constexpr):
    """Return key and value ``[P.padded]`` float32 of a token of the batch."""
    column = tl.arange(0, P.padded)
    key = tl.load(element_at(step.k, row, h) + column, mask=column < P.size, other=0.0)
    value = tl.load(element_at(step.v, row, h) + column, mask=column < P.size, other=0.0)
    return key.to(tl.float32), value.to(tl.float32)


@triton.jit
def _softcap(a, P: tl.constexpr):
    """Return ``c tanh(a / c)``, or a without a cap, in float64."""
    a = a.to(tl.float64)
    if P.softcap is not None:
        fade = tl.exp(-2.0 * tl.abs(a) / P.softcap)
        size = P.softcap * (1.0 - fade) / (1.0 + fade)
        a = tl.where(a < 0.0, -size, size)
    return a


@triton.jit
def gate_logs(igate, fgate, P: tl.constexpr):
    """Return the input gate and the logarithm of the forget gate, float32, of their products with an mLSTM's weights."""
    fgate = _softcap(fgate, P)
    log_f = tl.minimum(fgate, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(fgate)))
    return _softcap(igate, P).to(tl.float32), log_f.to(tl.float32)


@triton.jit
def gates_of(step, m, row, h, q, P: tl.constexpr):
    """Return the new m of an mLSTM, whose old one is ``m``, and the factors of old cells and of the new token."""
    key, value = new_token(step, row, h, P)
    w = step.weights
    igate = dot(key, value, w.igate_weight, h, P) + tl.load(w.igate_bias + h)
    fgate = dot(key, value, w.fgate_weight, h, P) + tl.load(w.fgate_bias + h)
    igate, log_f = gate_logs(igate, fgate, P)
    old = log_f + tl.where(q > 0, m, -1e30)
    m = tl.maximum(old, igate)
    return m, tl.exp(old - m), tl.exp(igate - m)


@triton.jit
def update_cells(step, work, row, r, h, q, first, P: tl.constexpr):
    """Update a block of columns of an mLSTM's cells with the new token, and read it out.

    z and m stay unchanged, because all blocks read them; :mod:`_serving_retain` writes them. After a prefix, the state
    includes tokens of the prefix.
    """
    cache = step.cache
    column = first + tl.arange(0, CELLS)
    f = tl.arange(0, P.padded_features)
    fits = column < P.values
    inside = (f < P.features)[:, None] & fits[None, :]
    address = state_at(cache, r, h, f[:, None] * P.values + column[None, :], inside, P)
    stored = (f < tl.where(q > 0, P.features, 0))[:, None] & fits[None, :]
    c = tl.load(address, mask=stored, other=0.0)
    m_at = state_at(cache, r, h, P.state_words - 1, True, P)
    _, keep, gain = gates_of(step, tl.load(m_at), row, h, q, P)
    if step.weights.v_proj is not None:
        value = tl.load(work + 2 * P.columns + column, mask=fits, other=0.0)
    else:
        value = tl.load(element_at(step.v, row, h) + column, mask=fits, other=0.0).to(tl.float32)
    write = features_of(work + P.columns, P) * gain
    c = c * keep + write[:, None] * value[None, :]
    # before any token leaves the window, nothing looks at the numerators
    tl.store(work + P.numerators + column, tl.sum(features_of(work, P)[:, None] * c, 0), mask=fits)
    tl.debug_barrier()  # all threads have read the cells, which several threads may hold
    tl.store(address, c, mask=inside)


@triton.jit
def _cells(step, P: tl.constexpr):
    """Update a block of columns of an mLSTM's cells; one more program looks for the slot of the lowest score.

    Grid: 32 columns or the search, H, R. 1.06 MB, the state read and written: 0.3 us; 19 us for 64 requests.
    """
    h, r, work, flags = place_of(step, P)
    q = pages.position_of(step, r)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(flags + 5, victim_of(step, work, r, h, q, P))
    elif pages.tail_of(step, r, h, q, P).since >= 0:
        update_cells(step, work, r, r, h, q, tl.program_id(0) * CELLS, P)


@triton.jit
def residuals(step, work, r, h, tail, first, P: tl.constexpr):
    """Compute ``|v - vb - scale Sig k|`` of a block of a tail's slots from ``first`` on; all slots are in use."""
    cache, evicted = step.cache, tail.since - tail.budget
    slot = first + tl.arange(0, SLOTS)
    inside = slot < tail.budget
    column = tl.arange(0, P.padded)
    fits = column < P.size
    row = row_at(cache, r, h, tl.where(inside, slot, 0), P)
    padded: tl.constexpr = P.padded  # Triton 3.6 does not accept an attribute in a shape
    predicted = tl.zeros([SLOTS, padded], tl.float32)
    mean = tl.zeros([padded], tl.float32)
    if evicted > 0:
        mean = tl.load(moments_at(cache, r, h, 1, column, fits, P), mask=fits, other=0.0)
        for x in range(0, P.size, DEPTH):
            place = x + tl.arange(0, DEPTH)
            usable = inside[:, None] & (place < P.size)[None, :]
            keys = tl.load(cache.k + row[:, None] + place[None, :], mask=usable, other=0.0).to(tl.float32)
            usable = (place < P.size)[:, None] & fits[None, :]
            address = moments_at(cache, r, h, (2 + place)[:, None], column[None, :], usable, P)
            predicted = tl.dot(keys, tl.load(address, mask=usable, other=0.0), predicted, input_precision=PRECISION)
        predicted *= step.scale / evicted
    values = load_rows(cache.v + row, inside, P).to(tl.float32)
    left = tl.where(fits[None, :], values - mean[None, :] - predicted, 0.0)
    tl.store(work + P.factors + slot, tl.sqrt(tl.sum(left * left, 1)), mask=inside)


@triton.jit
def _residuals(step, P: tl.constexpr):
    """Run :func:`residuals`. Grid: 32 slots, H, R. 17 MB: 5 us; but 1.1 GFLOP, three products of TF32 each: 13 us."""
    h, r, work, _ = place_of(step, P)
    first = tl.program_id(0) * SLOTS
    tail = pages.tail_of(step, r, h, pages.position_of(step, r), P)
    if (tail.since >= tail.budget) & (first < tail.budget):
        residuals(step, work, r, h, tail, first, P)
