"""Gate of KVzap: a token's importance, read at insertion (arXiv:2601.07891)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from kvpop_vllm.schemas import FLAG, TEXT, Rule, integer, one_of, optional
from kvpop_vllm.scorers.base import Gate, Signals
from kvpop_vllm.scorers.scorer_config import GateConfig

NARROWING = 8
"""Width of the model per hidden unit of an MLP, as in the published ones (512 of 4,096)."""


@dataclass(frozen=True, kw_only=True)
class KVzapConfig(GateConfig):
    """Config of KVzap's gate.

    A published gate does not say its model's type nor the size of its heads. Both are null then, and are not compared
    with the served model.

    Attributes:
        linear: True for a linear layer, False for an MLP of two layers.
    """

    scorer: ClassVar[str] = "kvzap"
    rules: ClassVar[dict[str, Rule]] = GateConfig.rules | {
        "model_type": optional(TEXT),
        "head_dim": optional(integer(1)),
        "reads": one_of(("hidden",)),
        "linear": FLAG,
    }

    model_type: str | None
    head_dim: int | None
    linear: bool = False

    def shapes(self, names=()):
        heads, width = self.num_kv_heads, self.hidden_size
        if self.linear:
            return {"weight": (heads, width), "bias": (heads,)}
        first = {"fc1.weight": ("M", width), "fc1.bias": ("M",)}
        return first | {"fc2.weight": (heads, "M"), "fc2.bias": (heads,)}


class KVzapGate(Gate):
    """KVzap's surrogate, ``r = W x + b``, or ``r = W_2 GELU(W_1 x + b_1) + b_2`` with the exact GELU.

    x is the attention block's input. The published gates predict a logarithm of importance.

    The last layer's weight is initialised to 0. Before training all scores are equal, so that the policy is the
    sliding window.

    Source: arXiv:2601.07891.

    Args:
        width: M, default ``E / 8``, at least 1.
        bias: initial bias of the last layer.
    """

    config_class = KVzapConfig
    size_arguments = ("width",)

    def __init__(self, config: KVzapConfig, width: int | None = None, bias: float = 0.0):
        super().__init__(config)
        heads, size = config.num_kv_heads, config.hidden_size
        if config.linear:
            self.weight, self.bias = nn.Parameter(torch.zeros(heads, size)), nn.Parameter(torch.full((heads,), bias))
            return
        width = width or max(1, size // NARROWING)
        self.fc1, self.fc2 = nn.Linear(size, width), nn.Linear(width, heads)
        nn.init.zeros_(self.fc2.weight)
        nn.init.constant_(self.fc2.bias, bias)

    @classmethod
    def sizes(cls, tensors):
        """Return the size arguments of a module with these tensors."""
        return {"width": tensors["fc1.weight"].shape[0]} if "fc1.weight" in tensors else {}

    def forward(self, signals: Signals) -> torch.Tensor:
        """Return the scores ``[.., H]`` float32. See :class:`Gate`."""
        x = signals.hidden.float()
        return F.linear(x, self.weight, self.bias) if self.config.linear else self.fc2(F.gelu(self.fc1(x)))
