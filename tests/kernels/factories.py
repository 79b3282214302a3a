"""Inputs for kernel tests: random scorers, poisoned pages, random page tables."""

import torch

from kvpop_vllm.cache.pages import PageLayout, Pages, cdiv
from kvpop_vllm.kernels.ops import (
    AttentionMass,
    GateScore,
    KeyNorm,
    MomentResidual,
    RetentionRule,
)
from kvpop_vllm.scorers.linear import LinearWeights
from kvpop_vllm.scorers.mlp import MLPWeights
from kvpop_vllm.scorers.mlstm import MLSTMWeights


def random_scorer(kind: str | None, heads: int, size: int, generator: torch.Generator, **options):
    """Return a scorer whose scores spread widely, so that few decisions are close.

    Options are those of :class:`MLSTMWeights`, and the booleans ``value_projection``, ``norm`` and ``skip``.
    """

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator) * scale

    wide, narrow = 2 * size, size // 2
    spread = 2 * wide**-0.5
    if kind is None:
        return None
    if kind == "key-norm":
        return KeyNorm()
    if kind == "mass":
        return AttentionMass(**options)
    if kind == "gate_scores":
        return GateScore(**options)
    if kind == "moment":
        return MomentResidual()
    if kind == "linear":
        return LinearWeights(normal(heads, wide, scale=spread), normal(heads))
    if kind == "mlp":
        hidden = 24
        return MLPWeights(
            normal(heads, wide, hidden, scale=spread), normal(heads, hidden), normal(heads, hidden), normal(heads)
        )
    width = size if options.pop("value_projection", True) else None
    norm, skip = options.pop("norm", False), options.pop("skip", False)
    values = width or size
    return MLSTMWeights(
        q_proj=normal(heads, wide, narrow, scale=spread),
        k_proj=normal(heads, wide, narrow, scale=spread),
        v_proj=normal(heads, wide, width, scale=spread) if width else None,
        igate_weight=normal(heads, wide, scale=spread),
        igate_bias=normal(heads),
        fgate_weight=normal(heads, wide, scale=spread),
        fgate_bias=normal(heads) + 2,
        out_weight=normal(heads, values, scale=2.0),
        out_bias=normal(heads),
        norm_weight=1 + normal(heads, values, scale=0.1) if norm else None,
        skip_weight=normal(heads, wide, scale=spread) if skip else None,
        **options,
    )


def given_scores(rule: RetentionRule, k: torch.Tensor) -> torch.Tensor | None:
    """Return given scores ``[.., H]``, or decays, of tokens ``k [.., H, D]`` by their first channel."""
    if not isinstance(rule.scorer, GateScore):
        return None
    return -torch.exp(k[..., 0].float() - 3) if rule.ages else k[..., 0].float()


def random_rule(
    scorer,
    heads: int,
    sinks: int,
    window: int,
    generator: torch.Generator,
    decay_step: int = 1,
    moment_correction: bool = False,
) -> RetentionRule:
    gamma = 0.9 + 0.0999 * torch.rand(heads, generator=generator, dtype=torch.float64)
    if isinstance(scorer, AttentionMass | MomentResidual):
        gamma = 1 - 1e-3 * (1 - gamma)  # masses are of order 1 / B
    log_gamma = torch.log(gamma) if scorer is not None else torch.full((heads,), -1.0, dtype=torch.float64)
    return RetentionRule(sinks, window, log_gamma, decay_step, scorer, moment_correction)


def poisoned_pages(layout: PageLayout, num_blocks: int) -> Pages:
    """Return pages of 0xFF bytes: NaN as a float, -1 as a position."""
    raw = torch.full((num_blocks, layout.num_kv_heads, layout.block_slots, layout.slot_bytes), 255, dtype=torch.uint8)
    return layout.view(raw)


def random_page_table(layout: PageLayout, requests: int, budget: int, generator: torch.Generator, spare: int = 3):
    """Return pages and ``[requests, H, P]`` rows of distinct blocks in random order, without block 0."""
    width = layout.state_blocks + cdiv(budget, layout.block_slots)
    blocks = 1 + torch.randperm(requests * width + spare, generator=generator)[: requests * width]
    table = blocks.int().view(requests, 1, width).expand(requests, layout.num_kv_heads, width)
    return poisoned_pages(layout, requests * width + spare + 1), table
