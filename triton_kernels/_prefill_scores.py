"""Inputs, states and scores of an mLSTM for the tail rows of a piece; a row's read token leaves the window with it.

States are read from the pages of their requests and written back, by :func:`delayed_mlstm._states`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._constants import PRECISION
from kvpop_vllm.kernels.triton._prefill_plan import block_of
from kvpop_vllm.kernels.triton._prefill_slots import gather
from kvpop_vllm.kernels.triton._serving_pages import element_at, state_at
from kvpop_vllm.kernels.triton._serving_scores import gate_logs
from kvpop_vllm.kernels.triton.delayed_mlstm import EMPTY_M, EPS

DEPTH, COLUMNS = tl.constexpr(32), tl.constexpr(64)  # steps of sums, and columns of values that are formed together


@triton.jit
def _half(start, present, x, P: tl.constexpr):
    """Return channels ``[x, x + DEPTH)`` of rows of D elements at the addresses ``start``, float32, 0 where none are."""
    place = x + tl.arange(0, DEPTH)
    return tl.load(start[:, None] + place[None, :], mask=present[:, None] & (place < P.size)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _products(key, value, present, matrix, h, first, columns, P: tl.constexpr, WIDTH: tl.constexpr):
    """Return the products of rows ``[k; v]`` with WIDTH columns from the ``first`` on of a head's ``[2 D, columns]``."""
    column = first + tl.arange(0, WIDTH)
    acc = tl.zeros([key.shape[0], WIDTH], tl.float32)
    matrix += h * 2 * P.size * columns
    for x in range(0, P.size, DEPTH):
        place = x + tl.arange(0, DEPTH)
        inside = (place < P.size)[:, None] & (column < columns)[None, :]
        for half in tl.static_range(2):
            rows = _half(value if half == 1 else key, present, x, P)
            cells = matrix + (half * P.size + place)[:, None] * columns + column[None, :]
            acc = tl.dot(rows, tl.load(cells, mask=inside, other=0.0), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _weighted(key, value, present, weight, h, P: tl.constexpr):
    """Return the products of rows ``[k; v]`` with a head's vector ``[2 D]``."""
    total = tl.zeros([key.shape[0]], tl.float32)
    weight += h * 2 * P.size
    for x in range(0, P.size, DEPTH):
        place = x + tl.arange(0, DEPTH)
        for half in tl.static_range(2):
            weights = tl.load(weight + half * P.size + place, mask=place < P.size, other=0.0)
            total += tl.sum(_half(value if half == 1 else key, present, x, P) * weights[None, :], 1)
    return total


@triton.jit
def _store_softmax(features, place, logits, column, inside, P: tl.constexpr):
    """Store the softmax over the columns of rows ``logits`` at the rows ``place`` of ``features [rows, F]``."""
    logits = tl.where(inside[None, :], logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    weights /= tl.sum(weights, 1)[:, None]
    tl.store(features + place[:, None] * P.features + column[None, :], weights, mask=inside[None, :])


@triton.jit
def _store_features(features, place, key, value, present, matrix, h, P: tl.constexpr, WIDTH: tl.constexpr):
    """Store the features phi of rows ``[k; v]``."""
    column = tl.arange(0, WIDTH)
    inside = column < P.columns
    logits = _products(key, value, present, matrix, h, 0, P.columns, P, WIDTH)
    _store_softmax(features, place, logits, column, inside, P)
    if P.features > P.columns:
        _store_softmax(features + P.columns, place, -logits, column, inside, P)


@triton.jit
def row_of(numbers, h, rows, index):
    """Return the tail rows of tokens of a segment, of those of all heads."""
    return h * rows + numbers.row + index


@triton.jit
def _addresses(tokens, left, numbers, h, index, place, P: tl.constexpr):
    """Return the addresses of keys and values of the read tokens of rows: those of ``left``, or the new ones if None."""
    k, v = tokens
    token = numbers.token.to(tl.int64) + numbers.inside + tl.minimum(index, numbers.length - 1)
    key, value = element_at(k, token, h), element_at(v, token, h)
    if left is not None:
        key, value = left + 2 * place * P.size, left + (2 * place + 1) * P.size
    return key, value


@triton.jit(do_not_specialize=["rows", "states"])
def _mlstm_inputs(
    tokens,  # k, v [T, H, D]
    left,  # [H, P, 2 D], written: tokens that leave the window, which are read out; None to read out the new ones
    weights, cache, segments, blocks,
    read, write, values,  # [H, P, F] twice, [H, P, DV]
    igate, decay,  # [H, P], input gates, -inf where no token is, and running sums of log f in each block
    z_states, m_states,  # [H, states, F] and [H, states], of which those before segments are written
    rows, states,
    P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gather tokens, compute features, values and gates of a block, and copy z and m ahead of a segment's first one.

    Grid: 64 tail rows, H. 134 MB of tokens read, 268 MB written: 110 us.
    """
    numbers, first = block_of(segments, blocks, tl.program_id(0))
    h, index = tl.program_id(1).to(tl.int64), first + tl.arange(0, ROWS)
    present, place = index < numbers.length, row_of(numbers, h, rows, index)
    if left is not None:
        gather(tokens, None, cache, numbers, h, first, left, None, rows, P, ROWS)
        tl.debug_barrier()  # the rows can be read
    key, value = _addresses(tokens, left, numbers, h, index, place, P)
    _store_features(read, place, key, value, present, weights.q_proj, h, P, WIDTH)
    key, value = _addresses(tokens, None, numbers, h, index, place, P)
    _store_features(write, place, key, value, present, weights.k_proj, h, P, WIDTH)
    gate = _weighted(key, value, present, weights.igate_weight, h, P) + tl.load(weights.igate_bias + h)
    forget = _weighted(key, value, present, weights.fgate_weight, h, P) + tl.load(weights.fgate_bias + h)
    gate, log_f = gate_logs(gate, forget, P)
    tl.store(igate + place, tl.where(present, gate, float("-inf")))
    tl.store(decay + place, tl.cumsum(tl.where(present, log_f, 0.0), 0))
    for x in range(0, P.values, COLUMNS):
        column = x + tl.arange(0, COLUMNS)
        if weights.v_proj is None:
            mask = present[:, None] & (column < P.values)[None, :]
            block = tl.load(value[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            block = _products(key, value, present, weights.v_proj, h, x, P.values, P, COLUMNS)
        tl.store(values + place[:, None] * P.values + column[None, :], block, mask=(column < P.values)[None, :])
    if first == 0:
        r, f = numbers.request.to(tl.int64), tl.arange(0, P.padded_features)
        state = h * states + numbers.row // ROWS + tl.load(blocks + 2 * tl.program_id(0))
        begun, inside = numbers.start + numbers.first == 0, f < P.features
        stored = f < tl.where(begun, 0, P.features)
        z = tl.load(state_at(cache, r, h, P.features * P.values + f, stored, P), mask=stored, other=0.0)
        m = tl.load(state_at(cache, r, h, P.state_words - 1, True, P))
        tl.store(z_states + state * P.features + f, z, mask=inside)
        tl.store(m_states + state, tl.where(begun, EMPTY_M, m))


@triton.jit(do_not_specialize=["rows"])
def _mlstm_scores(
    tokens, left, weights, segments, blocks,
    readouts,  # [H, P, DV]
    score,  # [H, P]
    rows,
    P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a block's read tokens. Grid: 64 tail rows, H. 134 MB: 40 us."""
    numbers, first = block_of(segments, blocks, tl.program_id(0))
    h, index = tl.program_id(1).to(tl.int64), first + tl.arange(0, ROWS)
    present, place = index < numbers.length, row_of(numbers, h, rows, index)
    readouts += place * P.values
    scale = tl.full([ROWS], 1.0, tl.float32)
    if weights.norm_weight is not None:
        squares = tl.zeros([ROWS], tl.float32)
        for x in range(0, P.values, DEPTH):
            hidden = _columns(readouts, present, x, P)
            squares += tl.sum(hidden * hidden, 1)
        scale = 1.0 / tl.sqrt_rn(squares / P.values + EPS)
    total = tl.zeros([ROWS], tl.float32) + tl.load(weights.out_bias + h)
    for x in range(0, P.values, DEPTH):
        hidden, column = _columns(readouts, present, x, P) * scale[:, None], x + tl.arange(0, DEPTH)
        if weights.norm_weight is not None:
            hidden *= tl.load(weights.norm_weight + h * P.values + column, mask=column < P.values, other=0.0)[None, :]
        out = tl.load(weights.out_weight + h * P.values + column, mask=column < P.values, other=0.0)
        total += tl.sum(hidden / (1.0 + tl.exp(-hidden)) * out[None, :], 1)
    if weights.skip_weight is not None:
        key, value = _addresses(tokens, left, numbers, h, index, place, P)
        total += _weighted(key, value, present, weights.skip_weight, h, P)
    tl.store(score + place, total)


@triton.jit
def _columns(readouts, present, x, P: tl.constexpr):
    """Return the columns ``[x, x + DEPTH)`` of rows of readouts, 0 where there are none."""
    column = x + tl.arange(0, DEPTH)
    mask = present[:, None] & (column < P.values)[None, :]
    return tl.load(readouts[:, None] + column[None, :], mask=mask, other=0.0)
