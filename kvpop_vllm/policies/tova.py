"""TOVA: evict the token that the newest query attends to least (Oren et al., 2024, arXiv 2401.06104)."""

from kvpop_vllm.kernels.ops import AttentionMass
from kvpop_vllm.policies.base import Order, Policy, Signal


class TOVA(Policy):
    """``r_t(q)``: attention of query q - 1 to token t, averaged over the query heads of a KV head.

    The paper averages over all heads of a layer, so that all heads keep the same tokens, and finds this as
    good as separate tokens per head. Here every KV head keeps its own tokens. The paper has neither sinks nor
    a window. Here the window is the newest token, which no query has seen when it is inserted. In the paper,
    query q votes before the eviction at position q, with B + 1 tokens in the cache. Here the cache never
    holds more than B tokens, so the token is evicted by the weights of q - 1 before q attends. Weights below
    e^-87 are 0, and tie.
    """

    name = "tova"
    paper = "Oren et al. 2024, arXiv:2401.06104"
    cost = "the attention weights once more, averaged over query heads"
    signals = frozenset({Signal.MASS})
    order = Order.COUPLED
    default_sinks, window_share = 0, 0.0

    def rule(self, layer, heads):
        return self.training_free_rule(heads, AttentionMass(mean=False))
