"""What a policy declares. One policy is one file and one class, named after one paper, plus its row in the registry.

Life cycle in the engine: the class is looked up by name; what it declares is checked against what is realised today
(:meth:`Policy.check_realised`); one instance is made for the whole model; ``rule(layer)`` is asked once per layer after the weights have been
loaded; from then on the kernels work from that rule alone, without calling back into Python.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar

import torch

from kvpop_vllm.config import (
    CORRECTIONS,
    DEFAULT_SINKS,
    ConfigError,
    PolicySettings,
    Retention,
    ScorerShape,
    resolve_retention,
)
from kvpop_vllm.kernels.ops import GivenScore, RetentionRule, ScorerWeights
from kvpop_vllm.kernels.pages import cdiv
from kvpop_vllm.kernels.regions import HeadRegions, Shares
from kvpop_vllm.policies.allocators import ALLOCATORS
from kvpop_vllm.scorers.gates import Gate


class Signal(Enum):
    """What a policy scores from. KEY, VALUE and QUERY reach an attention backend; MASS comes out of the attention kernel;
    HIDDEN and PRE_ROPE are seen by a policy's gate, :meth:`Policy.gate`, in the attention modules of models that have one."""

    KEY = "k"
    VALUE = "v"
    QUERY = "q"
    MASS = "attention mass"
    HIDDEN = "hidden states"
    PRE_ROPE = "pre-RoPE q and k"


GATED = frozenset({Signal.HIDDEN, Signal.PRE_ROPE})
"""Signals that only a gate sees."""


class Order(Enum):
    """How priorities move with time. STATIC: the order of two tokens never changes. AGED: it changes with q alone.
    COUPLED: it depends on what was evicted before, so that prefill must run token by token."""

    STATIC = "static"
    AGED = "aged"
    COUPLED = "attention-coupled"


class Decide(Enum):
    """When evictions are decided: at every step (every e with ``--kv-decide-every``), on a grid of the policy's own, or
    on the first generated token and every e tokens before and after it."""

    STEP = "every step"
    GRID = "grid"
    PROMPT_END = "prompt end"


@dataclass(frozen=True)
class Preload:
    """Tokens that are in the slots before the first one (cartridges, STILL).

    k, v ``[layers, H, P, D]``; logit_bias ``[layers, H, P]`` added to their logits; position_offset: position of the
    request's first own token.
    """

    k: torch.Tensor
    v: torch.Tensor
    logit_bias: torch.Tensor | None = None
    position_offset: int = 0


@dataclass(frozen=True)
class ModelShape:
    """The model as a policy sees it: layers, KV heads H of the whole model, head size D, longest sequence in tokens, width
    E of its hidden states if that is known."""

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    hidden_size: int | None = None


def moment_fields(head_dim: int) -> dict[str, int]:
    """State fields of the moments of evicted tokens, float32 words per layer and KV head."""
    return {"mean key": head_dim, "mean value": head_dim, "covariance": head_dim * head_dim}


@dataclass
class Policy(ABC):
    """Base class of all policies.

    Attributes:
        settings: what the user asked for. model: the model's shape. retention: resolved budget, sinks and window.

    Class attributes:
        name: what ``--kv-policy`` takes. paper: where it is defined. cost: what a step costs beyond attention.
        state: recurrent state per layer and KV head, in words; ``state_fields`` are its sizes.
        signals: see :class:`Signal`. order: see :class:`Order`. decide: see :class:`Decide`.
        slot_fields: float32 words per slot beyond score and position, by name.
        default_sinks, window_share: without a scorer, the default s, and the share of ``B - s`` that is the default w
            (:meth:`default_window` may say another). default_decide_every: e where ``--kv-decide-every`` is not given.
        default_correction: where ``--kv-correction`` is not given.
        default_allocator: where ``--kv-allocator`` is not given.
        scores_compare: heads can be compared by their scores, so that they may divide a budget by them.
        keeps_all: never evicts.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    cost: ClassVar[str]
    state: ClassVar[str] = "-"
    signals: ClassVar[frozenset[Signal]] = frozenset()
    order: ClassVar[Order] = Order.STATIC
    decide: ClassVar[Decide] = Decide.STEP
    slot_fields: ClassVar[dict[str, int]] = {}
    default_sinks: ClassVar[int] = DEFAULT_SINKS
    window_share: ClassVar[float] = 1.0
    default_decide_every: ClassVar[int] = 1
    default_correction: ClassVar[str] = "none"
    default_allocator: ClassVar[str] = "uniform"
    scores_compare: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = False
    scorer_kind: ClassVar[str | None] = None

    preload: ClassVar[Callable[[], Preload] | None] = None
    """Returns what is in the slots before the first token."""

    settings: PolicySettings
    model: ModelShape
    retention: Retention = field(init=False)

    def __post_init__(self):
        self.prepare()
        self.check_realised()
        if self.keeps_all and self.corrects:
            raise ConfigError(f"--kv-policy {self.name} keeps every token: leave --kv-correction out")
        if self.keeps_all and self.allocator != "uniform":
            raise ConfigError(f"--kv-policy {self.name} keeps every token: leave --kv-allocator out")
        if self.divides and not self.scores_compare:
            raise ConfigError(
                f"--kv-policy {self.name} has no scores that heads can divide a budget by: leave --kv-allocator out"
            )
        self.retention = resolve_retention(
            self.settings,
            self.model.max_model_len,
            self.scorer_shape(),
            keeps_all=self.keeps_all,
            sinks=self.default_sinks,
            window_share=self.window_share,
            decide_every=self.default_decide_every,
            default_window=self.default_window,
        )
        self.retention = replace(self.retention, prompt_grid=self.decide is Decide.PROMPT_END)

    def check_realised(self) -> None:
        """Refuses declarations that no kernel acts on yet, rather than ignore them.

        Raises:
            ConfigError: naming the first one.
        """
        brings_gate = type(self).gate is not Policy.gate
        beyond = {
            "signals": Signal.QUERY in self.signals or self.gated != brings_gate,
            "decide": self.decide is Decide.GRID,
            "slot_fields": bool(self.slot_fields),
            "preload": self.preload is not None,
        }
        for what, value, known in (
            ("correction", self.default_correction, CORRECTIONS),
            ("allocator", self.default_allocator, ALLOCATORS),
        ):
            if value not in known:
                raise ConfigError(
                    f"--kv-policy {self.name} declares the {what} {value!r}: mend it to one of {', '.join(known)}"
                )
        for name, there in beyond.items():
            if there:
                raise ConfigError(
                    f"--kv-policy {self.name} declares {name}, which this version cannot serve: choose another policy"
                )

    def prepare(self) -> None:
        """Reads and checks what the policy needs from disk. The default refuses a scorer that nothing would use.

        Raises:
            ConfigError: it cannot be used with this model.
        """
        if self.settings.scorer is not None:
            raise ConfigError(
                f"--kv-policy {self.name} uses no scorer: leave --kv-scorer out, or choose a kvpop policy"
            )

    def default_window(self, decide_every: int) -> int | None:
        """w for e tokens between decisions, where ``window_share`` does not say it."""
        return None

    def scorer_shape(self) -> ScorerShape | None:
        """What a scorer's config says about retention, if there is one."""
        return None

    @property
    def state_fields(self) -> dict[str, int]:
        """float32 words of recurrent state per layer and KV head, by name."""
        return {}

    @property
    def corrects(self) -> bool:
        """Whether outputs gain what the moments of evicted tokens say (``--kv-correction moment``)."""
        return (self.settings.correction or self.default_correction) == "moment"

    @property
    def state_floats(self) -> int:
        """float32 words of recurrent state per layer and KV head, those of a correction among them."""
        moments = moment_fields(self.model.head_dim) if self.corrects else {}
        share = 2 + self.share_pages if self.divides else 0
        return sum((self.state_fields | moments).values()) + share

    @property
    def divides(self) -> bool:
        """Whether the heads of a layer divide its budget by their scores (``--kv-allocator ada``)."""
        return self.allocator == "ada"

    @property
    def share_pages(self) -> int:
        """Pages that one head may hold at most then, with the smallest blocks there are; 0 where they do not."""
        return (cdiv(self.retention.budget, 16) + 1) * self.model.num_kv_heads if self.divides else 0

    @property
    def spare_blocks(self) -> int:
        """Blocks beyond those of equal shares, where heads divide the budget: each head's last page is not full."""
        return HeadRegions.spare if self.divides else 0

    @property
    def needs_prompt(self) -> bool:
        """Whether its decisions depend on how long a request's prompt is."""
        return self.retention.prompt_grid or self.divides

    @property
    def allocator(self) -> str:
        """How layers and heads share the budget (``--kv-allocator``)."""
        return self.settings.allocator or self.default_allocator

    def shares(self) -> torch.Tensor:
        """Budget ``[layers, H]`` int32 of every head, B on average, as the allocator says it."""
        return ALLOCATORS[self.allocator](self.retention, self.model.num_layers, self.model.num_kv_heads)

    def checked_shares(self, heads: slice) -> Shares | None:
        """Those of these KV heads, or None if all are the same.

        Raises:
            ConfigError: they are misshapen, too small, or more than B on average.
        """
        budgets, shape = self.shares(), (self.model.num_layers, self.model.num_kv_heads)
        if tuple(budgets.shape) != shape or budgets.dtype != torch.int32:
            raise ConfigError(f"--kv-policy {self.name} gives shares that are not {shape} int32: mend that policy")
        if (least := int(budgets.min())) < self.retention.first_long:
            raise ConfigError(
                f"--kv-allocator {self.allocator} leaves a head {least} tokens, less than sinks and window: raise --kv-budget"
            )
        if int(budgets.sum()) > self.retention.budget * budgets.numel():
            raise ConfigError(f"--kv-policy {self.name} gives shares of more than the budget: mend that policy")
        own = budgets[:, heads]
        if own.shape[1] < budgets.shape[1] and (budgets != budgets[:, :1]).any():
            raise ConfigError(
                f"--kv-policy {self.name} gives heads of a layer shares of their own: set --tensor-parallel-size 1"
            )
        return Shares.of(own, self.retention.budget)

    def gate(self, layer: int, heads: slice) -> Gate | None:
        """The module that scores the tokens of ``layer`` for these KV heads when they come in, or None where the kernels score
        them. What it returns is the ``given`` of :class:`kvpop_vllm.kernels.ops.GivenScore`."""
        return None

    def check_ranks(self, ranks: int) -> None:
        """Whether its gate works on the KV heads of one of so many tensor-parallel ranks.

        Raises:
            ConfigError: it does not.
        """
        return

    @property
    def gated(self) -> bool:
        """Whether it has a gate."""
        return bool(self.signals & GATED)

    @property
    def shifted(self) -> bool:
        """Whether the gate's score of token t + 1 is token t's."""
        return False

    @property
    def graph(self) -> str:
        """What a model's compiled graph depends on beyond the policy's name: the gate's make and sizes."""
        return ""

    @abstractmethod
    def rule(self, layer: int, heads: slice) -> RetentionRule:
        """What the kernels need for ``layer`` and these KV heads (a tensor-parallel rank's), but for the correction."""

    def layer_rule(self, layer: int, heads: slice) -> RetentionRule:
        """:meth:`rule`, with the correction asked for.

        Raises:
            ConfigError: the rule is not of the order that the policy declares, or needs more state.
        """
        own = self.rule(layer, heads)
        try:
            rule = replace(own, moment_correction=self.corrects, share_pages=self.share_pages)
        except ValueError as error:
            raise ConfigError(f"--kv-policy {self.name} with --kv-allocator {self.allocator}: {error}") from None
        if rule.coupled != (self.order is Order.COUPLED):
            raise ConfigError(
                f"--kv-policy {self.name} declares the order {self.order.value!r}, but its rule scores by {type(rule.scorer).__name__}: mend that policy"
            )
        if isinstance(rule.scorer, GivenScore) != self.gated:
            raise ConfigError(
                f"--kv-policy {self.name} {'has a' if self.gated else 'has no'} gate, but its rule scores by {type(rule.scorer).__name__}: mend that policy"
            )
        if rule.prompt_grid != self.retention.prompt_grid:
            raise ConfigError(
                f"--kv-policy {self.name} declares to decide at {self.decide.value}, but its rule scores by {type(rule.scorer).__name__}: mend that policy"
            )
        if (needed := rule.state_floats(self.model.head_dim)) > self.state_floats:
            raise ConfigError(
                f"--kv-policy {self.name} declares {self.state_floats} words of state, but its rule needs {needed}: mend that policy"
            )
        return rule

    def training_free_rule(self, heads: slice, scorer: ScorerWeights, log_gamma: float = 0.0) -> RetentionRule:
        """The same for all layers and heads: ``scorer`` has no tensors; log_gamma in nats per token."""
        count, kept = len(range(*heads.indices(self.model.num_kv_heads))), self.retention
        decay = torch.full((count,), log_gamma, dtype=torch.float64)
        return RetentionRule(kept.sinks, kept.window, decay, scorer=scorer, decide_every=kept.decide_every)
