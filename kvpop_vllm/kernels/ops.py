"""Schemas of all kernels: one signature per op, whatever implements it.

Axes, once for all docstrings::

    R  requests of a decode batch        L  tokens of a prefill chunk       S  tokens of a sequence
    H  KV heads                          G  query heads per KV head         Hq = H * G query heads (head h serves h*G .. h*G+G-1)
    D  head size                         B  budget: slots per head          N  slots per block
    P  entries of a page-table row       F  features of the mLSTM           Dv value width of the mLSTM
    M  hidden width of the MLP scorer

Symbols follow the paper (KVpop, arXiv version "Predictive Online Pruning"): ``s`` sinks, ``w`` window, ``k = B - s - w``
long-range slots, ``q`` the position of the current token, ``u = q - w`` the token leaving the window, ``r_t`` raw scores.

Every op takes ``impl="auto" | "reference" | "cpp" | "triton"``. ``auto`` takes the fastest implementation that supports
the tensors (see :mod:`kvpop_vllm.kernels.dispatch`); a name asked for explicitly never falls back to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpop_vllm.kernels.dispatch import resolve
from kvpop_vllm.kernels.pages import Pages

STATE_M_START = -1e30
"""Stabiliser of an empty mLSTM state; C = z = 0 there."""


class StepOrderError(RuntimeError):
    """A step does not start where the request's state ends (``tokens_seen``): a replay or a rewound stream.

    Raised before anything is written.
    """


@dataclass(frozen=True)
class LinearWeights:
    """Headwise linear scorer, ``r = weight . [k; v] + bias`` (KVpop E.2). weight [H, 2D], bias [H]; float32."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class MLPWeights:
    """Headwise two-layer MLP with SiLU on ``[k; v]`` (KVpop E.2).

    fc1_weight [H, 2D, M], fc1_bias [H, M], fc2_weight [H, M], fc2_bias [H]; float32.
    """

    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor


@dataclass(frozen=True)
class MLSTMWeights:
    """Delayed mLSTM scorer (KVpop E.3, E.4), float32.

    q_proj, k_proj [H, 2D, Fp] with F = 2 Fp features for ``hedgehog`` and Fp for ``softmax``; v_proj [H, 2D, Dv] or None
    (the value itself, Dv = D); igate_weight, fgate_weight [H, 2D]; igate_bias, fgate_bias [H]; out_weight [H, Dv],
    out_bias [H]; norm_weight [H, Dv] or None; skip_weight [H, 2D] or None; gate_softcap c of ``c * tanh(a / c)`` or None;
    delayed False reads token q at its own insertion instead of ``u = q - w`` at the boundary.

    A head's state is the flat float32 array ``C [F, Dv], z [F], m [1]``.
    """

    q_proj: torch.Tensor
    k_proj: torch.Tensor
    v_proj: torch.Tensor | None
    igate_weight: torch.Tensor
    igate_bias: torch.Tensor
    fgate_weight: torch.Tensor
    fgate_bias: torch.Tensor
    out_weight: torch.Tensor
    out_bias: torch.Tensor
    norm_weight: torch.Tensor | None = None
    skip_weight: torch.Tensor | None = None
    feature_map: str = "hedgehog"
    gate_softcap: float | None = None
    delayed: bool = True

    @property
    def features(self) -> int:
        """F."""
        return self.q_proj.shape[-1] * (2 if self.feature_map == "hedgehog" else 1)

    @property
    def value_size(self) -> int:
        """Dv."""
        return self.out_weight.shape[-1]

    @property
    def state_floats(self) -> int:
        """float32 words of one head's state."""
        return self.features * self.value_size + self.features + 1


ScorerWeights = LinearWeights | MLPWeights | MLSTMWeights | None
"""What scores a token; None scores every token 0."""


@dataclass(frozen=True)
class RetentionRule:
    """Which tokens a layer keeps: sinks, window, and the k best by effective score (SEMANTICS section 2; KVpop eq. 5).

    ``effective_t(q) = r_t + floor((q - t) / decay_step) * log_gamma[h]``, formed and compared in float64; of equal
    scores the older token is evicted. log_gamma [H] float64.
    """

    sinks: int
    window: int
    log_gamma: torch.Tensor
    decay_step: int = 1
    scorer: ScorerWeights = None


def decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    valid: torch.Tensor,
    budgets: torch.Tensor,
    *,
    rule: RetentionRule,
    scale: float,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of R requests: state update, delayed readout, score, argmin, slot move, attention.

    In this order, per request and head, with q the token's position (DESIGN "Pages", KVpop Figure 3):
    the state takes in ``x_q = [k_q; v_q]``; ``u = q - w`` (if ``u >= s``) is scored with a state that includes q; it is
    copied from its ring slot into the first free long-range slot, or over the long-range token of lowest effective
    score, or dropped if it is itself the lowest; q is written into its sink slot, or into ring slot ``s + (q - s) % w``
    where u sat; attention runs over the valid slots. With ``positions[r] == 0`` the state is initialised first.

    Args:
        q: ``[R, Hq, D]``, k, v: ``[R, H, D]`` in the cache's dtype. Last axis contiguous.
        pages: the layer's cache; written in place.
        page_table: ``[R, H, P]`` int32 block numbers, state blocks first; stride 0 over heads is fine.
        positions: ``[R]`` int64, position of each request's token.
        valid: ``[R, H]`` int32, slots filled before the step: ``min(position, budget)``.
        budgets: ``[R, H]`` int32, B of each head.
        rule: what is kept. scale: factor on q . k.

    Returns:
        ``out [R, Hq, D]`` in q's dtype and ``lse [R, Hq]`` float32, the natural log-sum-exp of the scaled logits over the
        retained tokens.

    Raises:
        StepOrderError: some request's ``positions`` differs from its ``tokens_seen``; nothing has been written.
    """
    run = resolve("decode_step", impl, q)
    return run(q, k, v, pages, page_table, positions, valid, budgets, rule=rule, scale=scale)


def prefill_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    start: int,
    budgets: torch.Tensor,
    *,
    rule: RetentionRule,
    scale: float,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The L tokens ``[start, start + L)`` of one request; equals L decode steps to rounding (SEMANTICS section 4).

    Each query sees the slots retained before the chunk and the chunk's own tokens, under its own cutoff; afterwards the
    survivors are written into the slots. Memory is bounded by B slots plus the chunk.

    Args:
        q: ``[L, Hq, D]``, k, v: ``[L, H, D]`` in the cache's dtype.
        page_table: ``[H, P]`` int32. start: position of the first token. budgets: ``[H]`` int32.
        The rest as in :func:`decode_step`.

    Returns:
        ``out [L, Hq, D]`` in q's dtype, ``lse [L, Hq]`` float32.

    Raises:
        StepOrderError: as in :func:`decode_step`.
    """
    run = resolve("prefill_chunk", impl, q)
    return run(q, k, v, pages, page_table, start, budgets, rule=rule, scale=scale)


def online_topk(
    score: torch.Tensor,
    position: torch.Tensor,
    held: int,
    *,
    topk: int,
    window: int,
    log_gamma: torch.Tensor,
    decay_step: int = 1,
    impl: str = "auto",
) -> torch.Tensor:
    """When each token is evicted from k long-range slots, arrivals one by one, evictions permanent.

    The first ``held`` tokens are in the slots already (any order); the others arrive in order of position, token t at
    query ``q = t + window``; at each arrival, if more than k are held, the lowest effective score at q leaves.

    Args:
        score: ``[H, T]`` float32 raw scores. position: ``[H, T]`` int64; the arrivals' positions increase by one.
        log_gamma: ``[H]`` float64.

    Returns:
        ``evicted_at [H, T]`` int64: the query position at which a token is first missing, or ``torch.iinfo(int64).max``.
    """
    run = resolve("online_topk", impl, score)
    return run(score, position, held, topk=topk, window=window, log_gamma=log_gamma, decay_step=decay_step)


def delayed_mlstm(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    *,
    delay: int,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    chunk: int = 64,
    impl: str = "auto",
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Chunkwise mLSTM with a time-shifted readout (KVpop eqs. 38-41).

    Args:
        q, k: ``[B, H, S, F]`` features (after the feature map). v: ``[B, H, S, Dv]``.
        igate, fgate: ``[B, H, S]`` gate pre-activations; ``i = exp``, ``f = sigmoid``.
        delay: token ``u`` is read at ``q = u + delay``. With ``delay=0`` row q of ``q`` is read at q: to continue from a
            ``state``, pass the features of the tokens to read there.
        state: ``(C [B, H, F, Dv], z [B, H, F], m [B, H])`` float32, or None for the empty state.
        chunk: tokens per chunk.

    Returns:
        ``h [B, H, S, Dv]`` float32, zero where ``u + delay >= S``, and the state after S tokens.

    Raises:
        ValueError: a state together with ``delay > 0``.
    """
    run = resolve("delayed_mlstm", impl, q)
    return run(q, k, v, igate, fgate, delay=delay, state=state, chunk=chunk)
