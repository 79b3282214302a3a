"""VaSE: large value states stay, the rest is drawn by attention (2026, arXiv 2606.03928)."""

from __future__ import annotations

from dataclasses import replace

from kvpop_vllm.kernels.draws import head_lanes
from kvpop_vllm.kernels.ops import SampledMass
from kvpop_vllm.policies.base import Order, Policy, Signal

RECENT = 64
"""Default window in tokens, the paper's residual length."""


class VaSE(Policy):
    """In rounds of 64 tokens, of the tokens before the window: a quarter, sinks among them, stays because its values span the widest
    ranges; of the others a sample, drawn without replacement, weighted with the attention of the last 64 queries.

    That is the variant which its authors call AttnV, with smoothed weights. They drop 64 tokens together every 64 tokens. Here the
    lowest of the round leave one a step until the next one (DESIGN "Rounds"). Drawing anew at every step would not be the same: the
    lowest weights would be drawn against 64 times.
    """

    name = "vase"
    paper = "VaSE, arXiv:2606.03928"
    cost = "every 64 tokens the attention weights of 64 queries, and a draw; the queries are kept"
    state = "64 x G x D float32, G query heads a KV head"
    signals = frozenset({Signal.MASS, Signal.VALUE})
    order = Order.ROUNDS
    default_protect = True
    draws = True
    default_window = RECENT

    @property
    def state_fields(self):
        return {"queries": SampledMass.queries * self.query_group * self.model.head_dim}

    def rule(self, layer, heads):
        rounds = SampledMass(self.query_group, head_lanes(layer, heads, self.model.num_kv_heads))
        return replace(self.training_free_rule(heads, None), rounds=rounds)
