"""Base class of policies.

A policy is one file with one class, named after its paper, and one line in the registry.

Life cycle in the engine: the class is looked up by name. One instance is made for the whole model, and its
declarations are checked (:meth:`Policy.check_realised`). After the weights are loaded, ``layer_rule(layer,
heads)`` is called once per layer. From then on the kernels use that rule alone and do not call back into
Python.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvpop_vllm.cache.ranks import Division, FixedBudgets, Shard, Shares
from kvpop_vllm.calibration.shares import Calibration, has_shares, read_calibration
from kvpop_vllm.config import ConfigError, PolicySettings, Retention, resolve_retention
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.policies.allocators import ALLOCATORS, CALIBRATED, Allocator, Proportional
from kvpop_vllm.policies.declaration import GATED, Declaration, Order, Signal

__all__ = ["GATED", "ModelShape", "Order", "Policy", "Signal"]

MOST_RETENTIONS = 1024
"""Largest number of request budgets whose resolved :class:`Retention` is cached."""


@dataclass
class Policy(Declaration):
    """Base class of all policies: resolves what a class declares and what the user sets.

    Attributes:
        settings: the user's settings.
        model: shape of the model.
        retention: resolved budget, sinks and window.
        server_budget_only: True if unequal shares hold for the server's budget alone, so that requests cannot have
            other budgets.
    """

    settings: PolicySettings
    model: ModelShape
    retention: Retention = field(init=False)
    server_budget_only: bool = field(default=False, kw_only=True)
    _retentions: dict[int, Retention] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self):
        # first, because checks and settings below read the scorer or statistics that it loads
        self.prepare()
        self.check_realised()
        if self.settings.threshold is not None and self.default_threshold is None:
            raise ConfigError(f"--kv-policy {self.name} has no threshold: leave --kv-threshold out")
        without_effect = {
            "correction": self.uses_moment_correction,
            "allocator": self.allocator != "uniform",
            "sinks": self.settings.sinks,
        }
        if self.keeps_all and (flag := next((flag for flag, is_set in without_effect.items() if is_set), None)):
            raise ConfigError(f"--kv-policy {self.name} keeps every token: leave --kv-{flag} out")
        if self.adaptive_head_budgets and not self.compresses:
            raise ConfigError(
                f"--kv-allocator ada compares tokens of different heads, and scores of --kv-policy {self.name} mean something within a"
                " head only: choose --kv-policy adakv, or another allocator"
            )
        self.retention = self._resolve(self.settings)
        with torch.device("cpu"):  # a model may be in the making on the meta device
            self.check_shares()
        self._check_limits()

    @functools.cached_property
    def calibration(self) -> Calibration | None:
        """Shares and windows of the calibration (``--kv-calibration``), or None without one.

        A policy that needs statistics alone may be given a folder without shares.
        """
        folder = self.settings.calibration
        if folder is None or (self.calibrated and not has_shares(folder)):
            return None
        if self.keeps_all or self.compresses:
            reason = "keeps every token" if self.keeps_all else "compresses prompts, for which nothing is calibrated"
            raise ConfigError(f"--kv-policy {self.name} {reason}: leave --kv-calibration out")
        calibration = read_calibration(folder)
        calibration.check_model(self.model, folder)
        return calibration.of_policy(self.name)

    @property
    def uses_calibration(self) -> bool:
        """True if shares and window are those of a calibration. It has found them together, so no allocator takes one alone."""
        return self.calibration is not None and self.settings.allocator is None

    def _resolve(self, settings: PolicySettings) -> Retention:
        window, window_share = self.default_window, self.window_share
        if self.uses_calibration and self.name in self.calibration.windows:
            # without a fixed window, so that the measured share takes effect
            window, window_share = None, self.calibration.windows[self.name]
        retention = resolve_retention(
            settings,
            self.model.max_model_len,
            self.scorer_shape(),
            keeps_all=self.keeps_all,
            sinks=self.default_sinks,
            window_share=window_share,
            window=window,
        )
        self.check_retention(retention)
        return retention

    @functools.cached_property
    def unequal(self) -> bool:
        """True if heads have unequal budgets from the first token on."""
        with torch.device("cpu"):  # a model may be in the making on the meta device
            return bool((self.shares() != self.retention.budget).any())

    @functools.cached_property
    def one_budget(self) -> bool:
        """True if all requests have the server's budget.

        This holds if the policy never evicts, if heads divide their budget at the prompt's end, or if a class gives
        them shares that do not follow from the budget.
        """
        fixed = self.server_budget_only or type(self).shares is not Policy.shares
        return self.keeps_all or self.adaptive_head_budgets or (fixed and self.unequal)

    def retention_of(self, budget: int) -> Retention:
        """Return the retention of a request with the given budget, resolved as for a server with that budget."""
        if self.one_budget:
            raise ConfigError(f"--kv-policy {self.name} gives all requests one budget here: leave --kv-budget out")
        retention = self._retentions.get(budget)
        if retention is None:
            # without compression, which errors would give advice on
            retention = self._resolve(replace(self.settings, budget=budget, compression=None))
            # requests may ask for any budget, so that old ones must go
            if len(self._retentions) >= MOST_RETENTIONS:
                self._retentions.clear()
            self._retentions[budget] = retention
        return retention

    def _check_limits(self) -> None:
        """Check ``max_budget`` and ``max_protect`` against the server's own budget and protection."""
        budget, protect = self.settings.max_budget, self.settings.max_protect
        if budget is not None and self.one_budget:
            raise ConfigError(f"--kv-policy {self.name} gives all requests one budget here: leave --kv-max-budget out")
        if budget is not None and budget < self.retention.budget:
            raise ConfigError(
                f"--kv-max-budget {budget} is below the server's own budget: raise it to at least {self.retention.budget}"
            )
        default = self.protect
        # True is an int too, and would compare as 1
        if protect is not None and protect is not True and (default is True or protect < default):
            raise ConfigError(
                f"--kv-max-protect {int(protect)} is below what --kv-protect-prompt says:"
                f" raise it to {'all' if default is True else f'at least {default}'}"
            )

    @property
    def uses_moment_correction(self) -> bool:
        """True if outputs are corrected with the moments of evicted tokens (``--kv-correction moment``)."""
        return (self.settings.correction or self.default_correction) == "moment"

    def layer_rule(self, layer: int, heads: slice) -> RetentionRule:
        """Return :meth:`rule` with the requested correction."""
        rule = replace(self.rule(layer, heads), moment_correction=self.uses_moment_correction)
        self._check_rule(rule)
        return rule

    @functools.cached_property
    def state_floats(self) -> int:
        """Size of the state per layer and KV head in float32 words, including the moments of a correction.

        The tensors of layer 0 must have been loaded.
        """
        # one head is enough, since all have a state of one size
        return self.layer_rule(0, slice(0, 1)).state_floats(self.model.head_dim)

    def draft_query_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the queries that are staged with a draft of one KV head.

        Args:
            dtype: dtype of the queries.
        """
        # other rules read no attention, so that their drafts need no queries
        if self.order is not Order.COUPLED:
            return 0
        return self.layer_rule(0, slice(0, 1)).draft_query_bytes(self.query_group, self.model.head_dim, dtype)

    @functools.cached_property
    def round_length(self) -> int:
        """Most tokens between two rounds, the method's m, 0 for a policy without rounds."""
        return self.layer_rule(0, slice(0, 1)).rounds.every if self.in_rounds else 0

    @property
    def allocator(self) -> str:
        """Name of the allocator that distributes the budget over layers and heads (``--kv-allocator``)."""
        calibrated = self.uses_calibration and self.calibration.shares is not None
        return CALIBRATED if calibrated else self.settings.allocator or self.default_allocator

    @functools.cached_property
    def allocate(self) -> Allocator:
        """Function that distributes the budget over layers and heads."""
        if self.allocator == CALIBRATED:
            return Proportional(tuple(map(tuple, self.calibration.shares)))
        return ALLOCATORS[self.allocator]

    @property
    def adaptive_head_budgets(self) -> bool:
        """True if the heads of a layer divide each request's budget at the end of its prompt."""
        return self.allocator == "ada"

    @property
    def protect(self) -> bool | int:
        """Number of protected tokens of each conversation (``--kv-protect-prompt``): True for each prompt, 0 for none."""
        protected = self.settings.protect_prompt
        return self.default_protect if protected is None else protected

    @property
    def max_budget(self) -> int:
        """Largest budget that a request may have, in tokens (``--kv-max-budget``)."""
        return max(self.settings.max_budget or 0, self.retention.budget)

    @property
    def max_window(self) -> int:
        """Window of a request with the largest budget, in tokens."""
        is_default = self.max_budget == self.retention.budget
        return (self.retention if is_default else self.retention_of(self.max_budget)).window

    @property
    def max_protect(self) -> bool | int:
        """Most tokens that a request may protect (``--kv-max-protect``): True for all of a prompt, 0 for none."""
        limit = self.settings.max_protect
        return self.protect if limit is None else limit

    @property
    def query_group(self) -> int:
        """Number of query heads per KV head, G."""
        if self.model.num_heads is None:
            raise ConfigError(f"--kv-policy {self.name} must know how many heads the model has: give its config")
        return self.model.num_heads // self.model.num_kv_heads

    def shares(self) -> torch.Tensor:
        """Return the budget ``[layers, H]`` int32 of every head, as set by the allocator. The mean is B."""
        return self.allocate(self.retention, self.model.num_layers, self.model.num_kv_heads)

    def budgets_of(self, retention: Retention) -> torch.Tensor:
        """Return the budgets ``[layers, H]`` int32 of the heads of a request, whose mean is the request's B.

        Sinks and window are those of ``retention``. The allocator scales the long-range slots of each head.
        """
        if retention == self.retention:
            return self.shares()
        sizes = self.model.num_layers, self.model.num_kv_heads
        if not self.unequal:
            return torch.full(sizes, retention.budget, dtype=torch.int32)
        return self.allocate(retention, *sizes)

    def division(self, shards: Sequence[Shard]) -> Division | None:
        """Return how heads divide the slots of requests, or None if they are equal.

        Args:
            shards: layers and heads of each rank.
        """
        if not self.unequal:
            return None
        allocate = self.allocate
        # these shares hold for the server's budget alone, and no allocator repeats them
        if self.one_budget:
            with torch.device("cpu"):
                allocate = FixedBudgets(tuple(map(tuple, self.shares().tolist())))
        sizes = self.retention.sinks, self.model.num_layers, self.model.num_kv_heads
        return Division(allocate, *sizes, tuple(shards), self.one_budget)

    def largest_retentions(self) -> list[Retention]:
        """Return retentions, one of which gives a head the most slots that a request may have.

        It is that of the largest budget, unless heads are unequal: a scorer may have smaller windows, so more
        long-range slots, below each budget that it was trained with.
        """
        limit = self.max_budget
        retentions = [self.retention if limit == self.retention.budget else self.retention_of(limit)]
        shape = self.scorer_shape()
        if shape is None or self.one_budget or not self.unequal:
            return retentions
        # one slot short of a trained budget, where the smaller window of the next one holds
        budgets = [self.retention.sinks + trained.slots - 1 for trained in shape.trained]
        for budget in budgets:
            if budget < limit:
                with contextlib.suppress(ConfigError):  # too small for any request
                    retentions.append(self.retention_of(budget))
        return retentions

    def unequal_shares(self, heads: slice) -> Shares | None:
        """Return the budgets of these heads of all layers, or None if all of them are B."""
        return Shares.of(self.shares()[:, heads], self.retention.budget)

    def check_shares(self) -> None:
        """Check the budgets of all heads."""
        budgets, shape = self.shares(), (self.model.num_layers, self.model.num_kv_heads)
        if tuple(budgets.shape) != shape or budgets.dtype != torch.int32:
            raise ConfigError(f"--kv-policy {self.name} gives shares that are not {shape} int32: fix the policy class")
        if (smallest := int(budgets.min())) < self.retention.first_long:
            raise ConfigError(
                f"--kv-allocator {self.allocator} leaves a head {smallest} tokens, less than sinks and window: raise --kv-budget"
            )
        if int(budgets.sum()) > self.retention.budget * budgets.numel():
            raise ConfigError(f"--kv-policy {self.name} gives shares of more than the budget: fix the policy class")

    def check_ranks(self, ranks: int) -> None:
        """Check that the policy works with the given number of tensor-parallel ranks."""
        if self.adaptive_head_budgets and ranks > 1:
            raise ConfigError(
                f"--kv-policy {self.name} has all heads of a layer divide a budget: set --tensor-parallel-size 1"
            )
        # copies of a head would evict by the attention of their own query heads alone, each other tokens
        if Signal.MASS in self.signals and ranks > self.model.num_kv_heads:
            raise ConfigError(
                f"--kv-policy {self.name} reads the attention of all query heads of a KV head, which ranks share: lower"
                f" --tensor-parallel-size {ranks} to {self.model.num_kv_heads}"
            )
