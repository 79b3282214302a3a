"""Declarations of a policy: class attributes, and the methods that a paper's class overrides.

How settings resolve into a budget, windows and shares is in :mod:`kvpop_vllm.policies.base`.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import math
from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar

import torch

from kvpop_vllm.config import CORRECTIONS, DEFAULT_SINKS, ConfigError, PolicySettings, Retention, ScorerShape
from kvpop_vllm.kernels.ops import PromptMatching, PromptVotes, RetentionRule, TokenScorer
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.policies.allocators import ALLOCATORS
from kvpop_vllm.scorers import Gate


class Signal(Enum):
    """Input that a policy scores tokens from.

    KEY and VALUE are passed to an attention backend. MASS is an output of the attention kernel. HIDDEN and
    PRE_ROPE are seen only by a policy's gate (:meth:`Declaration.gate`), which runs before attention.
    """

    KEY = "k"
    VALUE = "v"
    MASS = "attention mass"
    HIDDEN = "hidden states"
    PRE_ROPE = "pre-RoPE q and k"


GATED = frozenset({Signal.HIDDEN, Signal.PRE_ROPE})
"""Signals that only a gate can read."""


class Order(Enum):
    """Way in which the ranking of tokens changes over time.

    STATIC: the order of two tokens never changes. AGED: the order depends on the query position q alone.
    COUPLED: the order depends on earlier evictions, so prefill must run token by token. ROUNDS: the order changes
    every m tokens.
    """

    STATIC = "static"
    AGED = "aged"
    COUPLED = "attention-coupled"
    ROUNDS = "in rounds"


class Declaration(ABC):
    """Declarations of a policy. Its class is a :class:`kvpop_vllm.policies.base.Policy`, which sets the attributes.

    Attributes:
        settings: the user's settings.
        model: shape of the model.
        retention: resolved budget, sinks and window.

    Class attributes:
        name: value of ``--kv-policy``.
        paper: reference that defines the policy.
        cost: cost of a step beyond attention.
        state: recurrent state per layer and KV head, in words, for `kvpop policies`.
        signals: see :class:`Signal`.
        order: see :class:`Order`.
        default_sinks: default s without a scorer.
        window_share: without a scorer, the fraction of ``B - s`` that is the default w.
        default_correction: correction without ``--kv-correction``.
        default_allocator: allocator without ``--kv-allocator``.
        default_protect: protection without ``--kv-protect-prompt``.
        keeps_all: True if the policy never evicts.
        default_threshold: threshold without ``--kv-threshold``, ``-inf`` for none, None if the policy takes no
            threshold.
        draws: True if the scores of its rule are drawn with the request's seed.
        default_window: without a scorer, the default w if it does not depend on the budget.
        compresses: True if the prompt is held in full until its end and compressed then.
        scorer_kind: kind of scorer that the policy needs, or None.
        calibrated: True if the policy needs statistics of the model (``--kv-calibration``).
    """

    # without defaults, so that policies.get() can refuse a class that leaves one out
    name: ClassVar[str]
    paper: ClassVar[str]
    cost: ClassVar[str]
    state: ClassVar[str] = "-"
    signals: ClassVar[frozenset[Signal]] = frozenset()
    order: ClassVar[Order] = Order.STATIC
    default_sinks: ClassVar[int] = DEFAULT_SINKS
    window_share: ClassVar[float] = 1.0
    default_correction: ClassVar[str] = "none"
    default_allocator: ClassVar[str] = "uniform"
    default_protect: ClassVar[bool | int] = 0
    keeps_all: ClassVar[bool] = False
    default_threshold: ClassVar[float | None] = None
    draws: ClassVar[bool] = False
    default_window: ClassVar[int | None] = None
    compresses: ClassVar[bool] = False
    scorer_kind: ClassVar[str | None] = None
    calibrated: ClassVar[bool] = False

    settings: PolicySettings
    model: ModelShape
    retention: Retention

    @abstractmethod
    def rule(self, layer: int, heads: slice) -> RetentionRule:
        """Return the rule of ``layer`` for ``heads`` (those of one rank), without the correction."""

    def gate(self, layer: int, heads: slice) -> Gate | None:
        """Return the gate of ``layer`` for ``heads``, or None if the kernels score tokens.

        The gate's output is the gate score of :class:`kvpop_vllm.kernels.ops.GateScore`.
        """
        return None

    @property
    def gated(self) -> bool:
        """True if the policy has a gate."""
        return bool(self.signals & GATED)

    @property
    def borrows(self) -> bool:
        """True if the gate reads a channel of the queries, in which they then have 0."""
        return False

    @property
    def shifted(self) -> bool:
        """True if the gate's output for token t + 1 is the score of token t."""
        return False

    @property
    def takes_snapshots(self) -> bool:
        """True if what a request holds follows from its tokens and numbers alone, so that others can go on from it.

        A prompt that was compressed depends on where it ended. Under a shifted gate equal tokens tie, and rounding
        decides.
        """
        return not self.compresses and not self.shifted

    @property
    def in_rounds(self) -> bool:
        """True if tokens are ranked every m tokens, between two steps."""
        return self.order is Order.ROUNDS

    @property
    def no_drafts(self) -> str | None:
        """Reason why drafts of speculative decoding cannot be verified, None if they can.

        The compression of a prompt lies between two steps. So do rounds, at which drafts are cut.
        """
        if self.compresses:
            return "it compresses prompts"
        return "the scores of its shifted gate come a token late" if self.shifted else None

    @property
    def threshold(self) -> float | None:
        """Score below which a token is evicted when it leaves the window, even if slots are free, or None."""
        threshold = self.settings.threshold
        threshold = self.default_threshold if threshold is None else threshold
        return None if threshold == -math.inf else threshold

    @property
    def drops_early(self) -> bool:
        """True if tokens may be evicted while slots are free, so that their number depends on the text."""
        return self.threshold is not None

    @property
    def graph(self) -> str:
        """Key of a model's compiled graph in addition to the policy's name: kind and sizes of the gate."""
        return ""

    @property
    def compression(self) -> PromptVotes | PromptMatching | None:
        """Way in which prompts are compressed at their end, None if they are not."""
        return None

    def prepare(self) -> None:
        """Read and check the files that the policy needs from disk.

        The default refuses a scorer, because nothing would use it.
        """
        for name in ("scorer", "map"):
            if getattr(self.settings, name) is not None:
                raise ConfigError(
                    f"--kv-policy {self.name} uses no scorer: leave --kv-{name} out, or choose a kvpop policy"
                )

    def scorer_shape(self) -> ScorerShape | None:
        """Return the retention settings of the scorer's config, or None without a scorer."""
        return None

    def check_retention(self, retention: Retention) -> None:
        """Check that the policy can work with the budget, sinks and window of a server or a request."""
        return

    def check_realised(self) -> None:
        """Check that everything the policy class declares is implemented, so that no declaration is ignored."""
        for setting, value, choices in (
            ("correction", self.default_correction, CORRECTIONS),
            ("allocator", self.default_allocator, ALLOCATORS),
        ):
            if value not in choices:
                raise ConfigError(
                    f"--kv-policy {self.name} declares the {setting} {value!r}: mend it to one of {', '.join(choices)}"
                )
        if self.gated != (type(self).gate is not Declaration.gate):
            raise ConfigError(
                f"--kv-policy {self.name} declares signals of a gate and has none, or has one and declares none: fix the policy class"
            )

    def _check_rule(self, rule: RetentionRule) -> None:
        """Check that a rule does what the policy declares."""
        order = rule.coupled == (self.order is Order.COUPLED) and (rule.rounds is None) == (
            self.order is not Order.ROUNDS
        )
        does = f"but its rule scores by {type(rule.scorer).__name__}"
        for declared, fits in (
            (f"declares the order {self.order.value!r}, {does}", order),
            (f"has {'a' if self.gated else 'no'} gate, {does}", rule.scorer.takes_gate_scores == self.gated),
            (
                f"declares compresses = {self.compresses}, but its rule does otherwise",
                rule.compresses == self.compresses,
            ),
            (
                f"declares the threshold {self.threshold}, but its rule has {rule.threshold}",
                rule.threshold == self.threshold,
            ),
            (f"declares draws = {self.draws}, but its rule does otherwise", rule.seeded == self.draws),
        ):
            if not fits:
                raise ConfigError(f"--kv-policy {self.name} {declared}: fix the policy class")

    def training_free_rule(
        self, heads: slice, scorer: TokenScorer | None, log_gamma: float = 0.0, **options
    ) -> RetentionRule:
        """Return a rule without learned tensors, the same for all layers and heads.

        Args:
            heads: KV heads that the rule is for.
            scorer: scorer without tensors per layer, None scores every token 0.
            log_gamma: logarithm of the decay, in nats per token.
            options: further fields of the rule, ``rounds`` or ``compression``.
        """
        # a slice has no length
        count, retention = len(range(*heads.indices(self.model.num_kv_heads))), self.retention
        decay = torch.full((count,), log_gamma, dtype=torch.float64)
        return RetentionRule(retention.sinks, retention.window, decay, scorer=scorer, **options)
