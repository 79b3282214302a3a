"""H2O: heavy hitters, by accumulated attention, and recent tokens (Zhang et al., 2023, arXiv 2306.14048)."""

from kvpop_vllm.kernels.ops import AttentionMass
from kvpop_vllm.policies.base import Order, Policy, Signal


class H2O(Policy):
    """``r_t(q)``: mean attention of queries t to q - 1 to token t.

    The attention is averaged over the query heads of a KV head. The paper accumulates without dividing, which
    favours old tokens. The mean over the queries that could see the token is the variant in use since then.
    Half of the budget is the window of recent tokens, as in the paper, unless ``--kv-window`` is given. There
    are no sinks. The attention of a query is normalised over the tokens it saw, and prefill evicts as
    decoding does.
    """

    name = "h2o"
    paper = "Zhang et al. 2023, arXiv:2306.14048"
    cost = "the attention weights once more, averaged over query heads"
    signals = frozenset({Signal.MASS})
    order = Order.COUPLED
    default_sinks, window_share = 0, 0.5

    def rule(self, layer, heads):
        return self.training_free_rule(heads, AttentionMass(mean=True))
