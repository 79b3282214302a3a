"""Scores of the policies that are compared, for whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvpop_vllm.config import ConfigError, ScorerShape
from kvpop_vllm.distill.sparse import Score, recency
from kvpop_vllm.kernels.ops import MLSTMWeights
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import check_model, read_scorer
from kvpop_vllm.scorers.init import model_shape


@dataclass(frozen=True)
class Contender:
    """A policy as evaluation sees it: its name, its scores, its decay step, and the float32 words of state per head."""

    name: str
    score: Score
    step: int = 1
    state_floats: int = 0

    def budget_of_equal_bytes(self, budget: int, head_dim: int, dtype: torch.dtype) -> int:
        """The largest budget whose pages, those of the state among them, are no more than a stateless policy's of ``budget``
        (pages of the default number of slots; a whole request, :mod:`kvpop_vllm.cache.accounting`)."""
        layout = PageLayout(1, head_dim, dtype, state_floats=self.state_floats)
        free = cdiv(budget, layout.block_slots) - layout.state_blocks
        return max(0, min(budget, free * layout.block_slots))


def _l2norm(layer, k, v, window):
    """Tokens whose keys have a small norm stay (Devoto et al., A simple and effective L2 norm-based strategy)."""
    return -k.float().norm(dim=-1), torch.zeros(k.shape[1], device=k.device)


def _random(layer, k, v, window):
    generator = torch.Generator().manual_seed(layer)
    return torch.rand(k.shape[:3], generator=generator).to(k.device), torch.zeros(k.shape[1], device=k.device)


TRAINING_FREE: dict[str, Callable] = {"streaming-llm": recency, "l2norm": _l2norm, "random": _random}


def training_free(name: str) -> Contender:
    """A policy without a scorer.

    Raises:
        ConfigError: unknown name.
    """
    if name not in TRAINING_FREE:
        raise ConfigError(f"unknown policy {name!r}: choose from {', '.join(TRAINING_FREE)}, or give --scorer DIR")
    return Contender(name, TRAINING_FREE[name])


def learned(folder: str, model: str | Path) -> tuple[Contender, ScorerShape]:
    """A scorer folder's policy, and the sinks and windows that it was trained with.

    Raises:
        ConfigError: not a scorer, or one of another model.
    """
    config, layers = read_scorer(folder)
    check_model(config, **model_shape(model), source=folder)
    scorers = [from_tensors(config, tensors) for tensors in layers]

    def score(layer, k, v, window):
        scorer = scorers[layer].to(k.device)
        return scorer(k, v, window=window), scorer.log_gamma()

    weights = scorers[0].weights()
    floats = weights.state_floats if isinstance(weights, MLSTMWeights) else 0
    return Contender(folder, score, config.decay.step, floats), config.retention
