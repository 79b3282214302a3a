"""Raw scores of the tokens of a piece.

Products with the scorer's weights are formed for all tokens at once. The mLSTM runs chunkwise from its stored
state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._prefill_plan import Piece
from kvpop_vllm.kernels.triton._serving_scores import multiply
from kvpop_vllm.kernels.triton.delayed_mlstm import mlstm_of_segments

NORM_EPS = 1e-6
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""C ``[1, n, F, Dv]``, z ``[1, n, F]`` and m ``[1, n]``, for n heads of segments."""


class Rows(NamedTuple):
    """Keys and values ``[H, P, D]`` of one token for each tail row, and its score ``[H, P]`` from insertion or None."""

    keys: torch.Tensor
    values: torch.Tensor
    score: torch.Tensor | None


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    keys,  # [H, n, D], any stride between heads
    values, matrix,  # [H, 2 D, C]
    out,  # [H, n, C] float32
    tokens, columns, keys_head,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Multiply ``[k; v]`` of a block of tokens by a block of columns of a matrix, in float32.

    Grid: 64 tokens, 64 columns, H. For 194 columns 84 MB: 23 us; but 6.5 GFLOP, in three products of TF32 each: 79 us.
    """
    first, h = tl.program_id(0) * ROWS, tl.program_id(2).to(tl.int64)
    row, column = first + tl.arange(0, ROWS), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, fits = row < tokens, column < columns
    matrix += h * 2 * SIZE * columns
    token = h * keys_head + row.to(tl.int64) * SIZE
    acc = multiply(keys + token, values + token, inside, matrix, column, columns, SIZE, ROWS, BLOCK_C, BLOCK_X)
    at = out + (h * tokens + row[:, None].to(tl.int64)) * columns + column[None, :]
    tl.store(at, acc, mask=inside[:, None] & fits[None, :])


def _products(keys: torch.Tensor, values: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``[k; v]`` of ``keys, values [H, n, D]`` times ``matrix [H, 2 D, C]``: ``[H, n, C]`` float32."""
    heads, tokens, size = keys.shape
    columns = matrix.shape[-1]
    out = torch.empty(heads, tokens, columns, dtype=torch.float32, device=keys.device)
    if tokens:
        _multiply[triton.cdiv(tokens, 64), triton.cdiv(columns, 64), heads](
            keys, values, matrix, out, tokens, columns, keys.stride(0),
            SIZE=size, ROWS=64, BLOCK_C=64, BLOCK_X=32, num_warps=4,
        )  # fmt: skip
    return out


def _dot(rows: Rows, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[k; v] . weight[h]``, ``[H, P]``.

    It is a sum of products, because torch's settings for matrix products do not affect its precision.
    """
    size = rows.keys.shape[-1]
    keys, values = weight[:, None, :size], weight[:, None, size:]
    return (rows.keys * keys).sum(-1) + (rows.values * values).sum(-1)


def scores_of(weights, leaving: Rows) -> torch.Tensor:
    """Return the scores ``[H, P]`` of the tokens that leave the window, for a scorer that is no mLSTM."""
    if leaving.score is not None:
        return leaving.score
    if weights.kernel == "key_norm":
        return weights.scores(leaving.keys, None)
    if weights.kernel == "linear":
        return _dot(leaving, weights.weight) + weights.bias.unsqueeze(-1)
    if weights.kernel == "mlp":
        hidden = F.silu(_products(leaving.keys, leaving.values, weights.fc1_weight) + weights.fc1_bias.unsqueeze(1))
        return (hidden * weights.fc2_weight.unsqueeze(1)).sum(-1) + weights.fc2_bias.unsqueeze(-1)
    return torch.zeros(leaving.keys.shape[:2], dtype=torch.float32, device=leaving.keys.device)


def mlstm_scores(weights, piece: Piece, read: Rows, new: Rows, state: State) -> tuple[torch.Tensor, State]:
    """Return the scores ``[H, P]`` of the tokens ``read``, read out with the new ones, and the state behind these.

    The state is of all tails of the piece and all heads, the heads in the outer order.
    """
    query = weights.phi(_products(read.keys, read.values, weights.q_proj))
    inputs = mlstm_inputs(weights, new.keys, new.values, piece.tail_rows[1])
    h, state = mlstm_of_segments(query, *inputs, *piece.states, [x[0] for x in state])
    return _readout_scores(weights, read, h), tuple(x.unsqueeze(0) for x in state)


def mlstm_inputs(w, keys: torch.Tensor, values: torch.Tensor, none: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the inputs of an mLSTM's state update for tokens ``keys, values [H, n, D]``, but those of the mask ``none [n]``.

    Returns:
        Write features, values, and input and forget gate pre-activations, each ``[H, n, ...]`` float32.
    """
    of_values, columns = [] if w.v_proj is None else [w.v_proj], w.k_proj.shape[-1]
    gates = w.igate_weight.unsqueeze(-1), w.fgate_weight.unsqueeze(-1)
    products = _products(keys, values, torch.cat([w.k_proj, *of_values, *gates], -1))
    key = w.phi(products[..., :columns])
    value = values.float() if w.v_proj is None else products[..., columns:-2]
    biases = torch.stack([w.igate_bias, w.fgate_bias], -1).unsqueeze(1)
    igate, fgate = w.softcap(products[..., -2:] + biases).unbind(-1)
    return key, value, igate.masked_fill(none, -torch.inf), fgate.masked_fill(none, torch.inf)


def _readout_scores(w, rows: Rows, h: torch.Tensor) -> torch.Tensor:
    """Return the scores of readouts ``h [H, P, Dv]``."""
    if w.norm_weight is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + NORM_EPS) * w.norm_weight.unsqueeze(1)
    score = (F.silu(h) * w.out_weight.unsqueeze(1)).sum(-1) + w.out_bias.unsqueeze(-1)
    return score if w.skip_weight is None else score + _dot(rows, w.skip_weight)
