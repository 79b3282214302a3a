"""VaSE: retain tokens with large value ranges, sample the rest by attention (2026, arXiv 2606.03928)."""

from kvpop_vllm.kernels.draws import head_lanes
from kvpop_vllm.kernels.ops import SampledMass
from kvpop_vllm.policies.base import Order, Policy, Signal

RECENT = 64
"""Default window in tokens, the paper's residual length."""


class VaSE(Policy):
    """Retain the tokens with the widest value ranges, and a sample of the others weighted by attention.

    Tokens before the window are ranked in rounds, every 64 tokens. A quarter of them, sinks included, is
    retained because their values span the widest ranges. The others are sampled without replacement, weighted
    by the attention of the last 64 queries. This is the variant that the authors call AttnV, with smoothed
    weights.

    The authors drop 64 tokens at once in each round. Here the lowest-ranked tokens are evicted one per step
    until the next round (DESIGN "Rounds"). A new draw at every step would be a different method, because the
    lowest weights would take part in 64 draws.
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

    def rule(self, layer, heads):
        rounds = SampledMass(self.query_group, head_lanes(layer, heads, self.model.num_kv_heads))
        return self.training_free_rule(heads, None, rounds=rounds)
