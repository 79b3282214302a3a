"""Linear scorer per head (KVpop section E.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from kvpop_vllm.kernels.ops import TokenScorer
from kvpop_vllm.scorers.base import Scorer, headwise
from kvpop_vllm.scorers.scorer_config import DecayedConfig


@dataclass(frozen=True, kw_only=True)
class LinearConfig(DecayedConfig):
    """Config of a linear scorer."""

    scorer: ClassVar[str] = "linear"

    def shapes(self, names=()):
        heads = self.num_kv_heads
        return super().shapes() | {"weight": (heads, 2 * self.head_dim), "bias": (heads,)}


@dataclass(frozen=True)
class LinearWeights(TokenScorer):
    """Headwise linear scorer ``r = weight . [k; v] + bias`` (KVpop E.2).

    Attributes:
        weight: ``[H, 2D]`` float32.
        bias: ``[H]`` float32.
    """

    kernel: ClassVar[str] = "linear"

    weight: torch.Tensor
    bias: torch.Tensor

    def scores(self, k, v):
        return headwise(torch.cat([k, v], -1).float(), self.weight) + self.bias.unsqueeze(-1)


class LinearScorer(Scorer):
    """``r = weight . [k; v] + bias``, initialised to 0.

    Before training all scores are equal, so that the policy is the sliding window.
    """

    config_class, weights_class = LinearConfig, LinearWeights

    def __init__(self, config: LinearConfig):
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(config.num_kv_heads, 2 * config.head_dim))
        self.bias = nn.Parameter(torch.zeros(config.num_kv_heads))
