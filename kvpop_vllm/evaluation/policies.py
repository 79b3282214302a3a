"""Policies in a comparison: each is the registered policy itself, with its rule built as in serving.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from kvpop_vllm import policies
from kvpop_vllm.cache.accounting import CacheBytes, request_bytes
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.config import ConfigError, PolicySettings, ScorerShape, protected_tokens
from kvpop_vllm.evaluation.recall import Judge, Recall
from kvpop_vllm.evaluation.serving_kernels import attend_and_keep
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.model_hook import borrowed_share
from kvpop_vllm.model_shape import ModelShape, folder_sizes
from kvpop_vllm.policies import Policy
from kvpop_vllm.policies.allocators import CALIBRATED, proportional
from kvpop_vllm.policies.learned import MEASURED
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import Gate, Signals
from kvpop_vllm.scorers.checkpoint import check_model, read_config, read_scorer


@dataclass(frozen=True)
class PolicySpec:
    """Policy in a comparison, before it has a budget.

    Attributes:
        name: name in tables.
        policy: name in the registry.
        scorer: folder of the scorer, or None.
        correction: value of ``--kv-correction``, None for the policy's own.
        allocator: value of ``--kv-allocator``, None for the policy's own or the shares of its scorer or calibration.
        calibration: value of ``--kv-calibration``, or None.
        shares: ``[layers][H]``, long-range slots of each head over the mean, in place of what the settings above say,
            or None.
        protect: value of ``--kv-protect-prompt``, None for the policy's own.
        prompt: number of tokens at the start of a row that are its prompt, None if all are. Only for policies
            that compress prompts.
        seed: seed of the draws of policies that draw.
    """

    name: str
    policy: str
    scorer: str | None = None
    correction: str | None = None
    allocator: str | None = None
    calibration: str | None = None
    shares: tuple[tuple[float, ...], ...] | None = None
    protect: bool | int | None = None
    prompt: int | None = None
    seed: int = 0

    @property
    def uses_moment_correction(self) -> bool:
        """True if outputs are corrected by the moments of evicted tokens."""
        return (self.correction or policies.get(self.policy).default_correction) == "moment"

    def corrected(self) -> PolicySpec:
        """Return a copy with corrected outputs."""
        return replace(self, name=f"{self.name}+moment", correction="moment")

    def allocated(self, allocator: str) -> PolicySpec:
        """Return a copy with an allocator."""
        measured = self.scorer is not None and read_config(self.scorer).shares
        default = None if measured else policies.get(self.policy).default_allocator
        # the policy's own allocator changes nothing, so that the name stays
        name = self.name if allocator == default else f"{self.name}+{allocator}"
        return replace(self, name=name, allocator=allocator)

    def calibrated(self, folder: str) -> PolicySpec:
        """Return a copy with a calibration."""
        return replace(self, name=f"{self.name}+{folder}", calibration=folder)

    def measured(self, calibration: str | None) -> PolicySpec:
        """Return a copy with a calibration folder if the policy needs one, else the spec itself."""
        return replace(self, calibration=calibration) if policies.get(self.policy).calibrated else self

    def protecting(self, protect: bool | int, unasked: bool | int) -> PolicySpec:
        """Return a copy that never evicts prompts or their first tokens.

        Args:
            protect: True for whole prompts, else a number of tokens.
            unasked: the task's default. Only other values change the name.
        """
        suffix = "+prompt" if protect is True else f"+first {protect}" if protect else "+nothing protected"
        unchanged = (type(protect), protect) == (type(unasked), unasked)  # True is not 1
        return replace(self, name=self.name if unchanged else self.name + suffix, protect=protect)

    def resolve(
        self, model: ModelShape, budget: int, sinks: int | None = None, window: int | None = None
    ) -> ResolvedPolicy:
        """Return the policy with a budget.

        Args:
            model: the model as policies see it.
            budget: B in tokens per KV head.
            sinks: s, default: the policy's own.
            window: w, default: the policy's own.
        """
        values = {name: getattr(self, name) for name in ("scorer", "correction", "allocator", "calibration")}
        settings = PolicySettings(
            self.policy, budget, sinks=sinks, window=window, protect_prompt=self.protect, **values
        )
        try:
            policy = policies.get(self.policy)(settings, model)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {str(error).replace('--kv-', '--')}") from None
        # shares under test take the place of the allocator's
        if self.shares is not None:
            policy.allocate = functools.partial(proportional, self.shares)
        retention = policy.retention
        # only training and recall need the decay's step, where whole sequences are scored
        step = policy.layer_rule(0, slice(0, model.num_kv_heads)).decay_step
        return ResolvedPolicy(self, model, replace(retention, step=step), policy)


class ResolvedPolicy:
    """PolicySpec with a budget.

    Attributes:
        spec: see :class:`PolicySpec`.
        model: see :meth:`PolicySpec.resolve`.
        roles: slot roles of the budget.
        policy: the policy as an engine resolves it.
    """

    def __init__(self, spec: PolicySpec, model: ModelShape, roles: Retention, policy: Policy):
        self.spec, self.model, self.roles, self.policy = spec, model, roles, policy
        self._heads = slice(0, model.num_kv_heads)

    def protected(self, length: int, prompt: int | None = None) -> int:
        """Return the protected tokens of a request of ``length`` tokens. Its prompt is all of them unless given."""
        return 0 if self.policy.compresses else min(length, protected_tokens(self.policy.protect, prompt or length))

    def request_bytes(self, length: int, dtype: torch.dtype, prompt: int | None = None) -> CacheBytes:
        """Return the bytes of a request of ``length`` tokens in pages of the default number of slots.

        Args:
            length: tokens of the request.
            dtype: dtype of keys and values.
            prompt: tokens of its prompt, None if all are.
        """
        model, policy = self.model, self.policy
        protected = self.protected(length, prompt)
        layout = PageLayout(model.num_kv_heads, model.head_dim, dtype, state_floats=policy.state_floats)
        shares = policy.unequal_shares(slice(0, model.num_kv_heads))
        if policy.compresses:
            protected = length if prompt is None else prompt
        sizes = model.num_layers, length, policy.retention
        return request_bytes(layout, *sizes, shares, protected, policy.compression)

    @functools.cached_property
    def rules(self) -> list[RetentionRule]:
        """Rules of all heads of each layer, which the kernels of serving run."""
        return [self.policy.layer_rule(layer, self._heads) for layer in range(self.model.num_layers)]

    @functools.cached_property
    def gates(self) -> list[Gate | None]:
        """Gates that score each layer's tokens at insertion, None where the kernels score them."""
        return [self.policy.gate(layer, self._heads) for layer in range(self.model.num_layers)]

    def budgets(self, layer: int) -> torch.Tensor:
        """Return B of each head of a layer, ``[H]`` int32."""
        return self.policy.shares()[layer].int()

    def gate_scores(self, layer: int, signals: Signals) -> torch.Tensor | None:
        """Return the scores ``[B, S, H]`` of a layer's gate, or None without one."""
        gate = self.gates[layer]
        return None if gate is None else gate.to(signals.k.device)(signals)

    def check_channel(self, model: nn.Module) -> None:
        """Check that a model gives up the query channel that a gate reads, if one does."""
        if self.policy.borrows and not borrowed_share(model):
            raise ConfigError(
                "this gate reads a query channel that the model has not given up: give --model the model it was trained with"
            )

    @property
    def settings(self) -> dict:
        """Settings of the policy that are not defaults, by their keys in ``kv_policy``."""
        values = {name: value for name, value in asdict(self.policy.settings).items() if value is not None}
        # uniform is the default, and the other two cannot be given as --kv-allocator
        implied = self.policy.allocator in ("uniform", CALIBRATED, MEASURED)
        return values if implied else values | {"allocator": self.policy.allocator}

    @property
    def protect(self) -> bool | int:
        """Protected part of prompts: True for all, else the number of tokens.

        It is never evicted, or held until it is compressed.
        """
        prompt = self.spec.prompt
        return prompt if self.policy.compresses and prompt is not None else self.policy.protect

    @property
    def smallest_budget(self) -> int:
        """B of the head that holds fewest tokens."""
        return int(self.policy.shares().min())

    @property
    def dense_length(self) -> int:
        """Length up to which every head holds all tokens, whatever they are."""
        rule = self.rules[0]
        # a threshold evicts even while slots are free
        return rule.sinks + rule.window if rule.threshold is not None else self.smallest_budget

    def on_dense(
        self,
        judge: Judge,
        layer: int,
        v: torch.Tensor,
        positions: list[int],
        signals: Signals | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> tuple[Recall | None, torch.Tensor]:
        """Return recall and attention output of the policy on a layer of the dense model.

        Learned scores share their decay with the teacher.

        Args:
            judge: the layer's dense attention.
            layer: index of the layer.
            v: ``[B, H, S, D]``.
            positions: query positions of the recall, empty for none.
            signals: what gates read.
            sink_logits: ``[Hq]``, logits of the model's attention sinks, or None.

        Returns:
            The recall, and the output ``[B, Hq, S, D]``. The recall is None without positions, if heads hold
            different numbers of tokens, or if tokens are protected.
        """
        gate_scores = self.gate_scores(layer, signals)
        out, held_masks = attend_and_keep(
            self, layer, judge.q, judge.k, v, judge.scale, positions, gate_scores, sink_logits=sink_logits
        )
        if not positions or self.protect or any(len(held_mask.sum(-1).unique()) > 1 for held_mask in held_masks):
            return None, out
        log_gamma = self.rules[layer].log_gamma.to(v.device)
        # without a scorer the teacher's scores do not decay
        decay = log_gamma if self.spec.scorer else torch.zeros_like(log_gamma)
        return judge.recall_of(held_masks, decay, self.roles, positions), out


def training_free(name: str) -> PolicySpec:
    """Return a spec for a policy that needs no scorer."""
    if name not in policies.known():
        names = ", ".join(sorted(known_training_free()))
        raise ConfigError(f"unknown policy {name!r}: choose from {names}, or give --scorer DIR")
    cls = policies.get(name)
    if cls.scorer_kind is not None:
        raise ConfigError(f"policy {name!r} needs a scorer: give --scorer DIR instead of its name")
    if cls.keeps_all:
        raise ConfigError(f"policy {name!r} evicts nothing, as the dense model: leave it out")
    return PolicySpec(name, name)


def known_training_free() -> list[str]:
    """Return the names of the registered policies that evict and need neither a scorer nor a calibration."""
    kinds = [cls for cls in policies.loadable()[0] if cls.scorer_kind is None and not cls.calibrated]
    return [cls.name for cls in kinds if not cls.keeps_all]


def learned(folder: str, model: str | Path) -> tuple[PolicySpec, ScorerShape]:
    """Return a spec for a scorer folder, and the sinks and windows that the scorer was trained with."""
    config, _ = read_scorer(folder)
    check_model(config, **folder_sizes(model), source=folder)
    (policy,) = (cls.name for cls in policies.POLICIES.values() if cls.scorer_kind == config.scorer)
    return PolicySpec(folder, policy, scorer=folder), config.retention
