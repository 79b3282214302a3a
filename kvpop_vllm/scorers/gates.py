"""Gates: modules that score a token once, at insertion (TRIM-KV, DMS).

A gate reads signals that no attention backend sees. It is a torch module that training and serving share. It
computes in float32, whatever the model's dtype. It does not depend on sequences: all axes before the last are
token axes. Its output is the token's ``given`` score (:class:`kvpop_vllm.kernels.ops.GateScore`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from kvpop_vllm.scorers.checkpoint import ScorerConfig

GATE_BIAS = 8.0
"""TRIM-KV's initial bias: ``beta = sigmoid(8) = 0.99966``, so that almost nothing decays before training."""
GATE_WIDTH = 512
"""TRIM-KV's default number of hidden units."""
EVICTION_OFFSET = -5.0
"""DMS's initial bias of the eviction logit: ``sigmoid(-5) = 0.0067``, so that almost nothing is evicted."""


class Signals(NamedTuple):
    """Inputs of a layer's gate for tokens ``[..]``. Inputs that the gate does not read may be None.

    Attributes:
        hidden: ``[.., E]``, the attention block's input, after its norm.
        k: ``[.., H, D]``, keys as cached, of all KV heads.
        v: ``[.., H, D]``, values as cached, of all KV heads.
        channel: ``[.., H]``, last channel of the first query head of each KV head, after QK-norm and before
            RoPE.
    """

    hidden: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    channel: torch.Tensor | None = None


class Gate(nn.Module):
    """Gate of one layer. Parameters have the names and shapes of the file format.

    Attributes:
        config: config of the scorer folder.
        borrows: True if the gate reads a channel of the queries, which must then be 0 before and after RoPE.
    """

    def __init__(self, config: ScorerConfig):
        super().__init__()
        self.config = config
        self.borrows = config.reads == "query"

    def forward(self, seen: Signals) -> torch.Tensor:
        """Return the scores ``[.., H]`` float32 of tokens ``[..]``."""
        raise NotImplementedError(f"{type(self).__name__} has no forward()")


class TrimKVGate(Gate):
    """TRIM-KV's retention gate, ``r = log beta = logsigmoid(W_2 SiLU(W_1 x + b_1) + b)``.

    x is the attention block's input, or the concatenation ``[k_1; v_1; k_2; v_2; ..]`` of all KV heads as
    cached. ``gated`` replaces the first layer by ``SiLU(W_g x) * W_u x``. The authors' code calls these three
    variants rg, rg2 and rg3.

    ``W_2`` is initialised to 0, where the authors draw small values. Before training all tokens therefore
    have the same beta, and the policy is the sliding window.

    Source: arXiv:2512.03324, section 4.1.

    Args:
        width: M; default 512.
    """

    def __init__(self, config: ScorerConfig, width: int | None = None, bias: float = GATE_BIAS):
        super().__init__(config)
        heads, m = config.num_kv_heads, width or GATE_WIDTH
        inputs = config.hidden_size if config.reads == "hidden" else 2 * heads * config.head_dim
        first = ("gate_proj", "up_proj") if config.gated else ("linear1",)
        for name in first:
            setattr(self, name, nn.Linear(inputs, m, bias=not config.gated))
        setattr(self, "down_proj" if config.gated else "linear2", nn.Linear(m, heads, bias=False))
        self.bias = nn.Parameter(torch.full((heads,), bias))
        nn.init.zeros_(self._last.weight)

    @property
    def _last(self) -> nn.Linear:
        return self.down_proj if self.config.gated else self.linear2

    def forward(self, seen: Signals) -> torch.Tensor:
        """Return the scores ``[.., H]`` float32, at most 0. See :class:`Gate`."""
        if self.config.reads == "hidden":
            x = seen.hidden.float()
        else:
            x = torch.cat([seen.k, seen.v], -1).flatten(-2).float()
        if self.config.gated:
            inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        else:
            inner = F.silu(self.linear1(x))
        return F.logsigmoid(self._last(inner) + self.bias)


class DMSGate(Gate):
    """DMS's eviction logit, negated: ``r = -(scale * x + b)``; a token is evicted where ``r < 0``.

    x is ``w_h . hidden``, or the borrowed channel, which is then removed from the query. ``scale`` makes a
    gate learn that many times faster than the rest of the model, as in the authors' code, where it is 100.

    Before training ``w`` is 0 and b is -5, so that nothing is evicted while slots are free.

    Source: arXiv:2506.05345.
    """

    def __init__(self, config: ScorerConfig, bias: float = EVICTION_OFFSET):
        super().__init__(config)
        if config.reads == "hidden":
            self.weight = nn.Parameter(torch.zeros(config.num_kv_heads, config.hidden_size))
        self.bias = nn.Parameter(torch.full((config.num_kv_heads,), bias))

    def forward(self, seen: Signals) -> torch.Tensor:
        """Return the scores ``[.., H]`` float32. See :class:`Gate`."""
        x = seen.channel.float() if self.borrows else F.linear(seen.hidden.float(), self.weight)
        return -(self.config.scale * x + self.bias)


GATES: dict[str, type[Gate]] = {"trimkv": TrimKVGate, "dms": DMSGate}
"""Gate classes by the ``scorer`` key of their config."""
