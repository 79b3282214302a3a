"""The policies that are compared: each is the registered policy itself, asked for its rule as serving asks it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from kvpop_vllm import policies
from kvpop_vllm.cache.accounting import CacheBytes, request_bytes
from kvpop_vllm.config import GATE_KINDS, ConfigError, PolicySettings, ScorerShape, protected_tokens
from kvpop_vllm.distill.hook import Attend
from kvpop_vllm.distill.retention import Roles, kept_at, running_cutoffs
from kvpop_vllm.distill.sparse import Score, Sparse, recency
from kvpop_vllm.evaluation.recall import Judge, Recall
from kvpop_vllm.evaluation.served import Served, attend_and_keep
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import KeyNorm, RetentionRule
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.policies import Policy
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.scorers import Gate, from_tensors
from kvpop_vllm.scorers.checkpoint import check_model, read_scorer
from kvpop_vllm.scorers.init import model_shape


@dataclass(frozen=True)
class Contender:
    """A policy that is compared, before there is a budget.

    Attributes:
        name: of its lines in a table. policy: its name in the registry.
        scorer: folder. correction, allocator: as ``--kv-correction`` and ``--kv-allocator``, None for the policy's own.
        score: its scores for whole sequences, if they say all that it does but for a correction.
        serve: the kernels of serving run it, though scores would do.
        protect: as ``--kv-protect-prompt``, None for the policy's own.
        prompt: tokens of a row that are its prompt, where they are not all; of policies that compress prompts.
    """

    name: str
    policy: str
    scorer: str | None = None
    correction: str | None = None
    score: Score | None = None
    serve: bool = False
    allocator: str | None = None
    protect: bool | int | None = None
    prompt: int | None = None

    @property
    def corrects(self) -> bool:
        """Whether outputs are corrected by the moments of evicted tokens."""
        return (self.correction or policies.get(self.policy).default_correction) == "moment"

    def corrected(self) -> Contender:
        """Return the same with corrected outputs."""
        return replace(self, name=f"{self.name}+moment", correction="moment")

    def allocated(self, allocator: str) -> Contender:
        """Return the same with that allocator, on the kernels of serving."""
        own = policies.get(self.policy).default_allocator
        name = self.name if allocator == own else f"{self.name}+{allocator}"
        return replace(self, name=name, allocator=allocator, serve=True)

    def protecting(self, protect: bool | int, unasked: bool | int) -> Contender:
        """Return the same with prompts, or their first tokens, that are never evicted, on the kernels of serving.

        ``unasked`` is what the task protects if nothing is said; the name tells of others.
        """
        suffix = "+prompt" if protect is True else f"+first {protect}" if protect else "+nothing protected"
        return replace(
            self,
            name=self.name + ("" if (type(protect), protect) == (type(unasked), unasked) else suffix),
            protect=protect,
            serve=True,
        )

    def deploy(self, model: ModelShape, budget: int, sinks: int | None = None, window: int | None = None) -> Deployed:
        """Return the policy with a budget of B tokens per KV head, and its own sinks and window where they are None.

        Raises:
            ConfigError: the policy cannot be used so; the message names options of `kvpop eval`.
        """
        settings = PolicySettings(
            self.policy,
            budget,
            sinks=sinks,
            window=window,
            scorer=self.scorer,
            correction=self.correction,
            allocator=self.allocator,
            protect_prompt=self.protect,
        )
        try:
            policy = policies.get(self.policy)(settings, model)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {str(error).replace('--kv-', '--')}") from None
        kept = policy.retention
        step = policy.layer_rule(0, slice(0, model.num_kv_heads)).decay_step
        return Deployed(self, model, Roles(kept.sinks, kept.window, kept.topk, step), policy)


class Deployed:
    """A contender at a budget.

    Attributes:
        contender, model: see :meth:`Contender.deploy`. roles: what the budget is made of. policy: as an engine would resolve
            it.
    """

    def __init__(self, contender: Contender, model: ModelShape, roles: Roles, policy: Policy):
        self.contender, self.model, self.roles, self.policy = contender, model, roles, policy
        self._rules: dict[int, RetentionRule] = {}
        self._gates: dict[int, Gate | None] = {}

    @property
    def state_floats(self) -> int:
        """float32 words of recurrent state per layer and KV head."""
        return self.policy.state_floats

    def request_bytes(self, length: int, dtype: torch.dtype) -> CacheBytes:
        """Return what a request of ``length`` tokens holds in pages of the default number of slots."""
        model, policy = self.model, self.policy
        protected = 0 if policy.compresses else protected_tokens(policy.protect, length)
        layout = PageLayout(model.num_kv_heads, model.head_dim, dtype, state_floats=self.state_floats)
        shares = policy.checked_shares(slice(0, model.num_kv_heads))
        divided = length if policy.divides else 0
        return request_bytes(layout, model.num_layers, length, policy.retention, shares, protected, divided)

    @property
    def by_scores(self) -> bool:
        """Whether scores run it, rather than the kernels of serving."""
        own = self.contender
        return own.score is not None and not own.corrects and not own.serve and not self.protect

    def rule(self, layer: int) -> RetentionRule:
        """Return what the kernels of serving run, for all heads of a layer."""
        if layer not in self._rules:
            self._rules[layer] = self.policy.layer_rule(layer, slice(0, self.model.num_kv_heads))
        return self._rules[layer]

    def budgets(self, layer: int) -> torch.Tensor:
        """B of each head of a layer, ``[H]`` int32."""
        return self.policy.shares()[layer].int()

    def gate(self, layer: int) -> Gate | None:
        """What scores a layer's tokens when they come in, if the kernels do not."""
        if layer not in self._gates:
            self._gates[layer] = self.policy.gate(layer, slice(0, self.model.num_kv_heads))
        return self._gates[layer]

    @property
    def shifted(self) -> bool:
        """Whether the gate's score of token t + 1 is token t's."""
        return self.policy.shifted

    @property
    def protect(self) -> bool | int:
        """What of prompts is never evicted, or is held until it is compressed: True for all, else the number of tokens."""
        prompt = self.contender.prompt
        return prompt if self.policy.compresses and prompt is not None else self.policy.protect

    @property
    def least(self) -> int:
        """B of the head that holds fewest tokens."""
        return int(self.policy.shares().min())

    @property
    def whole(self) -> int:
        """Tokens of which every head still holds all, whatever they are."""
        rule = self.rule(0)
        return rule.sinks + rule.window if rule.threshold is not None else self.least

    def attend(self) -> Attend:
        """What runs it in all layers of a model, on whole rows."""
        return Sparse(self.contender.score, self.roles) if self.by_scores else Served(self)

    def on_dense(
        self,
        judge: Judge,
        layer: int,
        v: torch.Tensor,
        positions: list[int],
        scores: dict,
        hidden: torch.Tensor | None = None,
        channel: torch.Tensor | None = None,
    ) -> tuple[Recall | None, torch.Tensor]:
        """Its recall on a layer of the dense model (None without positions, where heads hold different numbers of tokens, or where tokens are protected), and what it makes of the layer's attention, ``[B, Hq, S, D]``;
        ``scores`` keeps what several settings share; ``hidden [B, S, E]`` is the layer's input and ``channel [B, S, H]`` what it gives up, for gates. Scores that are learned share their decay with the teacher."""
        roles, score = self.roles, self.contender.score
        log_gamma, key = torch.zeros(judge.k.shape[1], device=v.device), (self.contender.name, roles.window)
        if score is not None:
            if key not in scores:
                scores[key] = score(layer, judge.k, v, roles.window)
            raw, log_gamma = scores[key]
        if self.by_scores:
            rank, cutoff = running_cutoffs(raw, log_gamma, roles)
            near = dict(sinks=roles.sinks, window=roles.window, scale=judge.scale)
            out, _ = ops.sparse_attention(judge.q, judge.k, v, rank, cutoff, **near)
            kept = [kept_at(rank, cutoff, q0, roles) for q0 in positions]
        else:
            served = Served(self)
            served.see(layer, hidden)
            served.see_channel(layer, channel)
            own = {"given": served.given(layer, judge.k, v), "shifted": self.shifted}
            own["protected"] = protected_tokens(self.protect, judge.k.shape[2])
            out, kept = attend_and_keep(
                self.rule(layer), self.budgets(layer), judge.q, judge.k, v, judge.scale, positions, **own
            )
        even = not self.protect and all(len(held.sum(-1).unique()) == 1 for held in kept)
        return judge.recall_of(kept, log_gamma, roles, positions) if positions and even else None, out


def _key_norm(layer, k, v, window):
    return -k.float().norm(dim=-1), torch.zeros(k.shape[1], device=k.device)


BY_SCORES: dict[type, Score] = {type(None): recency, KeyNorm: _key_norm}
"""Scores for whole sequences of the scorers of serving that have no tensors; policies with others run on the kernels of
serving."""


def training_free(name: str) -> Contender:
    """Return a policy that needs no scorer.

    Raises:
        ConfigError: unknown name, a policy that needs a scorer, or one that evicts nothing.
    """
    if name not in policies.known():
        names = ", ".join(sorted(known_training_free()))
        raise ConfigError(f"unknown policy {name!r}: choose from {names}, or give --scorer DIR")
    cls = policies.get(name)
    if cls.scorer_kind is not None:
        raise ConfigError(f"policy {name!r} needs a scorer: give --scorer DIR instead of its name")
    if cls.keeps_all:
        raise ConfigError(f"policy {name!r} evicts nothing, and dense is compared with anyway: leave it out")
    return Contender(name, name, score=_scores_of(cls))


def _scores_of(cls: type[Policy]) -> Score | None:
    """What :data:`BY_SCORES` has for its rule, if nothing else is in it; a small model and budget say which that is."""
    try:
        policy = cls(PolicySettings(cls.name, 64), ModelShape("llama", 4, 1, 64, 128))
        rule = policy.layer_rule(0, slice(0, 1))
    except ConfigError:
        return None  # deploy() says why
    plain = RetentionRule(rule.sinks, rule.window, rule.log_gamma, scorer=rule.scorer)
    same = all(
        getattr(rule, f.name) is getattr(plain, f.name) or getattr(rule, f.name) == getattr(plain, f.name)
        for f in fields(rule)
    )
    recent = rule.scorer is not None or bool((rule.log_gamma < 0).all())  # equal scores without decay are not recency
    even = len(policy.shares().unique()) == 1
    return BY_SCORES.get(type(rule.scorer)) if same and recent and even else None


def known_training_free() -> list[str]:
    """Names of the registered policies that evict and need no scorer."""
    return [cls.name for cls in policies.loadable()[0] if cls.scorer_kind is None and not cls.keeps_all]


def learned(folder: str, model: str | Path) -> tuple[Contender, ScorerShape]:
    """A scorer folder's policy, and the sinks and windows that it was trained with.

    Raises:
        ConfigError: not a scorer, or one of another model.
    """
    config, layers = read_scorer(folder)
    check_model(config, **model_shape(model), source=folder)
    (policy,) = (cls.name for cls in policies.POLICIES.values() if cls.scorer_kind == config.scorer)
    if config.scorer in GATE_KINDS:
        return Contender(folder, policy, scorer=folder), config.retention
    scorers = [from_tensors(config, tensors) for tensors in layers]

    def score(layer, k, v, window):
        scorer = scorers[layer].to(k.device)
        return scorer(k, v, window=window), scorer.log_gamma()

    return Contender(folder, policy, scorer=folder, score=score), config.retention


def in_registry(scorers: Iterable[str], model: str | Path) -> tuple[list[Contender], list[str]]:
    """Every registered policy that evicts: those that need a scorer once for each of ``scorers`` that is of their kind.

    Returns:
        The contenders, named after their policies (and folders, where a policy has several), and for each policy that is left
        out a line that says why.
    """
    found, broken = policies.loadable()
    folders: dict[str, list[Contender]] = {}
    for folder in scorers:
        contender, _ = learned(folder, model)
        folders.setdefault(contender.policy, []).append(contender)
    contenders = []
    for cls in found:
        if cls.keeps_all:
            continue
        if cls.scorer_kind is None:
            contenders.append(training_free(cls.name))
            continue
        mine = folders.get(cls.name, [])
        if not mine:
            broken.append(f"{cls.name} needs a scorer of kind {cls.scorer_kind!r}: give --scorer DIR")
        one = len(mine) == 1
        contenders += [replace(c, name=cls.name if one else f"{cls.name}, {c.scorer}") for c in mine]
    return contenders, broken
