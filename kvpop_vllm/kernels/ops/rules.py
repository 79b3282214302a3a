"""What the kernels of serving take beside tensors: scorer weights, the rule of retention, and their error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvpop_vllm.kernels.pages import moment_floats
from kvpop_vllm.roles import SlotRoles

STATE_M_START = -1e30
"""Stabiliser of an empty mLSTM state; C = z = 0 there."""

REPLAY = 1024
"""Default R: tokens at the end of a protected prefix that a scorer's state is built from."""


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


@dataclass(frozen=True)
class KeyNorm:
    """``r = -|k|_2`` of the key as cached, summed in float64 and rounded to float32: low norms stay (L2-norm,
    arXiv:2406.11430)."""


@dataclass(frozen=True)
class AttentionMass:
    """Attention that a token has got from the queries before the one that decides; what leaves depends on what earlier
    queries still saw, so prefill runs token by token (H2O, arXiv:2306.14048; TOVA, arXiv:2401.06104).

    A query's weights are those over the tokens that it sees, averaged over the G query heads of a KV head. They lie in the
    score words, also those of the ring.

    Attributes:
        mean: sum over all queries from the token's own on, and their mean ``r_t(q) = sum / (q - t)`` ranks; else those of
            the newest query alone.
    """

    mean: bool


@dataclass(frozen=True)
class MomentResidual:
    """``r_t(q) = a_t |v_t - vb - scale Sig k_t|``, a_t the newest query's attention as in :class:`AttentionMass`, and the
    moments those of what has been evicted before q (MomentKV, eq. 10); with nothing evicted, ``a_t |v_t|``."""


@dataclass(frozen=True)
class GivenScore:
    """A score that a gate module computes outside of the kernels and that is passed with its token (``given``).

    Attributes:
        ages: ``effective_t(q) = (q - t) r_t``, with ``r_t = log beta_t`` a token's own decay (TRIM-KV, arXiv:2512.03324),
            instead of r_t.
        threshold: a token that leaves the window with a lower score is evicted though slots are free (DMS,
            arXiv:2506.05345). The number of filled long-range slots then depends on the tokens; it lies in the position
            word of slot 1, which must not be long-range.
    """

    ages: bool = False
    threshold: float | None = None


@dataclass(frozen=True)
class RandomDraw:
    """A score drawn anew at every eviction (:mod:`kvpop_vllm.kernels.draws`), so that a uniformly random token leaves (Random
    Attention, arXiv:2609.03430). lanes [H] int64: layer and KV head of the whole model."""

    lanes: torch.Tensor


@dataclass(frozen=True)
class PromptVotes:
    """Votes of a prompt's last queries for its tokens, counted once at its end, when all of it is still there (SnapKV,
    arXiv:2404.14469). In the tail every token that leaves the window scores 0, those of the prompt less, by their votes
    (:mod:`kvpop_vllm.kernels.compress`).

    Attributes:
        group: G, query heads of a KV head at most. queries: that vote at most; no more than the window has tokens. neighbours: tokens over
            which votes are averaged, zeros beyond the ends counted. safe: None where all heads keep as many tokens; else the heads of
            a layer divide their slots by votes, and this share of the budget is every head's own (Ada-KV, arXiv:2407.11550).
    """

    group: int
    queries: int = 32
    neighbours: int = 5
    safe: float | None = None

    @property
    def divides(self) -> bool:
        """Whether the heads of a layer divide their slots by votes."""
        return self.safe is not None

    def state_floats(self, head_size: int) -> int:
        """float32 words of one head's state: the queries, as they come, and its budget where the votes decide that."""
        return self.queries * self.group * head_size + self.divides


@dataclass(frozen=True)
class SampledMass:
    """Every so many tokens those of large values stay, and a sample of the others, weighted with the attention of the newest queries
    (VaSE, arXiv:2606.03928; :func:`kvpop_vllm.kernels.rounds.sampled_mass`).

    Attributes:
        group: G, query heads of a KV head at most. lanes: ``[H]`` int64, layer and KV head of the whole model. every: m, tokens between
            rounds at most. queries: that weigh at most; no more than the window has tokens. neighbours: tokens over which weights are
            averaged, zeros beyond the ends counted. large: one of so many tokens before the window stays for its value.
    """

    group: int
    lanes: torch.Tensor
    every: int = 64
    queries: int = 64
    neighbours: int = 5
    large: int = 4

    def state_floats(self, head_size: int) -> int:
        """float32 words of one head's state: the newest queries."""
        return self.queries * self.group * head_size


@dataclass(frozen=True)
class Redundancy:
    """Every so many tokens those stay that the newest queries attend to and whose keys resemble few others (R-KV, arXiv:2505.24133;
    :func:`kvpop_vllm.kernels.rounds.without_redundancy`).

    Attributes:
        group, every, queries: as of :class:`SampledMass`. neighbours: tokens of which each takes the largest weight. similar: T, cosine
            above which keys resemble one another. weight: lambda, of attention beside redundancy.
    """

    group: int
    every: int = 128
    queries: int = 8
    neighbours: int = 7
    similar: float = 0.5
    weight: float = 0.1

    def state_floats(self, head_size: int) -> int:
        """float32 words of one head's state: the newest queries."""
        return self.queries * self.group * head_size


ScorerWeights = (
    LinearWeights
    | MLPWeights
    | MLSTMWeights
    | KeyNorm
    | AttentionMass
    | MomentResidual
    | GivenScore
    | RandomDraw
    | None
)
"""What scores a token; None scores every token 0."""


@dataclass(frozen=True)
class RetentionRule(SlotRoles):
    """Which tokens a layer keeps: sinks, window, and the k best by effective score (DESIGN "The rule"; KVpop eq. 5).

    ``effective_t(q) = r_t + floor((q - t) / decay_step) * log_gamma[h]``, formed and compared in float64; of equal
    scores the older token is evicted. log_gamma [H] float64.

    ``moment_correction``: outputs gain what the moments of the evicted tokens say of theirs (MomentKV, eqs. 9, 11, 12),
    ``(Z_R o_R + Z_E o_E) / (Z_R + Z_E)`` with ``o_E = vb + scale Sig q`` and ``log Z_E = log n + scale q . kb``; the victim of
    a step counts before its query attends.

    For where tokens lie see :class:`SlotRoles`; k is ``B - s - w``. Behind a protected prefix of p tokens the rule is that of
    the tail (:meth:`behind`), and a scorer's state starts from the last ``replay`` tokens of the prefix. With ``votes`` a prompt is
    held until its end, and what stays of it is chosen once. With ``rounds`` scores are made anew every so many tokens
    (:mod:`kvpop_vllm.kernels.rounds`).

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
        """The same rule with its tensors, the scorer's too, on that device."""
        scorer, rounds = (None if part is None else _moved(part, device) for part in (self.scorer, self.rounds))
        return replace(_moved(self, device), scorer=scorer, rounds=rounds)

    @property
    def coupled(self) -> bool:
        """Whether scores depend on what earlier queries saw."""
        return isinstance(self.scorer, AttentionMass | MomentResidual)

    @property
    def ages(self) -> bool:
        """Whether each token decays at its own rate, its score."""
        return isinstance(self.scorer, GivenScore) and self.scorer.ages

    @property
    def threshold(self) -> float | None:
        """The score below which a token is evicted though slots are free."""
        return self.scorer.threshold if isinstance(self.scorer, GivenScore) else None

    @property
    def draws(self) -> bool:
        """Whether scores are drawn at every eviction."""
        return isinstance(self.scorer, RandomDraw)

    @property
    def seeded(self) -> bool:
        """Whether what stays depends on the request's seed."""
        return self.draws or isinstance(self.rounds, SampledMass)

    @property
    def sequential(self) -> bool:
        """Whether a token's step needs that of the token before it, so that those of a chunk are done one by one."""
        return self.coupled or self.moment_correction or self.threshold is not None

    @property
    def keeps_moments(self) -> bool:
        """Whether the moments of evicted tokens lie behind the scorer's state (:func:`kvpop_vllm.kernels.pages.moment_floats`)."""
        return self.moment_correction or isinstance(self.scorer, MomentResidual)

    @property
    def compresses(self) -> bool:
        """Whether a prompt is held until its end, and then compressed into the tail."""
        return self.votes is not None

    @property
    def replays(self) -> bool:
        """Whether a scorer's state must be built when a tail begins behind a protected prefix."""
        return isinstance(self.scorer, MLSTMWeights)

    @property
    def scorer_floats(self) -> int:
        """float32 words of the scorer's state, which is the first of a head's state; moments follow, and queries come last."""
        return self.scorer.state_floats if isinstance(self.scorer, MLSTMWeights) else 0

    def state_floats(self, head_size: int) -> int:
        """float32 words of one head's state."""
        moments = moment_floats(head_size) if self.keeps_moments else 0
        queries = sum(part.state_floats(head_size) for part in (self.votes, self.rounds) if part is not None)
        return self.scorer_floats + moments + queries


def _moved(part, device: torch.device | str):
    """A dataclass with its tensors on that device."""
    tensors = {name: value.to(device) for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
    return replace(part, **tensors)
