"""Base class of policies.

A policy is one file with one class, named after its paper, and one line in the registry.

Life cycle in the engine: the class is looked up by name. One instance is made for the whole model, and its
declarations are checked (:meth:`Policy.check_realised`). After the weights are loaded, ``layer_rule(layer,
heads)`` is called once per layer. From then on the kernels use that rule alone and do not call back into
Python.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import Enum
from os import PathLike
from typing import ClassVar

import torch

from kvpop_vllm.calibration.shares import Calibration, read_calibration
from kvpop_vllm.config import (
    CORRECTIONS,
    DEFAULT_SINKS,
    ConfigError,
    PolicySettings,
    Retention,
    ScorerShape,
    resolve_retention,
)
from kvpop_vllm.kernels.ops import PromptMatching, PromptVotes, RetentionRule, TokenScorer
from kvpop_vllm.kernels.regions import Shares
from kvpop_vllm.policies.allocators import ALLOCATORS, CALIBRATED, Allocator, allocator_of, proportional
from kvpop_vllm.scorers import Gate


class Signal(Enum):
    """Input that a policy scores tokens from.

    KEY and VALUE are passed to an attention backend. MASS is an output of the attention kernel. HIDDEN and
    PRE_ROPE are seen only by a policy's gate (:meth:`Policy.gate`), which runs in the attention modules of
    models with a gate.
    """

    KEY = "k"
    VALUE = "v"
    MASS = "attention mass"
    HIDDEN = "hidden states"
    PRE_ROPE = "pre-RoPE q and k"


MOST_RETENTIONS = 1024
"""Largest number of request budgets whose resolved :class:`Retention` is cached."""

GATED = frozenset({Signal.HIDDEN, Signal.PRE_ROPE})
"""Signals that only a gate can read."""


class Order(Enum):
    """Way in which the ranking of tokens changes over time.

    STATIC: the order of two tokens never changes. AGED: the order depends on the query position q alone.
    COUPLED: the order depends on earlier evictions, so prefill must run token by token. ROUNDS: as COUPLED,
    but scores change only every m tokens.
    """

    STATIC = "static"
    AGED = "aged"
    COUPLED = "attention-coupled"
    ROUNDS = "attention-coupled, in rounds"


@dataclass(frozen=True)
class ModelShape:
    """Shape of the model that a policy runs on.

    Attributes:
        model_type: model type of the base model, as in ``config.json``.
        num_layers: number of decoder layers.
        num_kv_heads: H, KV heads of the whole model.
        head_dim: D, head size.
        max_model_len: longest sequence, in tokens.
        hidden_size: E, width of the hidden states, or None if unknown.
        num_heads: query heads of the whole model, or None if unknown.
        rotation: rotary embeddings (:func:`kvpop_vllm.scorers.model_config.rotation_of`), or None if unknown.
    """

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    hidden_size: int | None = None
    num_heads: int | None = None
    rotation: str | None = None

    @classmethod
    def of(cls, model: str | PathLike, max_model_len: int) -> ModelShape:
        """Return the shape given by the ``config.json`` of a model folder.

        Args:
            model: Hugging Face folder.
            max_model_len: longest sequence, in tokens.

        Raises:
            ConfigError: the file cannot be read, or does not describe a language model.
        """
        from kvpop_vllm.scorers.init import full_shape
        from kvpop_vllm.scorers.model_config import read_config, rotation_of

        return cls(**full_shape(model), max_model_len=max_model_len, rotation=rotation_of(read_config(model)))


@dataclass
class Policy(ABC):
    """Base class of all policies.

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
        drops_early: True if tokens may be evicted while slots are free, so that their number depends on the text.
        draws: True if the scores of its rule are drawn with the request's seed.
        default_window: without a scorer, the default w if it does not depend on the budget.
        compresses: True if the prompt is held in full until its end and compressed then.
        scorer_kind: kind of scorer that the policy needs, or None.
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
    drops_early: ClassVar[bool] = False
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
        without_effect = {
            "correction": self.uses_moment_correction,
            "allocator": self.allocator != "uniform",
            "sinks": self.settings.sinks,
        }
        if self.keeps_all and (flag := next((flag for flag, given in without_effect.items() if given), None)):
            raise ConfigError(f"--kv-policy {self.name} keeps every token: leave --kv-{flag} out")
        if self.adaptive_head_budgets and not self.compresses:
            raise ConfigError(
                f"--kv-allocator ada compares tokens of different heads, and scores of --kv-policy {self.name} mean something within a"
                " head only: choose --kv-policy adakv, or another allocator"
            )
        self.retention = self._resolve(self.settings)
        with torch.device("cpu"):  # a model may be in the making on the meta device
            self.checked_shares(slice(None))
        self._check_limits()

    @functools.cached_property
    def calibration(self) -> Calibration | None:
        """Contents of the calibration (``--kv-calibration``), or None without one."""
        folder = self.settings.calibration
        if folder is None:
            return None
        if self.keeps_all or self.compresses:
            why = "keeps every token" if self.keeps_all else "compresses prompts, for which nothing is calibrated"
            raise ConfigError(f"--kv-policy {self.name} {why}: leave --kv-calibration out")
        found = read_calibration(folder)
        found.check_model(self.model, folder)
        return found

    def _resolve(self, settings: PolicySettings) -> Retention:
        window, window_share = self.default_window, self.window_share
        if self.calibration is not None and self.name in self.calibration.windows:
            window, window_share = None, self.calibration.windows[self.name]
        kept = resolve_retention(
            settings,
            self.model.max_model_len,
            self.scorer_shape(),
            keeps_all=self.keeps_all,
            sinks=self.default_sinks,
            window_share=window_share,
            window=window,
        )
        self.check_retention(kept)
        return kept

    def check_retention(self, kept: Retention) -> None:
        """Check that the policy can work with the budget, sinks and window of a server or a request.

        Raises:
            ConfigError: it cannot; the message names the option to change.
        """
        return

    @functools.cached_property
    def one_budget(self) -> bool:
        """True if all requests have the server's budget.

        This holds if the policy never evicts, or if heads have unequal budgets, set beforehand or at the
        prompt's end.
        """
        return self.keeps_all or self.adaptive_head_budgets or bool((self.shares() != self.retention.budget).any())

    def retention_of(self, budget: int) -> Retention:
        """Return the retention of a request with the given budget, resolved as for a server with that budget.

        Raises:
            ConfigError: the budget is too small, or all requests have the server's budget.
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
        """Check ``max_budget`` and ``max_protect`` against the server's own budget and protection.

        Raises:
            ConfigError: a limit is below the server's own value, or the policy allows one budget only.
        """
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
        """Check that everything the policy class declares is implemented, so that no declaration is ignored.

        Raises:
            ConfigError: names the first declaration that is not.
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
        """Read and check the files that the policy needs from disk.

        The default refuses a scorer, because nothing would use it.

        Raises:
            ConfigError: the policy cannot be used with this model.
        """
        if self.settings.scorer is not None:
            raise ConfigError(
                f"--kv-policy {self.name} uses no scorer: leave --kv-scorer out, or choose a kvpop policy"
            )

    def scorer_shape(self) -> ScorerShape | None:
        """Return the retention settings of the scorer's config, or None without a scorer."""
        return None

    @property
    def uses_moment_correction(self) -> bool:
        """True if outputs are corrected with the moments of evicted tokens (``--kv-correction moment``)."""
        return (self.settings.correction or self.default_correction) == "moment"

    @functools.cached_property
    def state_floats(self) -> int:
        """Size of the state per layer and KV head in float32 words, including the moments of a correction.

        The tensors of layer 0 must have been loaded.
        """
        return self.layer_rule(0, slice(0, 1)).state_floats(self.model.head_dim)

    @property
    def allocator(self) -> str:
        """Name of the allocator that distributes the budget over layers and heads, or its file (``--kv-allocator``)."""
        calibrated = self.calibration is not None and self.calibration.shares is not None
        return self.settings.allocator or (CALIBRATED if calibrated else self.default_allocator)

    @functools.cached_property
    def allocate(self) -> Allocator:
        """Function that distributes the budget over layers and heads.

        Raises:
            ConfigError: as :func:`kvpop_vllm.policies.allocators.allocator_of`.
        """
        if self.allocator == CALIBRATED:
            return functools.partial(proportional, self.calibration.shares)
        return allocator_of(self.allocator, self.model.num_layers, self.model.num_kv_heads)

    @property
    def adaptive_head_budgets(self) -> bool:
        """True if the heads of a layer divide each request's budget at the end of its prompt."""
        return self.allocator == "ada"

    @property
    def protect(self) -> bool | int:
        """Number of protected tokens of each prompt (``--kv-protect-prompt``): True for all, 0 for none."""
        asked = self.settings.protect_prompt
        return self.default_protect if asked is None else asked

    @property
    def compression(self) -> PromptVotes | PromptMatching | None:
        """Way in which prompts are compressed at their end, None if they are not."""
        return None

    @property
    def max_budget(self) -> int:
        """Largest budget that a request may have, in tokens (``--kv-max-budget``)."""
        return max(self.settings.max_budget or 0, self.retention.budget)

    @property
    def max_window(self) -> int:
        """Window of a request with the largest budget, in tokens."""
        own = self.max_budget == self.retention.budget
        return (self.retention if own else self.retention_of(self.max_budget)).window

    @property
    def max_protect(self) -> bool | int:
        """Most prompt tokens that a request may protect (``--kv-max-protect``): True for all, 0 for none."""
        asked = self.settings.max_protect
        return self.protect if asked is None else asked

    @property
    def query_group(self) -> int:
        """Number of query heads per KV head, G.

        Raises:
            ConfigError: the number of query heads of the model is unknown.
        """
        if self.model.num_heads is None:
            raise ConfigError(f"--kv-policy {self.name} must know how many heads the model has: give its config")
        return self.model.num_heads // self.model.num_kv_heads

    def shares(self) -> torch.Tensor:
        """Return the budget ``[layers, H]`` int32 of every head, as set by the allocator; the mean is B."""
        return self.allocate(self.retention, self.model.num_layers, self.model.num_kv_heads)

    def checked_shares(self, heads: slice) -> Shares | None:
        """Return the validated budgets of ``heads``, or None if they are all B.

        Raises:
            ConfigError: the budgets have the wrong shape or dtype, are too small, exceed B on average, or
                differ between heads of a layer under tensor parallelism.
        """
        budgets, shape = self.shares(), (self.model.num_layers, self.model.num_kv_heads)
        if tuple(budgets.shape) != shape or budgets.dtype != torch.int32:
            raise ConfigError(f"--kv-policy {self.name} gives shares that are not {shape} int32: fix the policy class")
        if (least := int(budgets.min())) < self.retention.first_long:
            raise ConfigError(
                f"--kv-allocator {self.allocator} leaves a head {least} tokens, less than sinks and window: raise --kv-budget"
            )
        if int(budgets.sum()) > self.retention.budget * budgets.numel():
            raise ConfigError(f"--kv-policy {self.name} gives shares of more than the budget: fix the policy class")
        if self.order is Order.ROUNDS and (budgets != budgets[:, :1]).any():
            raise ConfigError(
                f"--kv-policy {self.name} ranks all heads of a layer in one round, and their shares differ: choose another --kv-allocator"
            )
        own = budgets[:, heads]
        if own.shape[1] < budgets.shape[1] and (budgets != budgets[:, :1]).any():
            raise ConfigError(
                f"--kv-policy {self.name} gives heads of a layer shares of their own: set --kv-allocator uniform or --tensor-parallel-size 1"
            )
        return Shares.of(own, self.retention.budget)

    def gate(self, layer: int, heads: slice) -> Gate | None:
        """Return the gate of ``layer`` for ``heads``, or None if the kernels score tokens.

        The gate's output is the gate score of :class:`kvpop_vllm.kernels.ops.GateScore`.
        """
        return None

    def check_ranks(self, ranks: int) -> None:
        """Check that the policy works with the given number of tensor-parallel ranks.

        Raises:
            ConfigError: it does not.
        """
        if self.adaptive_head_budgets and ranks > 1:
            raise ConfigError(
                f"--kv-policy {self.name} has all heads of a layer divide a budget: set --tensor-parallel-size 1"
            )
        self.checked_shares(slice(0, max(1, self.model.num_kv_heads // ranks)))

    @property
    def gated(self) -> bool:
        """True if the policy has a gate."""
        return bool(self.signals & GATED)

    @property
    def shifted(self) -> bool:
        """True if the gate's output for token t + 1 is the score of token t."""
        return False

    @property
    def graph(self) -> str:
        """Key of a model's compiled graph in addition to the policy's name: kind and sizes of the gate."""
        return ""

    @abstractmethod
    def rule(self, layer: int, heads: slice) -> RetentionRule:
        """Return the rule of ``layer`` for ``heads`` (those of one rank), without the correction."""

    def layer_rule(self, layer: int, heads: slice) -> RetentionRule:
        """Return :meth:`rule` with the requested correction.

        Raises:
            ConfigError: the rule contradicts what the policy declares (order, gate, compression, threshold, draws).
        """
        rule = replace(self.rule(layer, heads), moment_correction=self.uses_moment_correction)
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
                f"declares drops_early = {self.drops_early}, but its rule does otherwise",
                (rule.threshold is not None) == self.drops_early,
            ),
            (f"declares draws = {self.draws}, but its rule does otherwise", rule.seeded == self.draws),
        ):
            if not fits:
                raise ConfigError(f"--kv-policy {self.name} {declared}: fix the policy class")
        return rule

    def training_free_rule(self, heads: slice, scorer: TokenScorer | None, log_gamma: float = 0.0) -> RetentionRule:
        """Return a rule without learned tensors, the same for all layers and heads.

        Args:
            heads: KV heads that the rule is for.
            scorer: scorer without tensors per layer; None scores every token 0.
            log_gamma: logarithm of the decay, in nats per token.
        """
        count, kept = len(range(*heads.indices(self.model.num_kv_heads))), self.retention
        decay = torch.full((count,), log_gamma, dtype=torch.float64)
        return RetentionRule(kept.sinks, kept.window, decay, scorer=scorer)
