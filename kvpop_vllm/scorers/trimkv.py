"""Gate of TRIM-KV and DBTrimKV: the decay of each token, read at insertion (arXiv:2512.03324, arXiv:2605.09649)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from kvpop_vllm.schemas import FLAG, Rule, one_of
from kvpop_vllm.scorers.base import Gate, Signals
from kvpop_vllm.scorers.scorer_config import GateConfig

GATE_BIAS = 8.0
"""TRIM-KV's initial bias: ``beta = sigmoid(8) = 0.99966``, so that almost nothing decays before training."""
GATE_WIDTH = 512
"""TRIM-KV's default number of hidden units."""


@dataclass(frozen=True, kw_only=True)
class TrimKVConfig(GateConfig):
    """Config of TRIM-KV's gate. Tensors say whether it has a second hidden layer, as DBTrimKV's has.

    Attributes:
        gated: True if the first layer is gated.
    """

    scorer: ClassVar[str] = "trimkv"
    rules: ClassVar[dict[str, Rule]] = GateConfig.rules | {"reads": one_of(("hidden", "kv")), "gated": FLAG}

    gated: bool = False

    @property
    def width(self) -> int:
        """Number of inputs of the gate."""
        return self.hidden_size if self.reads == "hidden" else 2 * self.num_kv_heads * self.head_dim

    def shapes(self, names=()):
        if self.gated:
            first = {"gate_proj.weight": ("M", self.width), "up_proj.weight": ("M", self.width)}
            last = "down_proj.weight"
        else:
            first = {"linear1.weight": ("M", self.width), "linear1.bias": ("M",)}
            last = "linear2.weight"
        if "linear3.weight" in names and not self.gated:
            first |= {"linear2.weight": ("M", "M"), "linear2.bias": ("M",)}
            last = "linear3.weight"
        return first | {last: (self.num_kv_heads, "M"), "bias": (self.num_kv_heads,)}


class TrimKVGate(Gate):
    """TRIM-KV's retention gate, ``r = log beta = logsigmoid(W_2 SiLU(W_1 x + b_1) + b)``.

    x is the attention block's input, or the concatenation ``[k_1; v_1; k_2; v_2; ..]`` of all KV heads as
    cached. ``gated`` replaces the first layer by ``SiLU(W_g x) * W_u x``. The authors' code calls these three
    variants rg, rg2 and rg3. DBTrimKV's, rg10, has a second hidden layer: ``logsigmoid(W_3 SiLU(W_2 SiLU(W_1 x + b_1)
    + b_2) + b)``.

    The last layer is initialised to 0, where the authors draw small values. Before training all tokens therefore
    have the same beta, and the policy is the sliding window.

    Source: arXiv:2512.03324, section 4.1.

    Args:
        width: M, default 512.
        bias: initial b.
        hidden_layers: 1, or 2 for DBTrimKV's gate.
    """

    config_class = TrimKVConfig
    size_arguments = ("width", "hidden_layers")

    def __init__(self, config: TrimKVConfig, width: int | None = None, bias: float = GATE_BIAS, hidden_layers: int = 1):
        super().__init__(config)
        heads, m = config.num_kv_heads, width or GATE_WIDTH
        first = ("gate_proj", "up_proj") if config.gated else ("linear1",)
        for name in first:
            setattr(self, name, nn.Linear(config.width, m, bias=not config.gated))
        if hidden_layers == 2:
            self.linear2 = nn.Linear(m, m)
        # as the last layer is called in files
        self._last_name = "down_proj" if config.gated else f"linear{hidden_layers + 1}"
        setattr(self, self._last_name, nn.Linear(m, heads, bias=False))
        self.bias = nn.Parameter(torch.full((heads,), bias))
        nn.init.zeros_(self._last.weight)

    @classmethod
    def sizes(cls, tensors):
        """Return the size arguments of a module with these tensors."""
        first = "gate_proj.weight" if "gate_proj.weight" in tensors else "linear1.weight"
        return {"width": tensors[first].shape[0], "hidden_layers": 1 + ("linear3.weight" in tensors)}

    @property
    def _last(self) -> nn.Linear:
        return getattr(self, self._last_name)

    def forward(self, signals: Signals) -> torch.Tensor:
        """Return the scores ``[.., H]`` float32, at most 0. See :class:`Gate`."""
        if self.config.reads == "hidden":
            x = signals.hidden.float()
        else:
            # [.., H, 2D] -> [.., 2HD], each head's key before its value
            x = torch.cat([signals.k, signals.v], -1).flatten(-2).float()
        if self.config.gated:
            inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        else:
            inner = F.silu(self.linear1(x))
        if hasattr(self, "linear3"):
            inner = F.silu(self.linear2(inner))
        return F.logsigmoid(self._last(inner) + self.bias)
