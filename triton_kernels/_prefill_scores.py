"""Raw scores of the tokens of a piece.

Products with the scorer's weights are formed for all tokens at once. The mLSTM runs chunkwise from its stored
state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._serving_scores import multiply
from kvpop_vllm.kernels.triton.delayed_mlstm import delayed_mlstm

from kvpop_vllm.kernels.ops import RetentionRule

NORM_EPS = 1e-6
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""C ``[1, H, F, Dv]``, z ``[1, H, F]`` and m ``[1, H]``."""


@dataclass
class Piece:
    """Tokens of some heads that are keys of a piece ``[a, b)``.

    The order is: tokens of long-range slots, sinks, window tokens, new tokens. Positions rise by one from the
    first window token on.

    Attributes:
        keys, values: ``[H, T, D]``.
        score: ``[H, T]`` float32, score fields of the slots.
        position: ``[H, T]`` int64.
        held: number of tokens before the new ones.
        long_range: number of tokens in long-range slots.
        first: offset such that ``first + t`` is the index of token t, for tokens in the window before a and
            new tokens.
        a, b: positions of the first new token and behind the last.
    """

    keys: torch.Tensor
    values: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor
    held: int
    long_range: int
    first: int
    a: int
    b: int

    def leaving(self, rule: RetentionRule) -> slice:
        """Return the indices of the tokens that leave the window in this piece."""
        return slice(*(self.first + oldest_in_window(rule, q) for q in (self.a, self.b)))


def oldest_in_window(rule: RetentionRule, q: int) -> int:
    """Return the position of the oldest token in the window before position q, sinks excluded."""
    return max(rule.sinks, q - rule.window)


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    keys,  # [H, n, D], any stride between heads
    values, matrix,  # [H, 2 D, C]
    out,  # [H, n, C] float32
    tokens, columns, keys_head,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Multiply ``[k; v]`` of a block of tokens by a block of columns of a matrix, in float32."""
    first, h = tl.program_id(0) * ROWS, tl.program_id(2).to(tl.int64)
    row, column = first + tl.arange(0, ROWS), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, fits = row < tokens, column < columns
    matrix += h * 2 * SIZE * columns
    token = h * keys_head + row.to(tl.int64) * SIZE
    acc = multiply(keys, values, token, token, inside, matrix, column, columns, SIZE, ROWS, BLOCK_C, BLOCK_X)
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


def _dot(piece: Piece, where: slice, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[k; v] . weight[h]``, ``[H, n]``.

    It is a sum of products, because torch's settings for matrix products do not affect its precision.
    """
    size = piece.keys.shape[-1]
    keys, values = weight[:, None, :size], weight[:, None, size:]
    return (piece.keys[:, where] * keys).sum(-1) + (piece.values[:, where] * values).sum(-1)


class Scores:
    """Scorer of a rule for some heads.

    Args:
        rule: rule with the tensors of these heads alone.
    """

    def __init__(self, rule: RetentionRule):
        self.rule, self.weights = rule, rule.scorer
        if rule.scorer.recurrent:
            w = self.weights
            of_values = [] if w.v_proj is None else [w.v_proj]
            gates = [w.igate_weight.unsqueeze(-1), w.fgate_weight.unsqueeze(-1)]
            self.written = torch.cat([w.k_proj, *of_values, *gates], -1)

    def __call__(self, piece: Piece, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Return the scores ``[H, leaving]`` of the tokens leaving the window in a piece, and the new state.

        Scores computed at insertion are also written to the piece.
        """
        weights, where = self.weights, piece.leaving(self.rule)
        keys = piece.keys[:, where]
        if weights.kernel in ("none", "draw"):
            return torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device), None
        if weights.takes_gate_scores:
            return piece.score[:, where], None
        if weights.kernel == "key_norm":
            return weights.scores(keys, None), None
        if weights.kernel == "linear":
            return _dot(piece, where, weights.weight) + weights.bias.unsqueeze(-1), None
        if weights.kernel == "mlp":
            products = _products(keys, piece.values[:, where], weights.fc1_weight)
            hidden = F.silu(products + weights.fc1_bias.unsqueeze(1))
            return (hidden * weights.fc2_weight.unsqueeze(1)).sum(-1) + weights.fc2_bias.unsqueeze(-1), None
        if weights.delayed:
            return self._mlstm(piece, where, state)
        new = slice(piece.held, None)
        piece.score[:, new], state = self._mlstm(piece, new, state)
        return piece.score[:, where], state

    def _mlstm(self, piece: Piece, read: slice, state: State | None) -> tuple[torch.Tensor, State]:
        """Return the scores of the tokens ``read`` and the state after all new tokens.

        The last token of ``read`` is read out after the last new token.
        """
        new = slice(piece.held, None)
        query = self.weights.phi(_products(piece.keys[:, read], piece.values[:, read], self.weights.q_proj))
        skipped = piece.b - piece.a - query.shape[1]
        query = F.pad(query, (0, 0, skipped, 0)).unsqueeze(0)
        h, state = delayed_mlstm(query, *self.inputs(piece.keys[:, new], piece.values[:, new]), delay=0, state=state)
        return self._score(piece, read, h[0, :, skipped:]), state

    def inputs(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the inputs of an mLSTM's state update for tokens ``keys, values [H, n, D]``.

        Returns:
            Write features, values, and input and forget gate pre-activations, each ``[1, H, n, ...]``
                float32.
        """
        w, columns = self.weights, self.weights.k_proj.shape[-1]
        products = _products(keys, values, self.written)
        key = self.weights.phi(products[..., :columns])
        value = values.float() if w.v_proj is None else products[..., columns:-2]
        gates = zip((products[..., -2], products[..., -1]), (w.igate_bias, w.fgate_bias), strict=True)
        return tuple(x.unsqueeze(0) for x in (key, value, *(w.softcap(a + b.unsqueeze(-1)) for a, b in gates)))

    def _score(self, piece: Piece, read: slice, h: torch.Tensor) -> torch.Tensor:
        """Return the scores of readouts ``h [H, n, Dv]``."""
        w = self.weights
        if w.norm_weight is not None:
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + NORM_EPS) * w.norm_weight.unsqueeze(1)
        score = (F.silu(h) * w.out_weight.unsqueeze(1)).sum(-1) + w.out_bias.unsqueeze(-1)
        return score if w.skip_weight is None else score + _dot(piece, read, w.skip_weight)
