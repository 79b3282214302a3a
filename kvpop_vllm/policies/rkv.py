"""R-KV: importance and redundancy (Cai et al., 2025, arXiv 2505.24133)."""

from kvpop_vllm.kernels.ops import Redundancy
from kvpop_vllm.policies.base import Order, Policy, Signal

RECENT = 8
"""Default window in tokens, the paper's alpha."""


class RKV(Policy):
    """Retain tokens that the last 8 queries attend to and whose keys are not redundant, ``0.1 I - 0.9 R``.

    Tokens before the window are ranked in rounds, every 128 tokens. The authors drop 128 tokens at once in
    each round. Here the lowest-ranked tokens are evicted one per step until the next round (DESIGN "Rounds").
    Where the paper gives no number, the authors' code decides: which keys are similar, over how many
    neighbours attention is pooled, and that the newest of several similar tokens is spared.
    """

    name = "rkv"
    paper = "Cai et al. 2025, arXiv:2505.24133"
    cost = "every 128 tokens the attention weights of 8 queries and the cosines of all keys; the queries are kept"
    state = "8 x G x D float32, G query heads a KV head"
    signals = frozenset({Signal.MASS, Signal.KEY})
    order = Order.ROUNDS
    default_protect = True
    default_sinks, default_window = 0, RECENT

    def rule(self, layer, heads):
        # no scorer: a token scores 0 until a round ranks it
        return self.training_free_rule(heads, None, rounds=Redundancy(self.query_group))
