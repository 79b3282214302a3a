"""Raw scores of a piece's tokens: products with a scorer's weights for all of them at once, the mLSTM by chunks, from its state on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._serving_pages import PRECISION
from kvpop_vllm.kernels.triton.delayed_mlstm import delayed_mlstm

from kvpop_vllm.kernels.ops import GivenScore, KeyNorm, LinearWeights, MLPWeights, MLSTMWeights, RetentionRule
from kvpop_vllm.kernels.pages import Pages

NORM_EPS = 1e-6
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""C ``[1, H, F, Dv]``, z ``[1, H, F]`` and m ``[1, H]``."""


@dataclass
class Piece:
    """Tokens of some heads that are keys of a piece ``[a, b)``: those of long-range slots, sinks, those of the window, then the new
    ones. From those of the window on their positions go up by one.

    Attributes:
        keys, values: ``[H, T, D]``. score: ``[H, T]`` float32, as it stands in their slots. position: ``[H, T]`` int64.
        held: how many come before the new ones. long_range: how many of these are in long-range slots.
        first: index of token t is ``first + t`` where t is in the window before a, or new.
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
        """Indices of the tokens that leave the window in this piece."""
        return slice(*(self.first + oldest_in_window(rule, q) for q in (self.a, self.b)))


def oldest_in_window(rule: RetentionRule, q: int) -> int:
    """Position of the oldest token that is in the window, and no sink, before position q."""
    return max(rule.sinks, q - rule.window)


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    keys,  # [H, n, D], strides of heads apart
    values, matrix,  # [H, 2 D, C]
    out,  # [H, n, C] float32
    tokens, columns, keys_head,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """``[k; v]`` of a block of tokens, in float32, times a block of columns."""
    first, h = tl.program_id(0) * ROWS, tl.program_id(2).to(tl.int64)
    row, column = first + tl.arange(0, ROWS), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, fits = row < tokens, column < columns
    matrix += h * 2 * SIZE * columns
    acc = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for x in range(0, SIZE, BLOCK_X):
        place = x + tl.arange(0, BLOCK_X)
        there = place < SIZE
        for half in tl.static_range(2):
            base = keys
            if half == 1:
                base = values
            at = base + h * keys_head + row[:, None].to(tl.int64) * SIZE + place[None, :]
            rows = tl.load(at, mask=inside[:, None] & there[None, :], other=0.0).to(tl.float32)
            cells = matrix + (half * SIZE + place)[:, None] * columns + column[None, :]
            block = tl.load(cells, mask=there[:, None] & fits[None, :], other=0.0)
            acc = tl.dot(rows, block, acc, input_precision=PRECISION)
    at = out + (h * tokens + row[:, None].to(tl.int64)) * columns + column[None, :]
    tl.store(at, acc, mask=inside[:, None] & fits[None, :])


def load_state(pages: Pages, rows: torch.Tensor, heads: torch.Tensor, weights: MLSTMWeights) -> State:
    """Return the states of heads; rows ``[H, pages]``: where they lie."""
    flat = pages.state[rows, heads.unsqueeze(1)].flatten(1)
    cells, width = weights.features * weights.value_size, weights.state_floats
    c = flat[:, :cells].unflatten(1, (weights.features, weights.value_size))
    return c.unsqueeze(0), flat[None, :, cells : width - 1], flat[None, :, width - 1]


def store_state(pages: Pages, rows: torch.Tensor, heads: torch.Tensor, state: State) -> None:
    """Write states where :func:`load_state` finds them."""
    c, z, m = state
    flat = torch.cat([c[0].flatten(1), z[0], m[0].unsqueeze(1)], 1)
    region = pages.state.shape[-1]
    for i in range(rows.shape[1]):
        part = flat[:, i * region : (i + 1) * region]
        pages.put(pages.state[..., : part.shape[1]], (rows[:, i], heads, slice(None)), part)


def _products(keys: torch.Tensor, values: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``[k; v]`` of tokens ``keys, values [H, n, D]`` times ``matrix [H, 2 D, C]``: ``[H, n, C]`` float32."""
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
    """``[k; v] . weight[h]``: ``[H, n]``; sums of products, which no setting of matrix products rounds."""
    size = piece.keys.shape[-1]
    keys, values = weight[:, None, :size], weight[:, None, size:]
    return (piece.keys[:, where] * keys).sum(-1) + (piece.values[:, where] * values).sum(-1)


class Scores:
    """What a rule's scorer says, for some heads.

    Args:
        rule: with the tensors of these heads alone.
    """

    def __init__(self, rule: RetentionRule):
        self.rule, self.weights = rule, rule.scorer
        if isinstance(self.weights, MLSTMWeights):
            w = self.weights
            of_values = [] if w.v_proj is None else [w.v_proj]
            gates = [w.igate_weight.unsqueeze(-1), w.fgate_weight.unsqueeze(-1)]
            self.written = torch.cat([w.k_proj, *of_values, *gates], -1)

    def __call__(self, piece: Piece, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Scores ``[H, leaving]`` of the tokens that leave the window in a piece, and the state behind it; scores that are given at
        insertion go into the piece's."""
        weights, where = self.weights, piece.leaving(self.rule)
        keys = piece.keys[:, where]
        if weights is None or self.rule.draws:
            return torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device), None
        if isinstance(weights, GivenScore):
            return piece.score[:, where], None
        if isinstance(weights, KeyNorm):
            return -keys.double().square().sum(-1).sqrt().float(), None
        if isinstance(weights, LinearWeights):
            return _dot(piece, where, weights.weight) + weights.bias.unsqueeze(-1), None
        if isinstance(weights, MLPWeights):
            products = _products(keys, piece.values[:, where], weights.fc1_weight)
            hidden = F.silu(products + weights.fc1_bias.unsqueeze(1))
            return (hidden * weights.fc2_weight.unsqueeze(1)).sum(-1) + weights.fc2_bias.unsqueeze(-1), None
        if weights.delayed:
            return self._mlstm(piece, where, state)
        new = slice(piece.held, None)
        piece.score[:, new], state = self._mlstm(piece, new, state)
        return piece.score[:, where], state

    def _mlstm(self, piece: Piece, read: slice, state: State | None) -> tuple[torch.Tensor, State]:
        """Scores of the tokens ``read``, the last of them with all new tokens in the state."""
        new = slice(piece.held, None)
        query = self._features(_products(piece.keys[:, read], piece.values[:, read], self.weights.q_proj))
        skipped = piece.b - piece.a - query.shape[1]
        query = F.pad(query, (0, 0, skipped, 0)).unsqueeze(0)
        h, state = delayed_mlstm(query, *self.inputs(piece.keys[:, new], piece.values[:, new]), delay=0, state=state)
        return self._score(piece, read, h[0, :, skipped:]), state

    def inputs(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what an mLSTM takes in of tokens ``keys, values [H, n, D]``: write features, values and gates ``[1, H, n, ..]``
        float32."""
        w, columns = self.weights, self.weights.k_proj.shape[-1]
        products = _products(keys, values, self.written)
        key = self._features(products[..., :columns])
        value = values.float() if w.v_proj is None else products[..., columns:-2]
        gates = zip((products[..., -2], products[..., -1]), (w.igate_bias, w.fgate_bias), strict=True)
        return tuple(x.unsqueeze(0) for x in (key, value, *(self._softcap(a + b.unsqueeze(-1)) for a, b in gates)))

    def _features(self, a: torch.Tensor) -> torch.Tensor:
        if self.weights.feature_map == "softmax":
            return a.softmax(-1)
        return torch.cat([a.softmax(-1), (-a).softmax(-1)], -1)

    def _softcap(self, a: torch.Tensor) -> torch.Tensor:
        cap = self.weights.gate_softcap
        return a if cap is None else cap * torch.tanh(a / cap)

    def _score(self, piece: Piece, read: slice, h: torch.Tensor) -> torch.Tensor:
        """Of readouts ``h [H, n, Dv]``."""
        w = self.weights
        if w.norm_weight is not None:
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + NORM_EPS) * w.norm_weight.unsqueeze(1)
        score = (F.silu(h) * w.out_weight.unsqueeze(1)).sum(-1) + w.out_bias.unsqueeze(-1)
        return score if w.skip_weight is None else score + _dot(piece, read, w.skip_weight)
