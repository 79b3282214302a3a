"""Arguments of the serving kernels other than tensors: scorer weights, retention rule and step error."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from kvpop_vllm.cache.pages import moment_floats
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.roles import Retention

if TYPE_CHECKING:
    from typing import Self

STATE_M_START = -1e30
"""Stabiliser m of an empty mLSTM state; C and z are 0 there."""

REPLAY = 1024
"""Default R: number of tokens at the end of a protected prefix from which a scorer's state is built."""


class StepOrderError(RuntimeError):
    """Error raised if a step does not start at the request's ``tokens_seen``: a replayed or rewound stream.

    It is raised before anything is written.
    """


class TokenScorer:
    """Scorer of a rule, as the kernels see it.

    A subclass is a frozen dataclass whose tensors have the head axis first. It overrides the class attributes
    that differ and, if it is stateless, :meth:`scores`. That is all that a stateless kind needs: without a
    ``kernel`` the ops evaluate :meth:`scores` when a token arrives and pass its score to the kernels. A kind
    with a ``kernel`` is evaluated by the kernels when a token leaves the window.

    Attributes:
        kernel: name of the kind in the C++ and Triton kernels, or None.
        coupled: True if scores depend on the attention of earlier queries.
        draws: True if each eviction draws new scores.
        ages: True if each token decays at its own rate, given by its score.
        threshold: score below which a token is evicted even if slots are free, or None.
        takes_gate_scores: True if the score of each token is passed to the ops.
        keeps_moments: True if scores depend on the moments of evicted tokens.
        recurrent: True if the scorer is an mLSTM, whose state every token updates.
        state_floats: number of float32 values in the scorer's state of one head.
    """

    kernel: ClassVar[str | None] = None
    coupled: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    ages: ClassVar[bool] = False
    threshold: ClassVar[float | None] = None
    takes_gate_scores: ClassVar[bool] = False
    keeps_moments: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False
    state_floats: ClassVar[int] = 0

    def scores(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the raw scores ``[..., H, S]`` float32 of keys and values ``[..., H, S, D]`` as cached."""
        raise NotImplementedError(f"{type(self).__name__} has no scores()")

    def of_heads(self, heads: torch.Tensor | slice) -> Self:
        """Return the scorer of some heads."""
        return type(self)(**{n: t[heads] if isinstance(t, torch.Tensor) else t for n, t in vars(self).items()})

    def options(self) -> dict:
        """Return the scorer's settings other than tensors, as the C++ kernels take them."""
        return {}


@dataclass(frozen=True)
class NoScore(TokenScorer):
    """Score 0 of every token: with a decay, the newest tokens are retained."""

    kernel: ClassVar[str] = "none"

    def scores(self, k, v):
        return torch.zeros(k.shape[:-1], dtype=torch.float32, device=k.device)


@dataclass(frozen=True)
class KeyNorm(TokenScorer):
    """Score ``r = -|k|_2`` of the key as cached: keys of low norm are retained (L2-norm, arXiv:2406.11430).

    The sum is formed in float64 and rounded to float32.
    """

    kernel: ClassVar[str] = "key_norm"

    def scores(self, k, v):
        return -k.double().square().sum(-1).sqrt().float()


@dataclass(frozen=True)
class AttentionMass(TokenScorer):
    """Score from the attention that a token received from earlier queries (H2O, TOVA).

    Sources: H2O, arXiv:2306.14048; TOVA, arXiv:2401.06104. Each eviction depends on which tokens earlier
    queries still saw, so prefill runs token by token. The weights of a query over the tokens that it sees are
    averaged over the G query heads of a KV head. They are stored in the score fields of all slots, including
    the ring.

    Attributes:
        mean: if True, the weights of all queries from the token's own on are summed, and tokens are ranked by
            ``r_t(q) = sum / (q - t)``; if False, by the weights of the newest query alone.
    """

    kernel: ClassVar[str] = "attention_mass"
    coupled: ClassVar[bool] = True

    mean: bool

    def options(self):
        return {"mean": self.mean}


@dataclass(frozen=True)
class MomentResidual(TokenScorer):
    """Score ``r_t(q) = a_t |v_t - vb - scale Sig k_t|`` (MomentKV, eq. 10).

    a_t is the newest query's attention as in :class:`AttentionMass`. The moments are those of all tokens
    evicted before q. If nothing has been evicted, the score is ``a_t |v_t|``.
    """

    kernel: ClassVar[str] = "moment_residual"
    coupled: ClassVar[bool] = True
    keeps_moments: ClassVar[bool] = True


@dataclass(frozen=True)
class GateScore(TokenScorer):
    """Score that a gate module computes outside of the kernels and passes per token.

    Attributes:
        ages: if True, ``effective_t(q) = (q - t) r_t`` instead of r_t, with ``r_t = log beta_t`` the token's
            own decay (TRIM-KV, arXiv:2512.03324).
        threshold: score below which a token leaving the window is evicted even if slots are free (DMS,
            arXiv:2506.05345). The number of filled long-range slots then depends on the tokens. It is stored
            in the position field of slot 1, which must not be long-range.
    """

    kernel: ClassVar[str] = "gate_scores"
    takes_gate_scores: ClassVar[bool] = True

    ages: bool = False
    threshold: float | None = None

    def options(self):
        return {"ages": self.ages, "threshold": self.threshold}


@dataclass(frozen=True)
class RandomDraw(TokenScorer):
    """Score drawn again at every eviction, so that a uniformly random token is evicted.

    Source: Random Attention, arXiv:2609.03430. Formula: :mod:`kvpop_vllm.kernels.draws`.

    Attributes:
        lanes: ``[H]`` int64, layer and KV head within the whole model
            (:func:`~kvpop_vllm.kernels.draws.head_lanes`).
    """

    kernel: ClassVar[str] = "draw"
    draws: ClassVar[bool] = True

    lanes: torch.Tensor


@dataclass(frozen=True)
class PromptVotes:
    """Votes of a prompt's last queries for its tokens, counted once at its end (SnapKV, arXiv:2404.14469).

    The whole prompt is still in memory when the votes are counted. In the tail every token that leaves the
    window scores 0. Tokens of the prompt score less, by their votes (:mod:`kvpop_vllm.rules.compress`).

    Attributes:
        group: largest number G of query heads per KV head.
        queries: largest number of voting queries; the number used is at most the window size.
        neighbours: number of adjacent tokens over which votes are averaged; zeros beyond the ends are
            included.
        safe: None if all heads keep the same number of tokens. Otherwise the heads of a layer divide their
            slots by votes, and this share of the budget is guaranteed to every head (Ada-KV,
            arXiv:2407.11550).
        makes_slots: False, since prompt tokens are retained as they are. The state lasts as long as the request.
    """

    makes_slots: ClassVar[bool] = False

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

    def after(self, slots: RequestSlots) -> RequestSlots:
        """Return what a request is after the end of its prompt: an unprotected one."""
        return slots._replace(prefix=0, made_slots=0, left=slots.prefix)


class _StoresQueries:
    """Rules whose state of a head is its newest queries, in float32."""

    def state_floats(self, head_size: int) -> int:
        """Return the number of float32 values in one head's state."""
        return self.queries * self.group * head_size


@dataclass(frozen=True)
class PromptMatching(_StoresQueries):
    """Slots that are made of a prompt at its end by attention matching (arXiv:2602.16284).

    The last w tokens stay as they are. Those before them become ``B - w`` slots with biases, fitted to the prompt's
    last queries (:mod:`kvpop_vllm.rules.compress`). These slots are never evicted. The tail is a ring: each later token
    takes the place of the oldest one in it. A prompt of at most B tokens is kept whole.

    Attributes:
        group: largest number G of query heads per KV head.
        queries: largest number of queries of the fit; the number used is at most the window size.
        adaptive_head_budgets: False, since all heads have as many slots.
        makes_slots: True. Nothing reads the state after the prompt's end.
    """

    adaptive_head_budgets: ClassVar[bool] = False
    makes_slots: ClassVar[bool] = True

    group: int
    queries: int

    def after(self, slots: RequestSlots) -> RequestSlots:
        """Return what a request is after the end of its prompt: one that begins with the slots made of it, and a ring.

        A prompt of at most B tokens leaves no more slots than it has tokens before its last w, and the ring has the
        others.
        """
        prompt, budget, window = slots.prefix, slots.budget, slots.window
        made_slots = min(max(0, prompt - window), budget - window)
        ring = budget - made_slots
        sizes = {"prefix": made_slots, "made_slots": made_slots, "budget": ring, "window": ring}
        return slots._replace(**sizes, shift=max(0, prompt - budget), left=prompt)


@dataclass(frozen=True)
class SampledMass(_StoresQueries):
    """Rounds of VaSE (arXiv:2606.03928): keep large values and a sample of the other tokens.

    The sample is weighted with the attention of the newest queries
    (:func:`kvpop_vllm.rules.rounds.sampled_mass`).

    Attributes:
        group: largest number G of query heads per KV head.
        lanes: ``[H]`` int64, layer and KV head within the whole model.
        every: the method's m, tokens between rounds (:func:`kvpop_vllm.rules.rounds.layer_rounds`).
        queries: largest number of queries used; the number used is at most the window size.
        neighbours: number of adjacent tokens over which weights are averaged; zeros beyond the ends are
            included.
        large: one in ``large`` tokens before the window is kept for its value.
    """

    draws: ClassVar[bool] = True

    group: int
    lanes: torch.Tensor
    every: int = 64
    queries: int = 64
    neighbours: int = 5
    large: int = 4


@dataclass(frozen=True)
class Redundancy(_StoresQueries):
    """Rounds of R-KV (arXiv:2505.24133): keep attended tokens whose keys resemble few others.

    See :func:`kvpop_vllm.rules.rounds.without_redundancy`.

    Attributes:
        group, every, queries: as in :class:`SampledMass`.
        neighbours: number of adjacent tokens over which each token takes the largest weight.
        similar: T, cosine above which two keys count as similar.
        weight: lambda, weight of attention against redundancy.
    """

    draws: ClassVar[bool] = False

    group: int
    every: int = 128
    queries: int = 8
    neighbours: int = 7
    similar: float = 0.5
    weight: float = 0.1


@dataclass(frozen=True)
class ExpectedLogits:
    """Rounds of TriAttention (arXiv:2604.04921): keep the keys with the largest expected logits of future queries.

    See :func:`kvpop_vllm.rules.rounds.expected_logits`. No query is kept.

    Attributes:
        mean: ``[H, G, D]`` float32, mean query of each query head at position 0, averaged over the distances of future
            queries.
        excess: ``[H, G, F]`` float32, by how much the mean norm of the queries exceeds the norm of their mean, in each
            band.
        frequencies: ``[D - F]`` float64, angle per position (radians) of each pair of channels that rotates.
        every: the method's m, as in :class:`SampledMass`.
    """

    draws: ClassVar[bool] = False
    queries: ClassVar[int] = 0

    mean: torch.Tensor
    excess: torch.Tensor
    frequencies: torch.Tensor
    every: int = 128

    def state_floats(self, head_size: int) -> int:
        """Return the number of float32 values in one head's state, 0."""
        return 0


@dataclass(frozen=True)
class RetentionRule(Retention):
    """Rule that decides which tokens a layer retains (DESIGN "The rule"; KVpop eq. 5).

    Retained are sinks, window, and the k best tokens by effective score, k = ``B - s - w``. The effective
    score is ``effective_t(q) = r_t + floor((q - t) / decay_step) * log_gamma[h]``, formed and compared in
    float64. Of equal scores the older token is evicted. For the roles of slots see :class:`Retention`. A rule
    has no budget, which each request and head has of its own.

    After a protected prefix of p tokens the rule is that of the tail (:meth:`after_prefix`).

    Attributes:
        sinks: s.
        window: w.
        log_gamma: ``[H]`` float64, logarithm of each head's decay.
        decay_step: n, tokens per decay step.
        scorer: scorer of the tokens. None stands for :class:`NoScore`.
        moment_correction: if True, add a moment-based estimate of the evicted tokens' contribution to the
            output (MomentKV, eqs. 9, 11, 12): ``(Z_R o_R + Z_E o_E) / (Z_R + Z_E)`` with
            ``o_E = vb + scale Sig q`` and ``log Z_E = log n + scale q . kb``. The moments include the token
            evicted in the same step.
        first: p, the first token of the tail.
        replay: R, number of prefix tokens from which a scorer's state is built
            (:func:`kvpop_vllm.kernels.ops.begin_tail`).
        compression: if set, a prompt is retained until its end and then compressed once in this way.
        rounds: if set, scores are recomputed at regular intervals (:mod:`kvpop_vllm.rules.rounds`).

    Raises:
        ValueError: a threshold with a window of less than 2, or a scorer without a kernel that is not stateless.
    """

    budget: int = field(default=0, init=False, repr=False)
    sinks: int
    window: int
    first: int = field(default=0, kw_only=True)
    step: int = field(default=1, init=False, repr=False)
    log_gamma: torch.Tensor
    decay_step: int = 1
    scorer: TokenScorer = NoScore()
    moment_correction: bool = False
    replay: int = REPLAY
    compression: PromptVotes | PromptMatching | None = None
    rounds: SampledMass | Redundancy | ExpectedLogits | None = None

    def __post_init__(self):
        if self.scorer is None:
            object.__setattr__(self, "scorer", NoScore())
        scorer = self.scorer
        if scorer.kernel is None and (scorer.coupled or scorer.draws or scorer.recurrent or scorer.keeps_moments):
            raise ValueError(
                f"{type(scorer).__name__} has no kernel and reads more than a token's key and value: name a kernel"
            )
        if self.threshold is not None and self.window < 2:
            raise ValueError("a threshold needs a window of at least 2: set --kv-window to 2 or more")

    @property
    def topk(self) -> int:
        """Raise AttributeError: a rule has no budget."""
        raise AttributeError("a rule has no budget: ask the Retention of a request for its long-range slots")

    def after_prefix(self, prefix: int) -> RetentionRule:
        """Return the rule of the tail after ``prefix`` protected tokens."""
        return replace(self, sinks=0, first=prefix) if prefix else self

    def to(self, device: torch.device | str) -> RetentionRule:
        """Return this rule with its tensors, including those of the scorer and the rounds, on ``device``."""
        rounds = None if self.rounds is None else _moved(self.rounds, device)
        return replace(_moved(self, device), scorer=_moved(self.scorer, device), rounds=rounds)

    def of_heads(self, heads: torch.Tensor) -> RetentionRule:
        """Return the rule of the heads with these indices ``[n]``, in increasing order."""
        if len(heads) == len(self.log_gamma):
            return self
        return replace(self, log_gamma=self.log_gamma[heads], scorer=self.scorer.of_heads(heads))

    @functools.cached_property
    def as_gate_scores(self) -> RetentionRule:
        """Rule of a layer whose tokens' scores are passed to the ops."""
        return replace(self, scorer=GateScore(self.ages, self.threshold))

    @property
    def coupled(self) -> bool:
        """True if scores depend on the attention of earlier queries."""
        return self.scorer.coupled

    @property
    def ages(self) -> bool:
        """True if each token decays at its own rate, given by its score."""
        return self.scorer.ages

    @property
    def threshold(self) -> float | None:
        """Score below which a token is evicted even if slots are free, or None."""
        return self.scorer.threshold

    @property
    def draws(self) -> bool:
        """True if each eviction draws new scores."""
        return self.scorer.draws

    @property
    def seeded(self) -> bool:
        """True if the retained tokens depend on the request's seed."""
        return self.draws or (self.rounds is not None and self.rounds.draws)

    @property
    def sequential(self) -> bool:
        """True if each step depends on the previous one, so that chunks are processed token by token."""
        return self.coupled or self.moment_correction or self.threshold is not None

    @property
    def keeps_moments(self) -> bool:
        """True if the state holds moments of evicted tokens after the scorer's state.

        See :func:`kvpop_vllm.cache.pages.moment_floats`.
        """
        return self.moment_correction or self.scorer.keeps_moments

    @property
    def compresses(self) -> bool:
        """True if a prompt is retained until its end and then compressed into the tail."""
        return self.compression is not None

    @property
    def same_in_all_layers(self) -> bool:
        """True if layers whose heads have equal budgets retain the same tokens: the newest ones, by no score at all."""
        return self.scorer.kernel == "none" and self.compression is None and self.rounds is None

    @property
    def replays(self) -> bool:
        """True if a scorer's state must be built when a tail begins after a protected prefix."""
        return self.scorer.recurrent

    def state_floats(self, head_size: int) -> int:
        """Return the number of float32 values in one head's state: of the scorer, then moments, then queries."""
        moments = moment_floats(head_size) if self.keeps_moments else 0
        queries = sum(part.state_floats(head_size) for part in (self.compression, self.rounds) if part is not None)
        return self.scorer.state_floats + moments + queries

    def first_query(self, head_size: int) -> int:
        """Return the offset in a head's state, in float32 values, of the queries that votes or rounds read."""
        part = self.compression or self.rounds
        return self.state_floats(head_size) - part.state_floats(head_size)

    def draft_query_bytes(self, group: int, head_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of the queries that are staged with a draft of one KV head.

        Only a rule that reads attention needs them.

        Args:
            group: G.
            head_size: D.
            dtype: dtype of the queries.
        """
        return group * head_size * dtype.itemsize if self.coupled else 0


def _moved(part, device: torch.device | str):
    """Return a dataclass with its tensors on ``device``."""
    tensors = {name: value.to(device) for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
    return replace(part, **tensors)
