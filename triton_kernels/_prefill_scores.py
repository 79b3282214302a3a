"""Raw scores of the tokens of a piece, by the scorers' own formulas; the mLSTM runs chunkwise from its stored state."""

from __future__ import annotations

import torch
from kvpop_vllm.kernels.triton._prefill_plan import Piece
from kvpop_vllm.kernels.triton.delayed_mlstm import mlstm_of_segments

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""C ``[1, n, F, Dv]``, z ``[1, n, F]`` and m ``[1, n]``, for n heads of segments."""


def mlstm_scores(weights, piece: Piece, read, new, state: State) -> tuple[torch.Tensor, State]:
    """Return the scores ``[H, P]`` of the tokens ``read``, read out with the new ones, and the state behind these.

    Args:
        weights: the mLSTM scorer.
        piece: the piece.
        read, new: ``[H, P, 2D]``, keys and values of a token for each tail row.
        state: state of all tails of the piece and all heads, the heads in the outer order.
    """
    read = read.float()
    inputs = mlstm_inputs(weights, new, piece.tail_rows[1])
    h, state = mlstm_of_segments(weights.query(read), *inputs, *piece.states, [x[0] for x in state])
    return weights.score(h, read), tuple(x.unsqueeze(0) for x in state)


def mlstm_inputs(weights, tokens: torch.Tensor, none: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the inputs of an mLSTM's state update for ``tokens [H, n, 2D]``, but those of the mask ``none [n]``.

    Returns:
        Write features, values, and input and forget gate pre-activations, each ``[H, n, ...]`` float32.
    """
    key, value, igate, fgate = weights.inputs(tokens.float())
    return key, value, igate.masked_fill(none, -torch.inf), fgate.masked_fill(none, torch.inf)
