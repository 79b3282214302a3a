"""Scores of the policies that are compared, for whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kvpop_vllm.config import GATE_KINDS, ConfigError, ScorerShape
from kvpop_vllm.distill.hook import Attend
from kvpop_vllm.distill.retention import Roles, kept_at, running_cutoffs
from kvpop_vllm.distill.sparse import Score, Sparse, recency
from kvpop_vllm.evaluation.recall import Judge, Recall
from kvpop_vllm.evaluation.served import Served, attend_and_keep
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import AttentionMass, KeyNorm, MLSTMWeights, MomentResidual, RetentionRule, ScorerWeights
from kvpop_vllm.kernels.pages import PageLayout, cdiv, moment_floats
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import check_model, read_scorer
from kvpop_vllm.scorers.init import model_shape


@dataclass(frozen=True)
class Contender:
    """A policy as evaluation sees it.

    Attributes:
        name: of its lines in a table. score: its scores for whole sequences, or None where they depend on attention. step:
            n of its decay. state_floats: float32 words of its scorer's state per head.
        kernel: ``kernel(layer) -> (scorer, log_gamma, [H] or one number)``, as the kernels of serving take it, or None if
            they do not know it. corrects: outputs are corrected by the moments of evicted tokens. serve: the kernels of serving
            run it, though scores would do.
    """

    name: str
    score: Score | None
    step: int = 1
    state_floats: int = 0
    kernel: Callable[[int], tuple[ScorerWeights, torch.Tensor | float]] | None = None
    corrects: bool = False
    serve: bool = False

    def budget_of_equal_bytes(self, budget: int, head_dim: int, dtype: torch.dtype) -> int:
        """The largest budget whose pages, those of the state among them, are no more than a stateless policy's of ``budget``
        (pages of the default number of slots; a whole request, :mod:`kvpop_vllm.cache.accounting`)."""
        moments = self.corrects or (self.kernel is not None and isinstance(self.kernel(0)[0], MomentResidual))
        floats = self.state_floats + (moment_floats(head_dim) if moments else 0)
        layout = PageLayout(1, head_dim, dtype, state_floats=floats)
        free = cdiv(budget, layout.block_slots) - layout.state_blocks
        return max(0, min(budget, free * layout.block_slots))

    def corrected(self) -> Contender:
        """The same with corrected outputs.

        Raises:
            ConfigError: the kernels of serving do not know it.
        """
        if self.kernel is None:
            raise ConfigError(f"{self.name!r} cannot be corrected, it is no policy that can be served: leave it out")
        return replace(self, name=f"{self.name}+moment", corrects=True)

    @property
    def by_scores(self) -> bool:
        """Whether scores say all that it does."""
        return self.score is not None and not self.corrects and not self.serve

    def attend(self, roles: Roles) -> Attend:
        """What runs it in all layers of a model."""
        if self.by_scores:
            return Sparse(self.score, roles)
        return Served(partial(self.rule, roles), roles.budget)

    def rule(self, roles: Roles, layer: int, heads: int) -> RetentionRule:
        """What the kernels of serving run."""
        scorer, log_gamma = self.kernel(layer)
        decay = torch.as_tensor(log_gamma, dtype=torch.float64).expand(heads).contiguous()
        return RetentionRule(
            roles.sinks, roles.window, decay, roles.step, scorer, roles.decide_every, moment_correction=self.corrects
        )

    def on_dense(
        self, judge: Judge, layer: int, v: torch.Tensor, roles: Roles, positions: list[int], scores: dict
    ) -> tuple[Recall, torch.Tensor]:
        """Its recall on a layer of the dense model, and what it makes of the layer's attention, ``[B, Hq, S, D]``; ``scores``
        keeps what several settings share."""
        log_gamma, key = torch.zeros(judge.k.shape[1], device=v.device), (self.name, roles.window)
        if self.score is not None:
            if key not in scores:
                scores[key] = self.score(layer, judge.k, v, roles.window)
            score, log_gamma = scores[key]
        if self.by_scores:
            rank, cutoff = running_cutoffs(score, log_gamma, roles)
            near = dict(sinks=roles.sinks, window=roles.window, scale=judge.scale)
            out, _ = ops.sparse_attention(judge.q, judge.k, v, rank, cutoff, **near)
            kept = [kept_at(rank, cutoff, q0, roles) for q0 in positions]
        else:
            rule = self.rule(roles, layer, judge.k.shape[1])
            out, kept = attend_and_keep(rule, roles.budget, judge.q, judge.k, v, judge.scale, positions)
        return judge.recall_of(kept, log_gamma, roles, positions), out


def _l2norm(layer, k, v, window):
    """Tokens whose keys have a small norm stay (Devoto et al., A simple and effective L2 norm-based strategy)."""
    return -k.float().norm(dim=-1), torch.zeros(k.shape[1], device=k.device)


def _random(layer, k, v, window):
    generator = torch.Generator().manual_seed(layer)
    return torch.rand(k.shape[:3], generator=generator).to(k.device), torch.zeros(k.shape[1], device=k.device)


TRAINING_FREE: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender("streaming-llm", recency, kernel=lambda layer: (None, -1.0)),
        Contender("l2norm", _l2norm, kernel=lambda layer: (KeyNorm(), 0.0)),
        Contender("h2o", None, kernel=lambda layer: (AttentionMass(mean=True), 0.0)),
        Contender("tova", None, kernel=lambda layer: (AttentionMass(mean=False), 0.0)),
        Contender("momentkv", None, kernel=lambda layer: (MomentResidual(), 0.0), corrects=True),
        Contender("random", _random),
    )
}


def training_free(name: str) -> Contender:
    """A policy without a scorer.

    Raises:
        ConfigError: unknown name.
    """
    if name not in TRAINING_FREE:
        raise ConfigError(f"unknown policy {name!r}: choose from {', '.join(TRAINING_FREE)}, or give --scorer DIR")
    return TRAINING_FREE[name]


def learned(folder: str, model: str | Path) -> tuple[Contender, ScorerShape]:
    """A scorer folder's policy, and the sinks and windows that it was trained with.

    Raises:
        ConfigError: not a scorer, or one of another model.
    """
    config, layers = read_scorer(folder)
    check_model(config, **model_shape(model), source=folder)
    if config.scorer in GATE_KINDS:
        raise ConfigError(
            f"{folder} holds gates ({config.scorer}), which kvpop eval does not run: serve them with --kv-policy {config.scorer}"
        )
    scorers = [from_tensors(config, tensors) for tensors in layers]

    def score(layer, k, v, window):
        scorer = scorers[layer].to(k.device)
        return scorer(k, v, window=window), scorer.log_gamma()

    weights = scorers[0].weights()
    floats = weights.state_floats if isinstance(weights, MLSTMWeights) else 0

    def kernel(layer):
        scorer = scorers[layer].cpu()
        return scorer.weights(), scorer.log_gamma()

    return Contender(folder, score, config.decay.step, floats, kernel), config.retention
