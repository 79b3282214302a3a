"""What a policy declares. One policy is one file and one class, named after one paper, plus its row in the registry.

Life cycle in the engine: the class is looked up by name; what it declares is checked against what is realised today
(:meth:`Policy.check_realised`); one instance is made for the whole model; ``rule(layer)`` is asked once per layer after the weights have been
loaded; from then on the kernels work from that rule alone, without calling back into Python.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import Enum
from os import PathLike
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
from kvpop_vllm.kernels.regions import Shares
from kvpop_vllm.policies.allocators import ALLOCATORS
from kvpop_vllm.scorers.gates import Gate


class Signal(Enum):
    """What a policy scores from. KEY and VALUE reach an attention backend; MASS comes out of the attention kernel;
    HIDDEN and PRE_ROPE are seen by a policy's gate, :meth:`Policy.gate`, in the attention modules of models that have one."""

    KEY = "k"
    VALUE = "v"
    MASS = "attention mass"
    HIDDEN = "hidden states"
    PRE_ROPE = "pre-RoPE q and k"


MOST_RETENTIONS = 1024
"""Budgets of requests that are remembered with what they resolve to."""

GATED = frozenset({Signal.HIDDEN, Signal.PRE_ROPE})
"""Signals that only a gate sees."""


class Order(Enum):
    """How priorities move with time. STATIC: the order of two tokens never changes. AGED: it changes with q alone.
    COUPLED: it depends on what was evicted before, so that prefill must run token by token. ROUNDS: so, but only every m tokens."""

    STATIC = "static"
    AGED = "aged"
    COUPLED = "attention-coupled"
    ROUNDS = "attention-coupled, in rounds"


@dataclass(frozen=True)
class ModelShape:
    """The model as a policy sees it: layers, KV heads H of the whole model, head size D, longest sequence in tokens, width
    E of its hidden states and query heads of the whole model if these are known."""

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    hidden_size: int | None = None
    num_heads: int | None = None

    @classmethod
    def of(cls, model: str | PathLike, max_model_len: int) -> ModelShape:
        """Return the shape that a model folder's ``config.json`` says, for sequences of so many tokens.

        Raises:
            ConfigError: it cannot be read, or is no language model's.
        """
        from kvpop_vllm.scorers.init import full_shape

        return cls(**full_shape(model), max_model_len=max_model_len)


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
        signals: see :class:`Signal`. order: see :class:`Order`.
        default_sinks, window_share: without a scorer, the default s, and the share of ``B - s`` that is the default w.
        default_correction: where ``--kv-correction`` is not given.
        default_allocator: where ``--kv-allocator`` is not given. default_protect: where ``--kv-protect-prompt`` is not.
        keeps_all: never evicts. draws: its rule's scores are drawn by the request's seed. default_window: without a scorer, the default
        w where it does not depend on the budget. compresses: the prompt is held until its end and compressed then.
    """

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
    draws: ClassVar[bool] = False
    default_window: ClassVar[int | None] = None
    compresses: ClassVar[bool] = False
    scorer_kind: ClassVar[str | None] = None

    settings: PolicySettings
    model: ModelShape
    retention: Retention = field(init=False)
    _retentions: dict[int, Retention] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self):
        self.prepare()
        self.check_realised()
        if self.keeps_all and self.corrects:
            raise ConfigError(f"--kv-policy {self.name} keeps every token: leave --kv-correction out")
        if self.keeps_all and self.allocator != "uniform":
            raise ConfigError(f"--kv-policy {self.name} keeps every token: leave --kv-allocator out")
        if self.divides and not self.compresses:
            raise ConfigError(
                f"--kv-allocator ada compares tokens of different heads, and scores of --kv-policy {self.name} mean something within a"
                " head only: choose --kv-policy adakv, or another allocator"
            )
        self.retention = self._resolve(self.settings)
        self._check_limits()

    def _resolve(self, settings: PolicySettings) -> Retention:
        kept = resolve_retention(
            settings,
            self.model.max_model_len,
            self.scorer_shape(),
            keeps_all=self.keeps_all,
            sinks=self.default_sinks,
            window_share=self.window_share,
            window=self.default_window,
        )
        self.check_retention(kept)
        return kept

    def check_retention(self, kept: Retention) -> None:
        """Refuse parts of a budget that the policy cannot work with, the server's or a request's.

        Raises:
            ConfigError: naming the option to change.
        """
        return

    @functools.cached_property
    def one_budget(self) -> bool:
        """Whether all requests have the server's budget: it keeps everything, or heads have unequal shares."""
        return self.keeps_all or self.divides or bool((self.shares() != self.retention.budget).any())

    def retention_of(self, budget: int) -> Retention:
        """Return what a server with this budget would have, for one request.

        Raises:
            ConfigError: the budget is too small, or all requests have the server's.
        """
        if self.one_budget:
            raise ConfigError(f"--kv-policy {self.name} gives all requests one budget here: leave --kv-budget out")
        found = self._retentions.get(budget)
        if found is None:
            found = self._resolve(replace(self.settings, budget=budget, compression=None))
            if len(self._retentions) >= MOST_RETENTIONS:
                self._retentions.clear()
            self._retentions[budget] = found
        return found

    def _check_limits(self) -> None:
        """Raise ConfigError where requests may ask for less than the server has, or for what the policy cannot follow."""
        budget, protect = self.settings.max_budget, self.settings.max_protect
        if budget is not None and self.one_budget:
            raise ConfigError(f"--kv-policy {self.name} gives all requests one budget here: leave --kv-max-budget out")
        if budget is not None and budget < self.retention.budget:
            raise ConfigError(
                f"--kv-max-budget {budget} is below the server's own budget: raise it to at least {self.retention.budget}"
            )
        own = self.protect
        if protect is not None and protect is not True and (own is True or protect < own):
            raise ConfigError(
                f"--kv-max-protect {int(protect)} is below what --kv-protect-prompt says:"
                f" raise it to {'all' if own is True else f'at least {own}'}"
            )

    def check_realised(self) -> None:
        """Refuse declarations that nothing acts on, rather than ignore them.

        Raises:
            ConfigError: naming the first one.
        """
        for what, value, known in (
            ("correction", self.default_correction, CORRECTIONS),
            ("allocator", self.default_allocator, ALLOCATORS),
        ):
            if value not in known:
                raise ConfigError(
                    f"--kv-policy {self.name} declares the {what} {value!r}: mend it to one of {', '.join(known)}"
                )
        if self.gated != (type(self).gate is not Policy.gate):
            raise ConfigError(
                f"--kv-policy {self.name} declares signals of a gate and has none, or has one and declares none: fix the policy class"
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
        return sum((self.state_fields | moments).values())

    @property
    def allocator(self) -> str:
        """How layers and heads share the budget (``--kv-allocator``)."""
        return self.settings.allocator or self.default_allocator

    @property
    def divides(self) -> bool:
        """Whether the heads of a layer divide each request's budget among them at its prompt's end."""
        return self.allocator == "ada"

    @property
    def protect(self) -> bool | int:
        """Tokens of each prompt that are never evicted (``--kv-protect-prompt``): True for all, 0 for none."""
        asked = self.settings.protect_prompt
        return self.default_protect if asked is None else asked

    @property
    def max_budget(self) -> int:
        """Largest budget that a request may have (``--kv-max-budget``)."""
        return max(self.settings.max_budget or 0, self.retention.budget)

    @property
    def max_protect(self) -> bool | int:
        """Most tokens of a prompt that a request may protect (``--kv-max-protect``): True for all, 0 for none."""
        asked = self.settings.max_protect
        return self.protect if asked is None else asked

    @property
    def query_group(self) -> int:
        """G, query heads of a KV head.

        Raises:
            ConfigError: the model's shape does not say.
        """
        if self.model.num_heads is None:
            raise ConfigError(f"--kv-policy {self.name} must know how many heads the model has: give its config")
        return self.model.num_heads // self.model.num_kv_heads

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
        if self.order is Order.ROUNDS and (budgets != budgets[:, :1]).any():
            raise ConfigError(
                f"--kv-policy {self.name} ranks all heads of a layer in one round, its shares differ by head: fix the policy class"
            )
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
        """Whether it works on the KV heads of one of so many tensor-parallel ranks.

        Raises:
            ConfigError: it does not.
        """
        if self.divides and ranks > 1:
            raise ConfigError(
                f"--kv-policy {self.name} has all heads of a layer divide a budget: set --tensor-parallel-size 1"
            )

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
        rule = replace(self.rule(layer, heads), moment_correction=self.corrects)
        if rule.coupled != (self.order is Order.COUPLED) or (rule.rounds is None) == (self.order is Order.ROUNDS):
            raise ConfigError(
                f"--kv-policy {self.name} declares the order {self.order.value!r}, but its rule scores by {type(rule.scorer).__name__}: mend that policy"
            )
        if isinstance(rule.scorer, GivenScore) != self.gated:
            raise ConfigError(
                f"--kv-policy {self.name} {'has a' if self.gated else 'has no'} gate, but its rule scores by {type(rule.scorer).__name__}: mend that policy"
            )
        if rule.compresses != self.compresses:
            raise ConfigError(
                f"--kv-policy {self.name} {'compresses' if self.compresses else 'does not compress'} prompts, its rule does otherwise:"
                " fix the policy class"
            )
        if rule.seeded != self.draws:
            raise ConfigError(
                f"--kv-policy {self.name} {'draws' if rule.seeded else 'does not draw'} its scores: fix the policy class"
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
        return RetentionRule(kept.sinks, kept.window, decay, scorer=scorer)
