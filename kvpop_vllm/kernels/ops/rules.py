"""Arguments of the serving kernels other than tensors: scorer weights, retention rule and step error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvpop_vllm.kernels.pages import moment_floats
from kvpop_vllm.roles import SlotRoles

STATE_M_START = -1e30
"""Stabiliser m of an empty mLSTM state; C and z are 0 there."""

REPLAY = 1024
"""Default R: number of tokens at the end of a protected prefix from which a scorer's state is built."""


class StepOrderError(RuntimeError):
    """Error raised if a step does not start at the request's ``tokens_seen``: a replayed or rewound stream.

    It is raised before anything is written.
    """


@dataclass(frozen=True)
class LinearWeights:
    """Headwise linear scorer ``r = weight . [k; v] + bias`` (KVpop E.2).

    Attributes:
        weight: ``[H, 2D]`` float32.
        bias: ``[H]`` float32.
    """

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class MLPWeights:
    """Headwise two-layer MLP scorer with SiLU on ``[k; v]`` (KVpop E.2).

    Attributes:
        fc1_weight: ``[H, 2D, M]`` float32.
        fc1_bias: ``[H, M]`` float32.
        fc2_weight: ``[H, M]`` float32.
        fc2_bias: ``[H]`` float32.
    """

    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor


@dataclass(frozen=True)
class MLSTMWeights:
    """Delayed mLSTM scorer (KVpop E.3, E.4).

    The state of a head is the flat float32 array ``C [F, Dv], z [F], m [1]``.

    Attributes:
        q_proj, k_proj: ``[H, 2D, Fp]`` float32; the number of features F is ``2 Fp`` for ``hedgehog``, Fp for
            ``softmax``.
        v_proj: ``[H, 2D, Dv]`` float32, or None to use the token's value itself (Dv = D).
        igate_weight, fgate_weight: ``[H, 2D]`` float32.
        igate_bias, fgate_bias: ``[H]`` float32.
        out_weight: ``[H, Dv]`` float32.
        out_bias: ``[H]`` float32.
        norm_weight: ``[H, Dv]`` float32, or None for no norm.
        skip_weight: ``[H, 2D]`` float32, or None for no skip connection.
        feature_map: ``hedgehog`` or ``softmax``.
        gate_softcap: c of ``c * tanh(a / c)`` on gate pre-activations, or None.
        delayed: if True, token ``u = q - w`` is read out when it leaves the window; if False, token q is read
            out at its own insertion.
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
        """Number of features F."""
        return self.q_proj.shape[-1] * (2 if self.feature_map == "hedgehog" else 1)

    @property
    def value_size(self) -> int:
        """Value width Dv."""
        return self.out_weight.shape[-1]

    @property
    def state_floats(self) -> int:
        """Number of float32 values in the state of one head."""
        return self.features * self.value_size + self.features + 1


@dataclass(frozen=True)
class KeyNorm:
    """Score ``r = -|k|_2`` of the key as cached: keys of low norm are retained (L2-norm, arXiv:2406.11430).

    The sum is formed in float64 and rounded to float32.
    """


@dataclass(frozen=True)
class AttentionMass:
    """Score from the attention that a token received from earlier queries (H2O, TOVA).

    Sources: H2O, arXiv:2306.14048; TOVA, arXiv:2401.06104. Each eviction depends on which tokens earlier
    queries still saw, so prefill runs token by token. The weights of a query over the tokens that it sees are
    averaged over the G query heads of a KV head. They are stored in the score fields of all slots, including
    the ring.

    Attributes:
        mean: if True, the weights of all queries from the token's own on are summed, and tokens are ranked by
            ``r_t(q) = sum / (q - t)``; if False, by the weights of the newest query alone.
    """

    mean: bool


@dataclass(frozen=True)
class MomentResidual:
    """Score ``r_t(q) = a_t |v_t - vb - scale Sig k_t|`` (MomentKV, eq. 10).

    a_t is the newest query's attention as in :class:`AttentionMass`. The moments are those of all tokens
    evicted before q. If nothing has been evicted, the score is ``a_t |v_t|``.
    """


@dataclass(frozen=True)
class GateScore:
    """Score that a gate module computes outside of the kernels and passes per token (``given``).

    Attributes:
        ages: if True, ``effective_t(q) = (q - t) r_t`` instead of r_t, with ``r_t = log beta_t`` the token's
            own decay (TRIM-KV, arXiv:2512.03324).
        threshold: score below which a token leaving the window is evicted even if slots are free (DMS,
            arXiv:2506.05345). The number of filled long-range slots then depends on the tokens. It is stored
            in the position field of slot 1, which must not be long-range.
    """

    ages: bool = False
    threshold: float | None = None


@dataclass(frozen=True)
class RandomDraw:
    """Score drawn anew at every eviction, so that a uniformly random token is evicted.

    Source: Random Attention, arXiv:2609.03430. Formula: :mod:`kvpop_vllm.kernels.draws`.

    Attributes:
        lanes: ``[H]`` int64, layer and KV head within the whole model
            (:func:`~kvpop_vllm.kernels.draws.head_lanes`).
    """

    lanes: torch.Tensor


@dataclass(frozen=True)
class PromptVotes:
    """Votes of a prompt's last queries for its tokens, counted once at its end (SnapKV, arXiv:2404.14469).

    The whole prompt is still in memory when the votes are counted. In the tail every token that leaves the
    window scores 0. Tokens of the prompt score less, by their votes (:mod:`kvpop_vllm.kernels.compress`).

    Attributes:
        group: largest number G of query heads per KV head.
        queries: largest number of voting queries; the number used is at most the window size.
        neighbours: number of adjacent tokens over which votes are averaged; zeros beyond the ends are
            included.
        safe: None if all heads keep the same number of tokens. Otherwise the heads of a layer divide their
            slots by votes, and this share of the budget is guaranteed to every head (Ada-KV,
            arXiv:2407.11550).
    """

    group: int
    queries: int = 32
    neighbours: int = 5
    safe: float | None = None

    @property
    def adaptive_head_budgets(self) -> bool:
        """True if the heads of a layer divide their slots by votes."""
        return self.safe is not None

    def state_floats(self, head_size: int) -> int:
        """Return the number of float32 values in one head's state.

        They are the last queries and, if the heads divide their slots, the head's budget.
        """
        return self.queries * self.group * head_size + self.adaptive_head_budgets


@dataclass(frozen=True)
class SampledMass:
    """Rounds of VaSE (arXiv:2606.03928): keep large values and a sample of the other tokens.

    The sample is weighted with the attention of the newest queries
    (:func:`kvpop_vllm.kernels.rounds.sampled_mass`).

    Attributes:
        group: largest number G of query heads per KV head.
        lanes: ``[H]`` int64, layer and KV head within the whole model.
        every: largest number m of tokens between rounds.
        queries: largest number of queries used; the number used is at most the window size.
        neighbours: number of adjacent tokens over which weights are averaged; zeros beyond the ends are
            included.
        large: one in ``large`` tokens before the window is kept for its value.
    """

    group: int
    lanes: torch.Tensor
    every: int = 64
    queries: int = 64
    neighbours: int = 5
    large: int = 4

    def state_floats(self, head_size: int) -> int:
        """Return the number of float32 values in one head's state: the newest queries."""
        return self.queries * self.group * head_size


@dataclass(frozen=True)
class Redundancy:
    """Rounds of R-KV (arXiv:2505.24133): keep attended tokens whose keys resemble few others.

    See :func:`kvpop_vllm.kernels.rounds.without_redundancy`.

    Attributes:
        group, every, queries: as in :class:`SampledMass`.
        neighbours: number of adjacent tokens over which each token takes the largest weight.
        similar: T, cosine above which two keys count as similar.
        weight: lambda, weight of attention against redundancy.
    """

    group: int
    every: int = 128
    queries: int = 8
    neighbours: int = 7
    similar: float = 0.5
    weight: float = 0.1

    def state_floats(self, head_size: int) -> int:
        """Return the number of float32 values in one head's state: the newest queries."""
        return self.queries * self.group * head_size


ScorerWeights = (
    LinearWeights | MLPWeights | MLSTMWeights | KeyNorm | AttentionMass | MomentResidual | GateScore | RandomDraw | None
)
"""Scorer of a rule; None scores every token 0."""


@dataclass(frozen=True)
class RetentionRule(SlotRoles):
    """Rule that decides which tokens a layer retains (DESIGN "The rule"; KVpop eq. 5).

    Retained are sinks, window, and the k best tokens by effective score, k = ``B - s - w``. The effective
    score is ``effective_t(q) = r_t + floor((q - t) / decay_step) * log_gamma[h]``, formed and compared in
    float64. Of equal scores the older token is evicted. For the roles of slots see :class:`SlotRoles`.

    Behind a protected prefix of p tokens the rule is that of the tail (:meth:`behind`).

    Attributes:
        sinks: s.
        window: w.
        log_gamma: ``[H]`` float64, logarithm of each head's decay.
        decay_step: n, tokens per decay step.
        scorer: scorer of the tokens, or None.
        moment_correction: if True, add a moment-based estimate of the evicted tokens' contribution to the
            output (MomentKV, eqs. 9, 11, 12): ``(Z_R o_R + Z_E o_E) / (Z_R + Z_E)`` with
            ``o_E = vb + scale Sig q`` and ``log Z_E = log n + scale q . kb``. The moments include the token
            evicted in the same step.
        first: p, the first token of the tail.
        replay: R, number of prefix tokens from which a scorer's state is built
            (:func:`kvpop_vllm.kernels.ops.begin_tail`).
        votes: if set, a prompt is retained until its end and then compressed once.
        rounds: if set, scores are recomputed at regular intervals (:mod:`kvpop_vllm.kernels.rounds`).

    Raises:
        ValueError: a threshold with a window of less than 2.
    """

    sinks: int
    window: int
    log_gamma: torch.Tensor
    decay_step: int = 1
    scorer: ScorerWeights = None
    moment_correction: bool = False
    first: int = 0
    replay: int = REPLAY
    votes: PromptVotes | None = None
    rounds: SampledMass | Redundancy | None = None

    def __post_init__(self):
        if self.threshold is not None and self.window < 2:
            raise ValueError("a threshold needs a window of at least 2: set --kv-window to 2 or more")

    def to(self, device: torch.device | str) -> RetentionRule:
        """Return this rule with its tensors, including those of the scorer and the rounds, on ``device``."""
        scorer, rounds = (None if part is None else _moved(part, device) for part in (self.scorer, self.rounds))
        return replace(_moved(self, device), scorer=scorer, rounds=rounds)

    @property
    def coupled(self) -> bool:
        """True if scores depend on the attention of earlier queries."""
        return isinstance(self.scorer, AttentionMass | MomentResidual)

    @property
    def ages(self) -> bool:
        """True if each token decays at its own rate, given by its score."""
        return isinstance(self.scorer, GateScore) and self.scorer.ages

    @property
    def threshold(self) -> float | None:
        """Score below which a token is evicted even if slots are free, or None."""
        return self.scorer.threshold if isinstance(self.scorer, GateScore) else None

    @property
    def draws(self) -> bool:
        """True if scores are drawn anew at every eviction."""
        return isinstance(self.scorer, RandomDraw)

    @property
    def seeded(self) -> bool:
        """True if the retained tokens depend on the request's seed."""
        return self.draws or isinstance(self.rounds, SampledMass)

    @property
    def sequential(self) -> bool:
        """True if each step depends on the previous one, so that chunks are processed token by token."""
        return self.coupled or self.moment_correction or self.threshold is not None

    @property
    def keeps_moments(self) -> bool:
        """True if the state holds moments of evicted tokens behind the scorer's state.

        See :func:`kvpop_vllm.kernels.pages.moment_floats`.
        """
        return self.moment_correction or isinstance(self.scorer, MomentResidual)

    @property
    def compresses(self) -> bool:
        """True if a prompt is retained until its end and then compressed into the tail."""
        return self.votes is not None

    @property
    def replays(self) -> bool:
        """True if a scorer's state must be built when a tail begins behind a protected prefix."""
        return isinstance(self.scorer, MLSTMWeights)

    @property
    def scorer_floats(self) -> int:
        """Number of float32 values in the scorer's state.

        A head's state holds the scorer's state, then moments, then queries.
        """
        return self.scorer.state_floats if isinstance(self.scorer, MLSTMWeights) else 0

    def state_floats(self, head_size: int) -> int:
        """Return the number of float32 values in one head's state."""
        moments = moment_floats(head_size) if self.keeps_moments else 0
        queries = sum(part.state_floats(head_size) for part in (self.votes, self.rounds) if part is not None)
        return self.scorer_floats + moments + queries


def _moved(part, device: torch.device | str):
    """Return a dataclass with its tensors on ``device``."""
    tensors = {name: value.to(device) for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
    return replace(part, **tensors)
