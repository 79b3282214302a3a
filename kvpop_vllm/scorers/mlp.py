"""Two-layer MLP scorer per head, with SiLU (KVpop section E.2)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from kvpop_vllm.kernels.ops import TokenScorer
from kvpop_vllm.scorers.base import Dense, Scorer, headwise
from kvpop_vllm.scorers.scorer_config import DecayedConfig


@dataclass(frozen=True, kw_only=True)
class MLPConfig(DecayedConfig):
    """Config of an MLP scorer."""

    scorer: ClassVar[str] = "mlp"

    def shapes(self, names=()):
        heads = self.num_kv_heads
        first = {"fc1.weight": (heads, 2 * self.head_dim, "M"), "fc1.bias": (heads, "M")}
        return super().shapes() | first | {"fc2.weight": (heads, "M"), "fc2.bias": (heads,)}


@dataclass(frozen=True)
class MLPWeights(TokenScorer):
    """Headwise two-layer MLP scorer ``r = fc2 . SiLU(fc1 [k; v])`` (KVpop E.2).

    Attributes:
        fc1_weight: ``[H, 2D, M]`` float32.
        fc1_bias: ``[H, M]`` float32.
        fc2_weight: ``[H, M]`` float32.
        fc2_bias: ``[H]`` float32.
    """

    kernel: ClassVar[str] = "mlp"

    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor

    def scores(self, k, v):
        x = torch.cat([k, v], -1).float()
        hidden = F.silu(headwise(x, self.fc1_weight) + self.fc1_bias.unsqueeze(-2))
        return headwise(hidden, self.fc2_weight) + self.fc2_bias.unsqueeze(-1)


class MLPScorer(Scorer):
    """``r = fc2 . SiLU(fc1 [k; v])``, with fc2 initialised to 0.

    Before training all scores are equal, so that the policy is the sliding window.

    Args:
        hidden: M, the hidden width, default D.
    """

    config_class, weights_class = MLPConfig, MLPWeights
    size_arguments = ("hidden",)

    def __init__(self, config: MLPConfig, hidden: int | None = None):
        super().__init__(config)
        h, x, m = config.num_kv_heads, 2 * config.head_dim, hidden or config.head_dim
        # unit variance of hidden units for inputs of unit variance
        self.fc1 = Dense(torch.randn(h, x, m) * x**-0.5, torch.zeros(h, m))
        self.fc2 = Dense(torch.zeros(h, m), torch.zeros(h))

    @classmethod
    def sizes(cls, tensors):
        """Return the size arguments of a module with these tensors."""
        return {"hidden": tensors["fc1.weight"].shape[-1]}
