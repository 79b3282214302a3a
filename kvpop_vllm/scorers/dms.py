"""Gate of DMS: whether a token is evicted with the window, read at insertion (arXiv:2506.05345)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from kvpop_vllm.schemas import FLAG, Rule, integer, one_of
from kvpop_vllm.scorers.base import Gate, Signals
from kvpop_vllm.scorers.scorer_config import POSITIVE, GateConfig

EVICTION_OFFSET = -5.0
"""DMS's initial bias of the eviction logit: ``sigmoid(-5) = 0.0067``, so that almost nothing is evicted."""


@dataclass(frozen=True, kw_only=True)
class DMSConfig(GateConfig):
    """Config of DMS's gate.

    The window holds at least two tokens: slot 1 stores the number of filled slots, so it must not be
    long-range.

    Attributes:
        scale: factor on the input of the gate.
        shifted: True if the logit of token t + 1 decides about token t.
    """

    scorer: ClassVar[str] = "dms"
    rules: ClassVar[dict[str, Rule]] = GateConfig.rules | {
        "window": integer(2),
        "reads": one_of(("hidden", "query")),
        "scale": POSITIVE,
        "shifted": FLAG,
    }

    scale: float = 100.0
    shifted: bool = False

    def shapes(self, names=()):
        heads = self.num_kv_heads
        return {"bias": (heads,)} | ({"weight": (heads, self.hidden_size)} if self.reads == "hidden" else {})


class DMSGate(Gate):
    """DMS's eviction logit, negated: ``r = -(scale * x + b)``. A token is evicted where ``r < 0``.

    x is ``w_h . hidden``, or the borrowed channel, which is then removed from the query. ``scale`` makes a
    gate learn that many times faster than the rest of the model, as in the authors' code, where it is 100.

    Before training ``w`` is 0 and b is -5, so that nothing is evicted while slots are free.

    Source: arXiv:2506.05345.
    """

    config_class = DMSConfig

    def __init__(self, config: DMSConfig, bias: float = EVICTION_OFFSET):
        super().__init__(config)
        if config.reads == "hidden":
            self.weight = nn.Parameter(torch.zeros(config.num_kv_heads, config.hidden_size))
        self.bias = nn.Parameter(torch.full((config.num_kv_heads,), bias))

    def forward(self, signals: Signals) -> torch.Tensor:
        """Return the scores ``[.., H]`` float32. See :class:`Gate`."""
        x = signals.channel.float() if self.borrows else F.linear(signals.hidden.float(), self.weight)
        return -(self.config.scale * x + self.bias)
