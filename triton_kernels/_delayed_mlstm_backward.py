"""Gradients of the delayed mLSTM; docs/kernels.md has the formulas and their symbols."""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._matrix_tiles import store_tile, tile


@triton.jit
def pair_logs(decays, gates, L: tl.constexpr):
    """Return ``b_i - b_j + i_j`` of all tokens i and j of a chunk, -inf where j > i."""
    tokens = tl.arange(0, L)
    logs = decays[:, None] - decays[None, :] + gates[None, :]
    return tl.where(tokens[:, None] >= tokens[None, :], logs, float("-inf"))


@triton.jit
def chunk_of(decay, igate, chunks, L: tl.constexpr):
    """Return row, first token and index of a program's chunk in a grid (any, chunks, rows), and what it has of tokens.

    That is their indices in ``[rows, chunks * L]``, their running sums of log f and their input gates.
    """
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    number = row * chunks + chunk
    tokens = number * L + tl.arange(0, L)
    return row, chunk * L, number, tokens, tl.load(decay + tokens), tl.load(igate + tokens)


@triton.jit
def _backward_states(
    q,
    grad,  # dh, [rows, S, DV]
    decay, m_rows, denominators,
    qz_grad,  # e, [rows, chunks * L]
    c_states, z_states, m_states,
    c_grads, z_grads,  # [rows, chunks, F, DV] and [rows, chunks, F], gradient of the state behind each chunk
    flow,  # [tiles, rows, chunks], <C', dC'> behind each chunk, in parts
    delay, length, chunks,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the state behind each chunk, from the last to the first; each program has one tile of C.

    Grid: 64 features, 64 columns, rows. 202 MB: 56 us, and more by 128 chunks one after another.
    """
    f, column = tl.program_id(0) * BLOCK_F, tl.program_id(1) * BLOCK_V
    row = tl.program_id(2).to(tl.int64)
    part = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + row
    features = f + tl.arange(0, BLOCK_F)
    has_z = features < tl.where(column == 0, FEATURES, 0)
    dc = tl.zeros([BLOCK_F, BLOCK_V], tl.float32)
    dz = tl.zeros([BLOCK_F], tl.float32)
    for i in range(chunks):
        chunk = chunks - 1 - i
        after_chunk = row * (chunks + 1) + chunk + 1
        c = tile(c_states + after_chunk * FEATURES * WIDTH, f, FEATURES, column, WIDTH, BLOCK_F, BLOCK_V)
        z = tl.load(z_states + after_chunk * FEATURES + features, mask=has_z, other=0.0)
        tl.store(flow + part * chunks + chunk, tl.sum(tl.sum(c * dc, 1), 0) + tl.sum(z * dz, 0))
        number = row * chunks + chunk
        store_tile(c_grads + number * FEATURES * WIDTH, dc, f, FEATURES, column, WIDTH, BLOCK_F, BLOCK_V)
        tl.store(z_grads + number * FEATURES + features, dz, mask=has_z)

        tokens = number * L + tl.arange(0, L)
        decays = tl.load(decay + tokens)
        m_start, m_end = tl.load(m_states + after_chunk - 1), tl.load(m_states + after_chunk)
        keep = tl.exp(tl.load(decay + number * L + L - 1) + m_start - m_end)
        old = tl.exp(decays + m_start - tl.load(m_rows + tokens))
        first = chunk * L - delay
        block_q = tile(q + row * length * FEATURES, first, length - delay, f, FEATURES, L, BLOCK_F) * old[:, None]
        g = tile(grad + row * length * WIDTH, first, length - delay, column, WIDTH, L, BLOCK_V)
        g = g / tl.load(denominators + tokens)[:, None]
        dc = tl.dot(tl.trans(block_q), g, dc * keep, input_precision=PRECISION)
        dz = dz * keep + tl.sum(block_q * tl.load(qz_grad + tokens)[:, None], 0)


@triton.jit
def _backward_features(
    q, k, v, grad, igate, decay, m_rows, denominators, qz_grad, c_states, z_states, m_states, c_grads, z_grads,
    dq, dk,  # [rows, S, F]
    q_dq, k_dk,  # [parts, rows, chunks * L], q . dq and k . dk, in parts over blocks of features
    delay, length, chunks,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of dq and dk of a chunk.

    Grid: 64 features, chunks, rows. 337 MB: 93 us.
    """
    f = tl.program_id(0) * BLOCK_F
    row, first, number, tokens, decays, gates = chunk_of(decay, igate, chunks, L)
    state = number + row  # index in [rows, chunks + 1]
    m, e, denominator = tl.load(m_rows + tokens), tl.load(qz_grad + tokens), tl.load(denominators + tokens)

    products = tl.zeros([L, L], tl.float32)
    dq_acc = tl.zeros([L, BLOCK_F], tl.float32)
    dk_acc = tl.zeros([L, BLOCK_F], tl.float32)
    for column in range(0, WIDTH, BLOCK_V):
        g = tile(grad + row * length * WIDTH, first - delay, length - delay, column, WIDTH, L, BLOCK_V)
        g = g / denominator[:, None]
        block_v = tile(v + row * length * WIDTH, first, length, column, WIDTH, L, BLOCK_V)
        c = tile(c_states + state * FEATURES * WIDTH, f, FEATURES, column, WIDTH, BLOCK_F, BLOCK_V)
        dc = tile(c_grads + number * FEATURES * WIDTH, f, FEATURES, column, WIDTH, BLOCK_F, BLOCK_V)
        products = tl.dot(g, tl.trans(block_v), products, input_precision=PRECISION)
        dq_acc = tl.dot(g, tl.trans(c), dq_acc, input_precision=PRECISION)
        dk_acc = tl.dot(block_v, tl.trans(dc), dk_acc, input_precision=PRECISION)
    features = f + tl.arange(0, BLOCK_F)
    z = tl.load(z_states + state * FEATURES + features, mask=features < FEATURES, other=0.0)
    dz = tl.load(z_grads + number * FEATURES + features, mask=features < FEATURES, other=0.0)
    old = tl.exp(decays + tl.load(m_states + state) - m)
    write = tl.exp(tl.load(decay + number * L + L - 1) - decays + gates - tl.load(m_states + state + 1))
    products = (products + e[:, None]) * tl.exp(pair_logs(decays, gates, L) - m[:, None])

    block_q = tile(q + row * length * FEATURES, first - delay, length - delay, f, FEATURES, L, BLOCK_F)
    block_k = tile(k + row * length * FEATURES, first, length, f, FEATURES, L, BLOCK_F)
    dq_acc = (dq_acc + z[None, :] * e[:, None]) * old[:, None]
    dq_acc = tl.dot(products, block_k, dq_acc, input_precision=PRECISION)
    dk_acc = (dk_acc + dz[None, :]) * write[:, None]
    dk_acc = tl.dot(tl.trans(products), block_q, dk_acc, input_precision=PRECISION)
    store_tile(dq + row * length * FEATURES, dq_acc, first - delay, length - delay, f, FEATURES, L, BLOCK_F)
    store_tile(dk + row * length * FEATURES, dk_acc, first, length, f, FEATURES, L, BLOCK_F)
    part = tl.program_id(0) * tl.num_programs(2) * chunks * L
    tl.store(q_dq + part + tokens, tl.sum(block_q * dq_acc, 1))
    tl.store(k_dk + part + tokens, tl.sum(block_k * dk_acc, 1))


@triton.jit
def _backward_values(
    q, k, grad, igate, decay, m_rows, denominators, m_states, c_grads,
    dv,  # [rows, S, DV]
    delay, length, chunks,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of columns of dv of a chunk.

    Grid: 64 columns, chunks, rows. 202 MB: 56 us.
    """
    column = tl.program_id(0) * BLOCK_V
    row, first, number, tokens, decays, gates = chunk_of(decay, igate, chunks, L)
    m = tl.load(m_rows + tokens)
    products = tl.zeros([L, L], tl.float32)
    acc = tl.zeros([L, BLOCK_V], tl.float32)
    for f in range(0, FEATURES, BLOCK_F):
        block_q = tile(q + row * length * FEATURES, first - delay, length - delay, f, FEATURES, L, BLOCK_F)
        block_k = tile(k + row * length * FEATURES, first, length, f, FEATURES, L, BLOCK_F)
        dc = tile(c_grads + number * FEATURES * WIDTH, f, FEATURES, column, WIDTH, BLOCK_F, BLOCK_V)
        products = tl.dot(block_q, tl.trans(block_k), products, input_precision=PRECISION)
        acc = tl.dot(block_k, dc, acc, input_precision=PRECISION)
    weights = products * tl.exp(pair_logs(decays, gates, L) - m[:, None])
    write = tl.exp(tl.load(decay + number * L + L - 1) - decays + gates - tl.load(m_states + number + row + 1))
    g = tile(grad + row * length * WIDTH, first - delay, length - delay, column, WIDTH, L, BLOCK_V)
    g = g / tl.load(denominators + tokens)[:, None]
    acc = tl.dot(tl.trans(weights), g, acc * write[:, None], input_precision=PRECISION)
    store_tile(dv + row * length * WIDTH, acc, first, length, column, WIDTH, L, BLOCK_V)
